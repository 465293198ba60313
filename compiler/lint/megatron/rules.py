"""Megatron-LM arguments on their own: the layout, and training. The names are those of flags, with underscores."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parcompile.backends.kinds import MEGATRON
from parcompile.diagnostics import Severity
from parcompile.layout.groups import divisors
from parcompile.layout.pipeline import PipelineSplit
from parcompile.lint.registry import Settings, file_rule
from parcompile.rules import Finding, listed, nearest_multiples

from . import also, attempt, fits, flag, is_nvidias, is_open, one_of, size, spelled, trains, where_decided

# Megatron-LM arguments on their own: the layout but for its stages. The names are those of flags, with underscores.

_TP, _PP, _CP, _EP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


def _world(settings: Settings) -> int | None:
    """The world size when the file says it: torchrun's nodes and processes, or world_size."""
    if settings.number("world_size"):
        return size(settings, "world_size")
    if settings.number("nproc_per_node"):
        nodes = settings.get("nnodes", default=1)
        return size(settings, "nproc_per_node") * nodes if isinstance(nodes, int) else None
    return None


def _model_ranks(settings: Settings) -> int:
    return size(settings, _TP) * size(settings, _PP) * size(settings, _CP)


@file_rule("F101", MEGATRON)
@where_decided
def axes_divide_the_world(settings: Settings) -> Iterator[Finding]:
    """Fires when the world is known and not a multiple."""
    world, ranks = _world(settings), _model_ranks(settings)
    if world and world % ranks:
        names = [name for name in (_TP, _PP, _CP) if size(settings, name) > 1]
        terms = " · ".join(f"{name} {size(settings, name)}" for name in names)
        message = f"world size {world} / ({terms}) = {world} / {ranks} is not whole"
        yield Finding(message, (names[0],), related=also(settings, "nnodes", "nproc_per_node", *names[1:]))


@file_rule("F102", MEGATRON)
@where_decided
def batch_divides(settings: Settings) -> Iterator[Finding]:
    """Fires with dp where the world is known, else for the micro-batch alone."""
    total, micro = size(settings, "global_batch_size", 0), size(settings, "micro_batch_size", 0)
    dp = _dp(settings)
    if total and micro and total % (micro * dp):
        near = nearest_multiples(total, micro * dp)
        yield Finding(
            f"global_batch_size {total} / (micro_batch_size {micro} · dp {dp}) is not whole; nearest: {listed(near)}",
            ("global_batch_size",),
            related=also(settings, "micro_batch_size"),
        )


def _dp(settings: Settings) -> int:
    world, ranks = _world(settings), _model_ranks(settings)
    return world // ranks if world and world % ranks == 0 else 1


@file_rule("F103", MEGATRON)
@where_decided
def tp_divides(settings: Settings) -> Iterator[Finding]:
    """Fires for each of them."""
    tp = size(settings, _TP)
    for name in ("num_attention_heads", "ffn_hidden_size"):
        yield from attempt(_divides_over_tp, settings, name, tp)
    yield from attempt(_heads_divide_the_width, settings)
    if flag(settings, "group_query_attention"):
        heads, groups = size(settings, "num_attention_heads", 0), size(settings, "num_query_groups")
        if heads % groups:
            message = f"num_attention_heads {heads} / num_query_groups {groups} is not whole"
            yield Finding(message, ("num_query_groups",), related=also(settings, "num_attention_heads"))
        if groups % tp and tp % groups:
            message = f"num_query_groups {groups} on {_TP} {tp}: neither divides the other"
            yield Finding(message, (_TP,), related=also(settings, "num_query_groups"))


def _heads_divide_the_width(settings: Settings) -> Iterator[Finding]:
    hidden, heads = size(settings, "hidden_size", 0), size(settings, "num_attention_heads")
    if hidden % heads and settings.left_out("kv_channels") and not is_open(settings):
        message = f"hidden_size {hidden} / num_attention_heads {heads} is not whole, and kv_channels is left out"
        yield Finding(message, ("num_attention_heads",), related=also(settings, "hidden_size"))


def _divides_over_tp(settings: Settings, name: str, tp: int) -> Iterator[Finding]:
    total = size(settings, name, 0)
    if total % tp:
        fits = listed(divisors(total)[:12])
        yield Finding(
            f"{name} {total} / {_TP} {tp} is not whole; tp can be {fits}", (_TP,), related=also(settings, name)
        )


