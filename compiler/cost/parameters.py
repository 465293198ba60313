"""Parameters per rank and stage, exact."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from parcompile.layout.pipeline import Stage
from parcompile.layout.shards import GroupKind, group_kind, tensor_layout
from parcompile.model import Parameter, ParameterTable, within
from parcompile.model.derived_rows import parameter_table
from parcompile.model.shape import ModelShape


def stage_numel(
    table: ParameterTable,
    stage: Stage,
    tp: int,
    *,
    ep: int = 1,
    expert_tp: int | None = None,
    vocab_divisible_by: int = 1,
    tied: bool = False,
) -> int:
    """Parameters that one rank of a stage trains, padding of the vocabulary included; frozen ones are left out.

    With tied embeddings and several stages, the last stage holds a copy of the embedding for its head.
    """

    def local(parameter: Parameter) -> int:
        layout = tensor_layout(parameter, tp, ep=ep, expert_tp=expert_tp, vocab_divisible_by=vocab_divisible_by)
        return layout.local_numel

    return sum(local(parameter) * count for parameter, count in trained_tensors(table, stage, tied=tied))


def trained_tensors(table: ParameterTable, stage: Stage, *, tied: bool = False) -> Iterator[tuple[Parameter, int]]:
    """The rows of the tensors that a rank of a stage trains, and how many of each."""
    if stage.has_embedding:
        yield from ((parameter, 1) for parameter in table.before if parameter.trained)
    for parameter in table.layer:
        assert parameter.layers is not None
        if parameter.trained and (count := len(within(parameter.layers, stage.layers))):
            yield parameter, count
    if stage.has_head:
        yield from ((parameter, 1) for parameter in table.after)
        if tied and not stage.has_embedding:
            yield table.before[0], 1


@functools.lru_cache(maxsize=65536)
def expert_numel(shape: ModelShape, stage: Stage, tp: int, ep: int, expert_tp: int | None = None) -> int:
    """Parameters of routed experts that one rank of a stage holds, remembered."""
    found = 0
    for parameter in parameter_table(shape).layer:
        assert parameter.layers is not None
        if parameter.expert_dim is not None:
            held = len(within(parameter.layers, stage.layers))
            found += tensor_layout(parameter, tp, ep=ep, expert_tp=expert_tp).local_numel * held
    return found


@functools.lru_cache(maxsize=8192)
def numels_apart(
    shape: ModelShape,
    stage: Stage,
    tp: int,
    ep: int,
    expert_tp: int | None,
    vocab_divisible_by: int,
    muon: bool,
    no_weight_decay: str | None,
) -> Mapping[GroupKind, tuple[int, int]]:
    """Elements that one rank of a stage has in other groups of the optimizer than the usual one.

    Of each group those of dealt experts, and all else.
    """
    found: dict[GroupKind, tuple[int, int]] = {}
    for parameter, count in trained_tensors(parameter_table(shape), stage):
        kind = group_kind(parameter, muon=muon, no_weight_decay=no_weight_decay)
        if kind != GroupKind():
            layout = tensor_layout(parameter, tp, ep=ep, expert_tp=expert_tp, vocab_divisible_by=vocab_divisible_by)
            dealt, others = found.get(kind, (0, 0))
            numel = count * layout.local_numel
            found[kind] = (dealt + numel, others) if layout.ep > 1 else (dealt, others + numel)
    return found


@functools.lru_cache(maxsize=65536)
def rank_parameters(
    shape: ModelShape,
    stage: Stage,
    tp: int,
    *,
    ep: int = 1,
    expert_tp: int | None = None,
    vocab_divisible_by: int = 1,
) -> int:
    """Parameters on one rank of a stage of a model, remembered: stages with the same kinds of layers are equal.

    Raises:
        SplitError: a tensor cannot be cut over tp.
    """
    if not is_even(shape):
        return _rank_parameters(shape, stage, tp, (ep, expert_tp), vocab_divisible_by)
    # A model may have fewer layers than it says are dense.
    first_moe = (
        shape.num_hidden_layers if shape.moe is None else min(shape.moe.first_moe_layer, shape.num_hidden_layers)
    )
    dense = len(range(stage.layers.start, min(stage.layers.stop, first_moe)))
    start = first_moe - dense
    alike = Stage(range(start, start + len(stage.layers)), stage.has_embedding, stage.has_head)
    return _rank_parameters(shape, alike, tp, (ep, expert_tp), vocab_divisible_by)


@functools.lru_cache(maxsize=1024)
def is_even(shape: ModelShape) -> bool:
    """Whether all dense layers are equal, and all with experts, which come behind them."""
    if any(one.states or one.behind for one in shape.parts) or shape.kinds or shape.stack.blocks is not None:
        return False
    if shape.moe is not None and shape.moe.layers is not None:
        return False
    every = range(shape.num_hidden_layers)
    first = min(shape.moe.first_moe_layer, len(every)) if shape.moe is not None else len(every)
    stretches = [list(one) for one in (every, every[:first], every[first:])]
    return all(list(one.layers) in stretches for one in parameter_table(shape).layer if one.layers is not None)


@functools.lru_cache(maxsize=8192)
def _rank_parameters(
    shape: ModelShape, stage: Stage, tp: int, over: tuple[int, int | None], vocab_divisible_by: int
) -> int:
    return stage_numel(
        parameter_table(shape),
        stage,
        tp,
        ep=over[0],
        expert_tp=over[1],
        vocab_divisible_by=vocab_divisible_by,
        tied=shape.tie_word_embeddings,
    )
