"""Megatron-LM arguments on their own: precision, recomputation, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Iterator

from .f_megatron_layout import also, flag, size
from .file_registry import MEGATRON, Settings, file_rule
from .registry import Finding

_ARGUMENTS = ("Megatron-LM arguments.py",)
_BASE = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "num_layers": 32, "seq_length": 4096}


@file_rule(
    "F121",
    MEGATRON,
    "flags that exclude each other",
    """Pairs of which Megatron-LM takes one: two precisions, iterations and samples as the length of a run, and the
    like.""",
    wrong={**_BASE, "fp16": True, "bf16": True},
    right={**_BASE, "bf16": True},
    sources=_ARGUMENTS,
)
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
    )
    for first, second in pairs:
        if settings.get(first) and settings.get(second):
            yield Finding(f"{first} and {second} exclude each other", (second,), related=also(settings, first))


@file_rule(
    "F122",
    MEGATRON,
    "a flag needs another one",
    """Flags that mean something only together: overlapped gathering of parameters needs the distributed optimizer and
    overlapped reduction, overlapped tensor-parallel communication needs sequence parallelism.""",
    wrong={**_BASE, "overlap_param_gather": True},
    right={
        **_BASE,
        "overlap_param_gather": True,
        "overlap_grad_reduce": True,
        "use_distributed_optimizer": True,
    },
    sources=_ARGUMENTS,
)
def flags_have_what_they_need(settings: Settings) -> Iterator[Finding]:
    """Fires for each flag that lacks what it needs."""
    needs = {
        "overlap_param_gather": ("use_distributed_optimizer", "overlap_grad_reduce"),
        "tp_comm_overlap": ("sequence_parallel",),
        "fp16_lm_cross_entropy": ("fp16",),
        "optimizer_cpu_offload": ("use_precision_aware_optimizer",),
    }
    for name, needed in needs.items():
        missing = [other for other in needed if not flag(settings, other)]
        if flag(settings, name) and missing:
            flags = " and ".join(f"--{other.replace('_', '-')}" for other in missing)
            yield Finding(f"{name} needs {' and '.join(missing)}", (name,), help=f"add {flags}")


@file_rule(
    "F123",
    MEGATRON,
    "recomputation is not described as it has to be",
    """Full recomputation needs recompute_method and recompute_num_layers; selective takes no method. Distributing saved
    activations needs tp > 1, full recomputation and no sequence parallelism.""",
    wrong={**_BASE, "recompute_granularity": "full"},
    right={**_BASE, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    sources=(*_ARGUMENTS, "Megatron-Core transformer_config.py"),
)
def recomputation_is_complete(settings: Settings) -> Iterator[Finding]:
    """Fires for each of them."""
    kind, path = settings.get("recompute_granularity"), ("recompute_granularity",)
    if kind == "full":
        missing = [name for name in ("recompute_method", "recompute_num_layers") if settings.left_out(name)]
        if missing:
            yield Finding(f"recompute_granularity full without {' and '.join(missing)}", path)
    elif kind == "selective" and not settings.left_out("recompute_method"):
        yield Finding("recompute_granularity selective takes no recompute_method", ("recompute_method",))
    saved = "distribute_saved_activations"
    if flag(settings, saved):
        if kind != "full":
            yield Finding(f"{saved} needs recompute_granularity full", (saved,))
        if flag(settings, "sequence_parallel") or size(settings, "tensor_model_parallel_size") == 1:
            yield Finding(f"{saved} needs tp > 1 and no sequence_parallel", (saved,))


@file_rule(
    "F124",
    MEGATRON,
    "a limit lies on the wrong side",
    """max_position_embeddings reaches as far as seq_length, min_lr is no more than lr, and checkpoints are kept at a
    multiple of the interval at which they are saved.""",
    wrong={**_BASE, "max_position_embeddings": 2048},
    right={**_BASE, "max_position_embeddings": 4096},
    sources=_ARGUMENTS,
)
def limits_hold(settings: Settings) -> Iterator[Finding]:
    """Fires for each of them."""
    for low, high in (("seq_length", "max_position_embeddings"), ("min_lr", "lr")):
        least, most = settings.number(low), settings.number(high)
        if least is not None and most is not None and least > most:
            yield Finding(f"{low} {least} > {high} {most}", (low,), related=also(settings, high))
    kept, saved = size(settings, "save_retain_interval", 0), size(settings, "save_interval", 0)
    if kept and saved and kept % saved:
        message = f"save_retain_interval {kept} / save_interval {saved} is not whole"
        yield Finding(message, ("save_retain_interval",), related=also(settings, "save_interval"))


@file_rule(
    "F125",
    MEGATRON,
    "FSDP2 with a layout that it does not run",
    """PyTorch's FSDP2 in Megatron-LM runs without pipeline and expert parallelism and with untied embeddings.""",
    wrong={**_BASE, "use_torch_fsdp2": True},
    right={**_BASE, "use_torch_fsdp2": True, "untie_embeddings_and_output_weights": True},
    sources=_ARGUMENTS,
)
def fsdp2_runs_the_layout(settings: Settings) -> Iterator[Finding]:
    """Fires for each of them."""
    if not flag(settings, "use_torch_fsdp2"):
        return
    for name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
        if size(settings, name) > 1:
            yield Finding(f"use_torch_fsdp2 with {name} {size(settings, name)}", (name,))
    if not flag(settings, "untie_embeddings_and_output_weights"):
        yield Finding("use_torch_fsdp2 with tied embeddings", ("use_torch_fsdp2",), help="untie them")