@file_rule("F106", MEGATRON)
@where_decided
def sequence_divides(settings: Settings) -> Iterator[Finding]:
    """Fires for the joint factor."""
    length, cp, tp = size(settings, "seq_length", 0), size(settings, _CP), size(settings, _TP)
    local = math.lcm(2 if cp > 1 else 1, tp if settings.get("sequence_parallel") is True else 1)
    if length % (cp * local):
        near = listed(nearest_multiples(length, cp * local))
        message = f"seq_length {length} / (cp {cp} · {local}) is not whole; nearest: {near}"
        yield Finding(message, ("seq_length",), related=also(settings, _CP, _TP))


@file_rule("F107", MEGATRON)
@where_decided
def heads_divide_over_cp(settings: Settings) -> Iterator[Finding]:
    """Fires for heads and query groups."""
    cp, tp = size(settings, _CP), size(settings, _TP)
    if one_of(settings.get("cp_comm_type")) != "a2a" or cp == 1:
        return
    names = ["num_attention_heads"]
    if settings.get("group_query_attention") is True:
        names.append("num_query_groups")
    for name in names:
        heads = size(settings, name, 0)
        if heads and heads % tp == 0 and heads // tp % cp:
            message = f"{name} {heads} / tp {tp} = {heads // tp} does not divide over cp {cp} (cp_comm_type a2a)"
            yield Finding(message, (_CP,), related=also(settings, name, "cp_comm_type"))


@file_rule("F108", MEGATRON)
@where_decided
def hierarchy_is_given(settings: Settings) -> Iterator[Finding]:
    """Fires when a2a+p2p has no sizes, and when sizes multiply to something else."""
    sizes_name = "hierarchical_context_parallel_sizes"
    kinds, sizes, cp = settings.get("cp_comm_type"), settings.get(sizes_name), size(settings, _CP)
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if isinstance(sizes, list) and sizes and all(isinstance(one, int) for one in sizes) and math.prod(sizes) != cp:
        terms = " · ".join(map(str, sizes))
        message = f"{sizes_name} {terms} = {math.prod(sizes)} ≠ {_CP} {cp}"
        yield Finding(message, (sizes_name,), related=also(settings, _CP))
    elif "a2a+p2p" in kinds and settings.left_out(sizes_name) and not is_open(settings):
        yield Finding(f"cp_comm_type a2a+p2p without {sizes_name}", ("cp_comm_type",))


@file_rule("F109", MEGATRON)
@where_decided
def experts_divide(settings: Settings) -> Iterator[Finding]:
    """Fires for each of them."""
    ep = size(settings, _EP)
    # Megatron-LM megatron/training/checkpointing.py, load_args_from_checkpoint: a checkpoint says it then.
    is_elsewhere = is_open(settings) or settings.get("use_checkpoint_args") is True
    if ep > 1 and settings.left_out("num_experts") and not is_elsewhere:
        yield Finding(f"{_EP} {ep} without num_experts", (_EP,))
    experts = size(settings, "num_experts", 0)
    if experts % ep:
        message = f"num_experts {experts} / {_EP} {ep} is not whole; ep can be {listed(divisors(experts))}"
        yield Finding(message, (_EP,), related=also(settings, "num_experts"))
    if experts:
        yield from attempt(_has_enough_experts, settings, experts)
        yield from attempt(_experts_with_tp, settings, experts)
        yield from attempt(_experts_with_biases, settings, experts)


def _has_enough_experts(settings: Settings, experts: int) -> Iterator[Finding]:
    chosen = size(settings, "moe_router_topk")
    if chosen > experts:
        yield Finding(f"moe_router_topk {chosen} > num_experts {experts}", ("moe_router_topk",))


def _experts_with_biases(settings: Settings, experts: int) -> Iterator[Finding]:
    name = "expert_tensor_parallel_size"
    tp = size(settings, _TP) if settings.left_out(name) else size(settings, name)
    if tp > 1 and is_nvidias(settings) and not flag(settings, "disable_bias_linear"):
        message = f"num_experts {experts} with biases, and experts split over {tp} ranks"
        hint = "add --disable-bias-linear, or --expert-tensor-parallel-size 1"
        # The dispatcher "allgather", and experts one by one, had biases before that.
        has_other = settings.tree.get("moe_token_dispatcher_type", "allgather") != "allgather"
        is_old = not has_other and not settings.tree.get("moe_grouped_gemm") and fits(settings, "core_v0.12.0")
        if is_old:
            message += ", which Megatron-LM refuses since core_v0.13.0"
        severity = Severity.WARNING if is_old else None
        related = also(settings, name, _TP)
        yield Finding(message, ("num_experts",), help=hint, related=related, severity=severity)


