"""Megatron-LM arguments on their own: precision, recomputation, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.backends.kinds import MEGATRON
from parcompile.diagnostics import Severity
from parcompile.lint.registry import Settings, file_rule
from parcompile.rules.registry import Finding

from .settings import also, attempt, flag, is_nvidias, is_open, size, spelled, where_decided


@file_rule("F121", MEGATRON)
@where_decided
def pairs_exclude_each_other(settings: Settings) -> Iterator[Finding]:
    """Fires for each pair of which both are given."""
    pairs = (
        ("fp16", "bf16"),
        ("fp8_format", "fp4_format"),
        ("train_iters", "train_samples"),
        ("train_iters", "lr_decay_samples"),
        ("train_iters", "lr_warmup_samples"),
        ("train_samples", "lr_decay_iters"),
        ("train_samples", "lr_warmup_iters"),
        ("lr_warmup_fraction", "lr_warmup_iters"),
        ("lr_warmup_fraction", "lr_warmup_samples"),
        ("use_torch_fsdp2", "use_distributed_optimizer"),
        ("use_torch_fsdp2", "fp16"),
        ("cpu_offloading", "recompute_granularity"),
        ("deterministic_mode", "cross_entropy_loss_fusion"),
        ("deterministic_mode", "tp_comm_overlap"),
    )
    for first, second in pairs:
        # A value that is not known still says that the flag is given.
        if settings.tree.get(first) and settings.tree.get(second):
            yield Finding(f"{first} and {second} exclude each other", (second,), related=also(settings, first))


@file_rule("F122", MEGATRON)
@where_decided
def flags_have_what_they_need(settings: Settings) -> Iterator[Finding]:
    """Fires for each flag that lacks what it needs."""
    for name, needed in _NEEDS.items():
        yield from attempt(_has_what_it_needs, settings, name, needed)
    if settings.get("optimizer_cpu_offload") is True and settings.get("optimizer") in (None, "adam"):
        yield from attempt(_has_what_it_needs, settings, "optimizer_cpu_offload", ((_PRECISION_AWARE,),))


_SHARDED = ("use_distributed_optimizer", "use_megatron_fsdp", "use_custom_fsdp")
_PRECISION_AWARE = "use_precision_aware_optimizer"
_NEEDS = {
    "overlap_param_gather": (_SHARDED, ("overlap_grad_reduce",)),
    "fp8_param_gather": ((*_SHARDED, "use_torch_fsdp2"),),
    "tp_comm_overlap": (("sequence_parallel",),),
    "fp16_lm_cross_entropy": (("fp16",),),
}
"""For each flag the groups of flags of which it needs one each."""


def _has_what_it_needs(settings: Settings, name: str, needed: tuple[tuple[str, ...], ...]) -> Iterator[Finding]:
    if settings.get(name) is not True:
        return
    if name == "overlap_param_gather" and settings.get("optimizer") == "dist_muon":
        needed = needed[1:]
    missing = [group[0] for group in needed if not any(settings.get(other) is True for other in group)]
    if missing and not is_open(settings):
        flags = " and ".join(map(spelled, missing))
        yield Finding(f"{name} needs {' and '.join(missing)}", (name,), help=f"add {flags}")


@file_rule("F123", MEGATRON)
@where_decided
def recomputation_is_complete(settings: Settings) -> Iterator[Finding]:
    """Fires for each of them."""
    kind, path = settings.get("recompute_granularity"), ("recompute_granularity",)
    if kind == "full":
        # The number of layers has the default 1 and nothing to fall back on for a method.
        if settings.left_out("recompute_method") and not is_open(settings):
            yield Finding("recompute_granularity full without recompute_method", path)
    elif kind == "selective" and not settings.left_out("recompute_method"):
        yield Finding("recompute_granularity selective takes no recompute_method", ("recompute_method",))
    saved = "distribute_saved_activations"
    if settings.get(saved) is True:
        if kind != "full":
            yield Finding(f"{saved} needs recompute_granularity full", (saved,))
        if settings.get("sequence_parallel") is True or size(settings, "tensor_model_parallel_size") == 1:
            yield Finding(f"{saved} needs tp > 1 and no sequence_parallel", (saved,))


@file_rule("F124", MEGATRON)
@where_decided
def limits_hold(settings: Settings) -> Iterator[Finding]:
    """Fires for each of them."""
    for low, high in (("seq_length", "max_position_embeddings"), ("min_lr", "lr")):
        yield from attempt(_is_no_more, settings, low, high)
    yield from attempt(_checkpoints_are_kept, settings)


def _is_no_more(settings: Settings, low: str, high: str) -> Iterator[Finding]:
    least, most = settings.number(low), settings.number(high)
    if least is not None and most is not None and least > most:
        yield Finding(f"{low} {least} > {high} {most}", (low,), related=also(settings, high))


def _checkpoints_are_kept(settings: Settings) -> Iterator[Finding]:
    kept, saved = size(settings, "save_retain_interval", 0), size(settings, "save_interval", 0)
    if kept and saved and kept % saved:
        message = f"save_retain_interval {kept} / save_interval {saved} is not whole"
        yield Finding(message, ("save_retain_interval",), related=also(settings, "save_interval"))


@file_rule("F125", MEGATRON)
@where_decided
def fsdp2_runs_the_layout(settings: Settings) -> Iterator[Finding]:
    """Fires for each of them."""
    if settings.get("use_torch_fsdp2") is not True:
        return
    for name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
        if size(settings, name) > 1:
            yield Finding(f"use_torch_fsdp2 with {name} {size(settings, name)}", (name,))
    if not flag(settings, "untie_embeddings_and_output_weights"):
        yield Finding("use_torch_fsdp2 with tied embeddings", ("use_torch_fsdp2",), help="untie them")


@file_rule("F126", MEGATRON)
@where_decided
def warm_up_ends_in_time(settings: Settings) -> Iterator[Finding]:
    """Fires where both are counted in the same unit."""
    for unit in ("iters", "samples"):
        warmup, end = f"lr_warmup_{unit}", f"lr_decay_{unit}"
        if settings.left_out(end):
            end = f"train_{unit}"
        rises, ends = settings.number(warmup), settings.number(end)
        if rises is not None and ends is not None and 0 < ends <= rises:
            yield Finding(f"{warmup} {rises:.16g} ≥ {end} {ends:.16g}", (warmup,), related=also(settings, end))
    fraction = settings.number("lr_warmup_fraction")
    if fraction is not None and fraction >= 1:
        yield Finding(f"lr_warmup_fraction {fraction:g} ≥ 1", ("lr_warmup_fraction",))


_REPLACED = {
    "batch_size": "--micro-batch-size",
    "warmup": "--lr-warmup-fraction",
    "model_parallel_size": "--tensor-model-parallel-size",
    "checkpoint_activations": "--recompute-activations, or --recompute-granularity with --recompute-method",
}


@file_rule("F127", MEGATRON, severity=Severity.WARNING)
@where_decided
def replaced_options_are_named(settings: Settings) -> Iterator[Finding]:
    """Fires for each of them, where no fork reads the arguments."""
    for name, other in _REPLACED.items():
        if settings.tree.get(name) and is_nvidias(settings):
            yield Finding(f"Megatron-LM refuses {spelled(name)}", (name,), help=f"use {other}")
