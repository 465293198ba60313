"""Megatron-LM arguments on their own: the layout. The names are those of flags, with underscores."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parcompile.backends.kinds import MEGATRON
from parcompile.diagnostics import Severity
from parcompile.layout.groups import divisors
from parcompile.layout.pipeline import PipelineSplit
from parcompile.lint.registry import Settings, file_rule
from parcompile.rules.arithmetic import listed, nearest_multiples
from parcompile.rules.registry import Finding

from .settings import also, attempt, fits, flag, is_nvidias, is_open, one_of, size, trains, where_decided

# Megatron-LM arguments on their own: the layout but for its stages. The names are those of flags, with underscores.

_TP, PP, _CP, _EP = (
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
    return size(settings, _TP) * size(settings, PP) * size(settings, _CP)


@file_rule("F101", MEGATRON)
@where_decided
def axes_divide_the_world(settings: Settings) -> Iterator[Finding]:
    """Fires when the world is known and not a multiple."""
    world, ranks = _world(settings), _model_ranks(settings)
    if world and world % ranks:
        names = [name for name in (_TP, PP, _CP) if size(settings, name) > 1]
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
        yield Finding(str(error), (PP,), related=also(settings, "num_layers", *_ENDS))


def _counts_layers(settings: Settings) -> bool:
    """Whether every stage gets equally many: DeepSpeed's pipeline engine in forks balances whatever there is."""
    return is_nvidias(settings) or flag(settings, "no_pipeline_parallel")


_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def _split(settings: Settings, virtual: int = 1) -> PipelineSplit:
    first, last = (settings.number(name) for name in _ENDS)
    return PipelineSplit(
        size(settings, PP),
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
    pp = size(settings, PP)
    least = 3 if settings.get("no_overlap_p2p_communication") is True else 2
    stages, problem = _virtual(settings, given[0])
    if stages > 1 and pp < least:
        yield Finding(f"{given[0]} with {PP} {pp}: it needs {least} or more", (given[0],), related=also(settings, PP))
    elif problem:
        yield Finding(problem, (given[0],), related=also(settings, "num_layers", PP, *_ENDS))


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