def _experts_with_tp(settings: Settings, experts: int) -> Iterator[Finding]:
    tp = size(settings, _TP)
    if tp > 1 and trains(settings) and is_nvidias(settings) and not flag(settings, "sequence_parallel"):
        message = f"num_experts {experts} with {_TP} {tp} and no sequence_parallel"
        yield Finding(message, ("num_experts",), help="add --sequence-parallel", related=also(settings, _TP))


@file_rule("F110", MEGATRON, severity=Severity.WARNING)
@where_decided
def sequence_parallel_has_an_effect(settings: Settings) -> Iterator[Finding]:
    """Fires for the flag at tp 1."""
    if settings.get("sequence_parallel") is True and size(settings, _TP) == 1:
        yield Finding(f"sequence_parallel has no effect with {_TP} 1", ("sequence_parallel",), help="remove it")


# Megatron-LM arguments on their own: layers over pipeline stages.


@file_rule("F104", MEGATRON)
@where_decided
def layers_divide(settings: Settings) -> Iterator[Finding]:
    """Fires when the layers that are left over do not divide."""
    layers = size(settings, "num_layers", 0)
    if not layers or settings.tree.get("pipeline_model_parallel_layout") or not _counts_layers(settings):
        return
    try:
        _split(settings).counts(layers)
    except ValueError as error:
        yield Finding(str(error), (_PP,), related=also(settings, "num_layers", *_ENDS))


def _counts_layers(settings: Settings) -> bool:
    """Whether every stage gets equally many: DeepSpeed's pipeline engine in forks balances whatever there is."""
    return is_nvidias(settings) or flag(settings, "no_pipeline_parallel")


_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def _split(settings: Settings, virtual: int = 1) -> PipelineSplit:
    first, last = (settings.number(name) for name in _ENDS)
    return PipelineSplit(
        size(settings, _PP),
        virtual,
        embedding=flag(settings, "account_for_embedding_in_pipeline_split"),
        loss=flag(settings, "account_for_loss_in_pipeline_split"),
        first=None if first is None else int(first),
        last=None if last is None else int(last),
    )


@file_rule("F105", MEGATRON)
@where_decided
def virtual_stages_fit(settings: Settings) -> Iterator[Finding]:
    """Fires for each of the three."""
    each, virtual = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
    given = [name for name in (each, virtual) if settings.number(name)]
    if not given:
        return
    if len(given) == 2:
        yield Finding(f"{each} and {virtual} exclude each other", (virtual,), related=also(settings, each))
    pp = size(settings, _PP)
    least = 3 if settings.get("no_overlap_p2p_communication") is True else 2
    stages, problem = _virtual(settings, given[0])
    if stages > 1 and pp < least:
        yield Finding(f"{given[0]} with {_PP} {pp}: it needs {least} or more", (given[0],), related=also(settings, _PP))
    elif problem:
        yield Finding(problem, (given[0],), related=also(settings, "num_layers", _PP, *_ENDS))


def _virtual(settings: Settings, name: str) -> tuple[int, str]:
    """Virtual stages of a rank, as validate_args counts them, and why the layers do not divide into them."""
    layers, split = size(settings, "num_layers", 0), _split(settings)
    if name == "num_virtual_stages_per_pipeline_rank":
        virtual = size(settings, name)
        return virtual, _indivisible(_split(settings, virtual), layers)
    if split.first is not None or split.last is not None:
        return 2, "layers of the first or last stage are given: that needs num_virtual_stages_per_pipeline_rank"
    share, rest = divmod(layers + split.embedding + split.loss, split.pp)
    if not layers or rest:
        return 1, ""  # F104 says it
    if share % size(settings, name):
        return 2, f"{share} layers of a stage / {name} {size(settings, name)} is not whole"
    return share // size(settings, name), ""


def _indivisible(split: PipelineSplit, layers: int) -> str:
    try:
        PipelineSplit(split.pp, 1, split.embedding, split.loss, split.first, split.last).counts(layers)
    except ValueError:
        return ""  # F104 says it
    try:
        split.counts(layers)
    except ValueError as error:
        return str(error)
    return ""


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
    kind = "selective" if settings.get("recompute_activations") is True else kind  # it comes last
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
