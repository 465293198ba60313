"""Megatron-LM arguments on their own: the layout. The names are those of the flags, with underscores."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parcompile.diagnostics import Related, Severity

from .arithmetic import divisors, listed, nearest_multiples
from .file_registry import MEGATRON, Settings, file_rule
from .registry import Finding

_ARGUMENTS = ("Megatron-LM arguments.py",)
_TP, _PP, _CP, _EP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_BASE = {
    _TP: 2,
    _PP: 2,
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "micro_batch_size": 1,
    "global_batch_size": 64,
}


def size(settings: Settings, name: str, default: int = 1) -> int:
    """A whole number of 1 or more; the default when it is left out or cannot be read."""
    value = settings.number(name)
    return int(value) if value is not None and value >= 1 and value == int(value) else default


def flag(settings: Settings, name: str) -> bool:
    """Whether a flag is given."""
    return settings.get(name) is True


def also(settings: Settings, *names: str) -> tuple[Related, ...]:
    """Where these arguments stand."""
    return tuple(Related(f"{name} {settings.get(name)} is set here", (name,)) for name in names if settings.get(name))


def _world(settings: Settings) -> int | None:
    """The world size when the file says it: torchrun's nodes and processes, or world_size."""
    if settings.number("world_size"):
        return size(settings, "world_size")
    per_node = settings.number("nproc_per_node")
    nodes = settings.get("nnodes", default=1)
    return int(per_node) * nodes if per_node and isinstance(nodes, int) else None


def _model_ranks(settings: Settings) -> int:
    return size(settings, _TP) * size(settings, _PP) * size(settings, _CP)


@file_rule(
    "F101",
    MEGATRON,
    "the axes do not divide the world size",
    """Data parallelism gets what tp · pp · cp leave of the ranks that torchrun starts.""",
    wrong={**_BASE, "nnodes": 1, "nproc_per_node": 6},
    right={**_BASE, "nnodes": 1, "nproc_per_node": 8},
    sources=_ARGUMENTS,
)
def axes_divide_the_world(settings: Settings) -> Iterator[Finding]:
    """Fires when the world is known and not a multiple."""
    world, ranks = _world(settings), _model_ranks(settings)
    if world and world % ranks:
        names = [name for name in (_TP, _PP, _CP) if size(settings, name) > 1]
        terms = " · ".join(f"{name} {size(settings, name)}" for name in names)
        message = f"world size {world} / ({terms}) = {world} / {ranks} is not whole"
        yield Finding(message, (names[0],), related=also(settings, "nnodes", "nproc_per_node", *names[1:]))


@file_rule(
    "F102",
    MEGATRON,
    "the global batch does not divide",
    """global_batch_size is a multiple of micro_batch_size · dp; the ratio is the number of micro-batches.""",
    wrong={**_BASE, "nproc_per_node": 8, "global_batch_size": 63},
    right={**_BASE, "nproc_per_node": 8, "global_batch_size": 64},
    sources=("Megatron-LM core/num_microbatches_calculator.py",),
)
def batch_divides(settings: Settings) -> Iterator[Finding]:
    """Fires with dp where the world is known, else for the micro-batch alone."""
    total, micro = size(settings, "global_batch_size", 0), size(settings, "micro_batch_size", 0)
    world, ranks = _world(settings), _model_ranks(settings)
    dp = world // ranks if world and world % ranks == 0 else 1
    if total and micro and total % (micro * dp):
        near = nearest_multiples(total, micro * dp)
        yield Finding(
            f"global_batch_size {total} / (micro_batch_size {micro} · dp {dp}) is not whole; nearest: {listed(near)}",
            ("global_batch_size",),
            related=also(settings, "micro_batch_size"),
        )


@file_rule(
    "F103",
    MEGATRON,
    "heads or widths do not divide over tp",
    """tp cuts attention heads, query groups (unless tp is a multiple of them) and the hidden width of the MLP.""",
    wrong={**_BASE, "num_attention_heads": 25},
    right={**_BASE, "num_attention_heads": 24},
    sources=("Megatron-Core transformer_config.py, attention.py",),
)
def tp_divides(settings: Settings) -> Iterator[Finding]:
    """Fires for each of them."""
    tp = size(settings, _TP)
    for name in ("num_attention_heads", "ffn_hidden_size"):
        total = size(settings, name, 0)
        if total % tp:
            fits = listed(divisors(total)[:12])
            message = f"{name} {total} / {_TP} {tp} is not whole; tp can be {fits}"
            yield Finding(message, (_TP,), related=also(settings, name))
    groups = size(settings, "num_query_groups", 0)
    if groups and groups % tp and tp % groups:
        message = f"num_query_groups {groups} on {_TP} {tp}: neither divides the other"
        yield Finding(message, (_TP,), related=also(settings, "num_query_groups"))


