"""Megatron-LM's options of the layout: axes, stages, context parallelism, the sharded optimizer."""

from __future__ import annotations

from parcompile.backends import reading
from parcompile.backends.artefacts import effective_order, losses_of
from parcompile.backends.reading import (
    Arguments,
    Bundle,
    Draft,
    Entry,
    Row,
    Source,
    carried,
    leaving_open,
    stored_bundle,
)
from parcompile.backends.statements import Facts
from parcompile.layout.groups import Axis
from parcompile.layout.sequence import CpImplementation
from parcompile.spec import Spec
from parcompile.text.typed import list_of, word

ORDERS = (("tp", "cp", "ep", "dp", "pp"), ("tp", "cp", "ep", "pp", "dp"))
"""The orders of the axes that Megatron-LM knows, innermost first; the second is --use-tp-pp-dp-mapping."""

COMM_TYPES = {
    CpImplementation.RING: "p2p",
    CpImplementation.DOUBLE_RING: "p2p",
    CpImplementation.ALL_GATHER: "all_gather",
    CpImplementation.ULYSSES: "a2a",
    CpImplementation.USP: "a2a+p2p",
}
"""Values of --cp-comm-type."""
_IMPLEMENTATIONS = {name: one for one, name in COMM_TYPES.items() if one is not CpImplementation.DOUBLE_RING}
_IMPLEMENTATION, _SIZES = ("parallelism", "cp_implementation"), ("parallelism", "hierarchical_cp_sizes")
_VIRTUAL = ("parallelism", "num_virtual_stages_per_pipeline_rank")
_GROUP = ("parallelism", "microbatch_group_size_per_virtual_pipeline_stage")
_ORDER = ("parallelism", "order")
_EXPERT_TP = ("parallelism", "expert_tp")


def _read_experts(source: Source, draft: Draft) -> None:
    """Said where it is another than tp: a spec without it means tp."""
    size = source.value("expert_tensor_parallel_size", ("parallelism", "tp"))
    if size is None or size == source.value("tensor_model_parallel_size"):
        return
    if source.value("num_experts"):
        draft.set(_EXPERT_TP, size, said=True)
    else:
        source.ignore("expert_tensor_parallel_size", "the model has no experts")


@leaving_open(_IMPLEMENTATION)
def _read_context(source: Source, draft: Draft) -> None:
    """The implementation, when it is one for all layers and there is a context axis."""
    kinds = source.value("cp_comm_type", _IMPLEMENTATION)
    sizes = source.value("hierarchical_context_parallel_sizes", _SIZES)
    cp = source.value("context_parallel_size")
    if not isinstance(cp, int) or cp == 1:
        source.ignore(("cp_comm_type", "hierarchical_context_parallel_sizes"), "one rank holds the whole sequence")
        return
    kinds = list_of(word, kinds if isinstance(kinds, list) else [kinds], "cp_comm_type")
    if len(set(kinds)) != 1 or kinds[0] not in _IMPLEMENTATIONS:
        source.lose("cp_comm_type", "a spec has one implementation for all layers: p2p, all_gather, a2a or a2a+p2p")
        return
    draft.set(_IMPLEMENTATION, _IMPLEMENTATIONS[kinds[0]].value, said=source.has("cp_comm_type"))
    if kinds[0] != "a2a+p2p":
        source.ignore("hierarchical_context_parallel_sizes", f"cp_comm_type {kinds[0]} has one level")
    elif isinstance(sizes, list) and len(sizes) == 2:
        draft.set(_SIZES, sizes, said=True)
    elif sizes is not None:
        source.lose("hierarchical_context_parallel_sizes", "a spec has two levels")


def _write_order(spec: Spec) -> Arguments:
    order = effective_order(spec.parallelism)
    inverted = Axis.DP in order and Axis.PP in order and order.index(Axis.DP) > order.index(Axis.PP)
    return {"use_tp_pp_dp_mapping": True} if inverted else {}


@leaving_open(_ORDER)
def _read_order(source: Source, draft: Draft) -> None:
    inverted = source.value("use_tp_pp_dp_mapping", _ORDER) is True
    draft.set(_ORDER, "-".join(ORDERS[inverted]), said=source.has("use_tp_pp_dp_mapping"))


@leaving_open(_VIRTUAL)
def _read_stages(source: Source, draft: Draft) -> None:
    for part in ("embedding", "loss"):
        name = f"account_for_{part}_in_pipeline_split"
        draft.carry(source, name, ("parallelism", name))
    for end in ("first", "last"):
        name = f"num_layers_in_{end}_pipeline_stage"
        draft.carry(source, f"decoder_{end}_pipeline_num_layers", ("parallelism", name))
    source.lose("pipeline_model_parallel_layout", "a spec gives layers to stages by numbers, not by a pattern")
    draft.carry(source, _VIRTUAL[1], _VIRTUAL)
    each = "num_layers_per_virtual_pipeline_stage"
    layers = source.value(each, _VIRTUAL)
    virtual = None if layers is None else virtual_stages(source, layers)
    if virtual is not None:
        draft.set(_VIRTUAL, virtual, said=True)
    if draft.values.get(_VIRTUAL, 1) != 1:
        draft.carry(source, _GROUP[1], _GROUP)
    else:
        source.ignore(_GROUP[1], "there are no virtual stages")


def virtual_stages(source: Source, each: int) -> int | None:
    """Virtual stages of a rank that has `each` layers in one; None when they do not divide, which Megatron-LM refuses.

    Raises:
        UndecidedError: the file does not say the layers or the stages.
    """
    layers, pp = source.value("num_layers"), source.value("pipeline_model_parallel_size")
    if not isinstance(layers, int) or not isinstance(pp, int) or each < 1:
        return None
    for part in ("embedding", "loss"):
        layers += source.value(f"account_for_{part}_in_pipeline_split") is True
    return layers // (pp * each) if layers % (pp * each) == 0 else None


@leaving_open(reading.STAGE)
def _read_sharding(source: Source, draft: Draft) -> None:
    """The stage of ZeRO that shards as much: the distributed optimizer is stage 1, FSDP is 3 if not told less."""
    # Its former name for Muon with the distributed optimizer.
    distributed = source.given.get("optimizer") == "dist_muon"
    distributed = source.value("use_distributed_optimizer", reading.STAGE) is True or distributed
    fsdp = (
        source.value("use_megatron_fsdp", reading.STAGE) is True
        or source.value("use_custom_fsdp", reading.STAGE) is True
    )
    strategy = source.value("data_parallel_sharding_strategy", reading.STAGE)
    torch_fsdp = source.value("use_torch_fsdp2", reading.STAGE) is True
    stages = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    stage = 3 if torch_fsdp else stages.get(strategy, 3) if fsdp else 1 if distributed else 0
    if not fsdp:
        source.ignore("data_parallel_sharding_strategy", "only --use-megatron-fsdp reads it")
    draft.set(reading.STAGE, stage, said=True)


_FACTS: Facts = {
    "comm_type": lambda spec: COMM_TYPES[spec.parallelism.cp_implementation],
    "kv_heads_of_rank": lambda spec: max(1, spec.model.shape.num_key_value_heads // spec.parallelism.tp),
}

ROWS: tuple[Row, ...] = (
    *carried("megatron.axes"),
    Bundle(
        ("expert_tensor_parallel_size",),
        _read_experts,
        lambda spec: {"expert_tensor_parallel_size": spec.parallelism.expert_tp or spec.parallelism.tp},
    ),
    Entry("sequence_parallel", ("parallelism", "sequence_parallel"), write=lambda is_on: is_on or None),
    stored_bundle("megatron.context", _read_context, facts=_FACTS),
    Bundle(("use_tp_pp_dp_mapping",), _read_order, _write_order, lambda spec: losses_of("megatron.order", spec)),
    # Megatron-LM takes a number of virtual stages also where the first or last stage has a number of its own.
    stored_bundle(
        "megatron.stages", _read_stages, "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout"
    ),
    stored_bundle(
        "megatron.sharding",
        _read_sharding,
        *("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2", "data_parallel_sharding_strategy"),
    ),
)
"""The layout, in the order in which it is written."""