@file_rule(
    "F104",
    MEGATRON,
    "the layers do not divide into stages",
    """num_layers is a multiple of pp, unless embedding and loss are counted as layers, or the first and last stage get
    numbers of their own; then what is left divides over the other stages.""",
    wrong={**_BASE, _PP: 16, "num_layers": 126},
    right={
        **_BASE,
        _PP: 16,
        "num_layers": 126,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
    sources=(*_ARGUMENTS, "Megatron-LM#1304"),
)
def layers_divide(settings: Settings) -> Iterator[Finding]:
    """Fires when the layers that are left over do not divide."""
    layers, pp = size(settings, "num_layers", 0), size(settings, _PP)
    if not layers or settings.get("pipeline_model_parallel_layout"):
        return
    counted = [name for name in ("embedding", "loss") if flag(settings, f"account_for_{name}_in_pipeline_split")]
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    given = [int(settings.number(name) or 0) for name in ends if settings.number(name) is not None]
    total, stages = layers + len(counted) - sum(given), pp - len(given)
    if stages < 1 or total < 0 or total % stages:
        terms = f"num_layers {layers}" + (f" + {len(counted)}" if counted else "") + "".join(f" − {n}" for n in given)
        message = f"({terms}) / {stages} stages is not whole: pp {pp}"
        yield Finding(message, (_PP,), related=also(settings, "num_layers", *ends))


@file_rule(
    "F105",
    MEGATRON,
    "virtual stages do not fit",
    """Interleaving needs pp > 1 (pp > 2 without overlap_p2p_communication), one of its two options, and layers of a
    stage that divide into virtual stages.""",
    wrong={**_BASE, "num_layers_per_virtual_pipeline_stage": 5},
    right={**_BASE, "num_layers_per_virtual_pipeline_stage": 4},
    sources=_ARGUMENTS,
)
def virtual_stages_fit(settings: Settings) -> Iterator[Finding]:
    """Fires for each of the three."""
    names = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    given = [name for name in names if settings.number(name)]
    if not given:
        return
    pp, layers = size(settings, _PP), size(settings, "num_layers", 0)
    if len(given) == 2:
        yield Finding(f"{names[0]} and {names[1]} exclude each other", (names[1],), related=also(settings, names[0]))
    least = 3 if flag(settings, "no_overlap_p2p_communication") else 2
    if pp < least:
        yield Finding(f"{given[0]} with {_PP} {pp}: it needs {least} or more", (given[0],), related=also(settings, _PP))
    share = layers // pp
    if layers and layers % pp == 0 and share % size(settings, given[0]):
        message = f"{layers} / {pp} = {share} layers of a stage / {given[0]} {size(settings, given[0])} is not whole"
        yield Finding(message, (given[0],), related=also(settings, "num_layers", _PP))


@file_rule(
    "F106",
    MEGATRON,
    "the sequence does not divide",
    """Context parallelism cuts a sequence into 2 · cp chunks; sequence parallelism cuts each rank's share over tp.""",
    wrong={**_BASE, _CP: 4, "seq_length": 4092},
    right={**_BASE, _CP: 4, "seq_length": 4096},
    sources=(*_ARGUMENTS, "TransformerEngine context_parallel.py"),
)
def sequence_divides(settings: Settings) -> Iterator[Finding]:
    """Fires for the joint factor."""
    length, cp, tp = size(settings, "seq_length", 0), size(settings, _CP), size(settings, _TP)
    local = math.lcm(2 if cp > 1 else 1, tp if flag(settings, "sequence_parallel") else 1)
    if length % (cp * local):
        near = listed(nearest_multiples(length, cp * local))
        message = f"seq_length {length} / (cp {cp} · {local}) is not whole; nearest: {near}"
        yield Finding(message, ("seq_length",), related=also(settings, _CP, _TP))


@file_rule(
    "F107",
    MEGATRON,
    "heads do not divide over an all-to-all context parallelism",
    """With cp_comm_type a2a each rank attends over the whole sequence with heads / tp / cp heads.""",
    wrong={**_BASE, _CP: 8, "cp_comm_type": "a2a", "num_query_groups": 8},
    right={**_BASE, _CP: 4, "cp_comm_type": "a2a", "num_query_groups": 8},
    sources=("TransformerEngine context_parallel.py",),
)
def heads_divide_over_cp(settings: Settings) -> Iterator[Finding]:
    """Fires for heads and query groups."""
    cp, tp = size(settings, _CP), size(settings, _TP)
    if settings.get("cp_comm_type") != "a2a" or cp == 1:
        return
    for name in ("num_attention_heads", "num_query_groups"):
        heads = size(settings, name, 0)
        if heads and heads % tp == 0 and heads // tp % cp:
            message = f"{name} {heads} / tp {tp} = {heads // tp} does not divide over cp {cp} (cp_comm_type a2a)"
            yield Finding(message, (_CP,), related=also(settings, name, "cp_comm_type"))


@file_rule(
    "F108",
    MEGATRON,
    "the hierarchical ring does not multiply to cp",
    """The product of hierarchical_context_parallel_sizes is cp, and cp_comm_type a2a+p2p needs them.""",
    wrong={**_BASE, _CP: 8, "cp_comm_type": "a2a+p2p"},
    right={**_BASE, _CP: 8, "cp_comm_type": "p2p"},
    sources=_ARGUMENTS,
)
def hierarchy_is_given(settings: Settings) -> Iterator[Finding]:
    """Fires when a2a+p2p has no sizes."""
    if settings.get("cp_comm_type") == "a2a+p2p" and settings.left_out("hierarchical_context_parallel_sizes"):
        yield Finding("cp_comm_type a2a+p2p without hierarchical_context_parallel_sizes", ("cp_comm_type",))


@file_rule(
    "F109",
    MEGATRON,
    "experts do not divide",
    """Expert parallelism needs experts, a number of them that it divides, and at least as many as a token visits; with
    tp > 1 it needs sequence parallelism, which Megatron-LM says only in the first training step.""",
    wrong={**_BASE, _EP: 4, "num_experts": 6, "sequence_parallel": True},
    right={**_BASE, _EP: 4, "num_experts": 8, "sequence_parallel": True},
    sources=(*_ARGUMENTS, "Megatron-LM core/transformer/moe/moe_layer.py"),
)
def experts_divide(settings: Settings) -> Iterator[Finding]:
    """Fires for each of them."""
    ep, experts, tp = size(settings, _EP), size(settings, "num_experts", 0), size(settings, _TP)
    if ep > 1 and not experts:
        yield Finding(f"{_EP} {ep} without num_experts", (_EP,))
    elif experts % ep:
        message = f"num_experts {experts} / {_EP} {ep} is not whole; ep can be {listed(divisors(experts))}"
        yield Finding(message, (_EP,), related=also(settings, "num_experts"))
    chosen = size(settings, "moe_router_topk")
    if experts and chosen > experts:
        yield Finding(f"moe_router_topk {chosen} > num_experts {experts}", ("moe_router_topk",))
    if experts and tp > 1 and not flag(settings, "sequence_parallel"):
        message = f"num_experts {experts} with {_TP} {tp} and no sequence_parallel"
        yield Finding(message, ("num_experts",), help="add --sequence-parallel", related=also(settings, _TP))


@file_rule(
    "F110",
    MEGATRON,
    "sequence parallelism is switched off",
    """With tp 1 Megatron-LM drops sequence_parallel without a word.""",
    wrong={**_BASE, _TP: 1, "sequence_parallel": True},
    right={**_BASE, "sequence_parallel": True},
    severity=Severity.WARNING,
    sources=_ARGUMENTS,
)
def sequence_parallel_has_an_effect(settings: Settings) -> Iterator[Finding]:
    """Fires for the flag at tp 1."""
    if flag(settings, "sequence_parallel") and size(settings, _TP) == 1:
        yield Finding(f"sequence_parallel has no effect with {_TP} 1", ("sequence_parallel",), help="remove it")
