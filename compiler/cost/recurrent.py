"""What layers that carry a state, and those that choose keys, keep for backward and hold while they work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from parcompile.layout.pipeline import Stage
from parcompile.model import within
from parcompile.model.blocks.block import StateCut
from parcompile.model.blocks.indexer import Indexer
from parcompile.model.compressed_keys import CompressedKeys, KeyChoice
from parcompile.model.shape import ModelShape

from .activations import LayerBytes
from .blocks import compressed_layers, gathered_bytes, handed_bytes, kept_apart
from .kept import CHOICE, SEVERAL, Sort, rows_for, sizes, sorts, types_with
from .workload import Workload

if TYPE_CHECKING:
    from parcompile.model.blocks.recurrent import Recurrent

INDEX_BYTES = 4
"""A chosen key is an int32."""

SCORES_AT_ONCE = 2**24
"""Scores of an indexer that the runtime has in memory at a time."""

ROWS, SPREAD, PIECES = "rows>1", "cp>1", "pieces>1"
SHARED, CHUNKS, WHOLE = "heads>groups", "chunks>1", "whole chunks"
"""Questions about a module that carries a state: of a micro-batch, a sequence, a rank's part of it, heads, a piece."""


def chooses_keys(shape: ModelShape, layers: range) -> bool:
    """Whether an indexer chooses keys in some of these layers."""
    indexer = shape.part(Indexer)
    return indexer is not None and len(within(indexer.layers, layers)) > 0


def scoring_bytes(work: Workload, stage: Stage) -> float:
    """What an indexer holds while it scores: its scores in fp32, and what is left of them above zero.

    Each row of a batch is scored alone. Of compressed keys this is scaled, too, in a tensor of its own.
    """
    indexer = work.shape.part(Indexer)
    if work.shape.heads.low_rank is not None:
        length, queries = work.sequence_length, work.sequence_length // work.cp
        scored = (queries * choice.heads * keys.count(length) for _, keys, choice in _choices(work.shape, stage.layers))
        return 3.0 * 4 * min(SCORES_AT_ONCE, max(scored, default=0))
    if indexer is None or not within(indexer.layers, stage.layers):
        return 0.0
    if indexer.block:  # what each query sees, twice
        return 2.0 * work.local_tokens * work.sequence_length
    queries = work.local_tokens // work.micro_batch
    return 2 * 4 * min(SCORES_AT_ONCE, queries * indexer.heads * indexer.scored(work.sequence_length))


def choice_bytes(work: Workload, stage: Stage) -> float:
    """What the layers of a stage keep for backward of one micro-batch: what hides keys; recomputed, the choice.

    And the keys of other ranks' windows.
    """
    length, others = work.sequence_length, gathered_bytes(work, stage.layers)
    if not work.recomputes_layers:
        return others + sum(count * size for count, size in kept_apart(work, stage.layers, CHOICE))
    if work.shape.heads.low_rank is not None:
        # A choice is of 64-bit numbers.
        of_kinds = _choices(work.shape, stage.layers)
        chosen = sum(count * min(choice.top_k, keys.count(length)) for count, keys, choice in of_kinds)
        return others + work.local_tokens * 2 * INDEX_BYTES * chosen
    indexer = work.shape.part(Indexer)
    if indexer is None:
        return 0.0
    # The places of chosen pools are padded to as many as there may be, with the rest of a pool behind them.
    most = indexer.top_k + indexer.pool - 1 if indexer.pool else min(indexer.top_k, length)
    # Of blocks what each query sees is kept, a byte for each key.
    chosen = length if indexer.block else INDEX_BYTES * most
    return float(work.local_tokens * chosen * len(within(indexer.layers, stage.layers)))


def hiding_bytes(work: Workload, stage: Stage) -> float:
    """What hides keys from the queries of one layer: of compressed keys the most, of later windows too."""
    return max((size for _, size in kept_apart(work, stage.layers, CHOICE)), default=0.0)


def _choices(shape: ModelShape, layers: range) -> Iterator[tuple[int, CompressedKeys, KeyChoice]]:
    """The same of those among whose compressed keys an indexer chooses."""
    of_kinds = compressed_layers(shape, layers)
    return ((count, keys, keys.choice) for count, keys, _ in of_kinds if keys.choice is not None)


def chunks_in_turn(work: Workload) -> int:
    """What the recurrence of a layer takes one after the other on a rank; 0 where no layer carries a state."""
    if (one := _carrying(work.shape)) is None:
        return 0
    cut = _cut(work)
    return cut.pieces * -(-cut.length // one.chunk)


def state_answers(cut: StateCut, one: Recurrent) -> dict[str, bool]:
    """To questions about a module that carries a state."""
    of_piece = {CHUNKS: cut.length > one.chunk, WHOLE: cut.length % one.chunk == 0}
    of_ranks = {SEVERAL: cut.tp > 1, ROWS: cut.rows > 1, SPREAD: cut.cp > 1, PIECES: cut.pieces > 1}
    return {**of_ranks, **of_piece, SHARED: one.heads > one.groups}


def state_sizes(cut: StateCut, one: Recurrent) -> tuple[dict[str, float], dict[str, float]]:
    """The sizes of a module that carries a state on its rank, by name; and what its rows are of."""
    chunk = one.chunk_of(cut.length)
    chunks, pieces = -(-cut.length // chunk), cut.rows * cut.pieces
    numbers: dict[str, float] = {
        "heads": one.heads / cut.tp,
        "groups": one.groups_of_rank(cut.tp),
        "channels": one.channels_of_rank(cut.tp),
        "chunk": chunk,
        "halo": one.kernel - 1,
        **{name: getattr(one, name, 0) for name in ("key_dim", "value_dim", "step_rank", "gate_rank")},
    }
    bases: dict[str, float] = {
        "tokens": pieces * cut.length,
        "whole": pieces * cut.length * (cut.length % chunk == 0),
        "chunks": pieces * chunks,
        "later": pieces * (chunks - 1),
        "several": pieces * (chunks > 1),
        "pairs": pieces * (chunks + 1) ** 2,
        "pieces": pieces,
        "slots": cut.pieces,
        "positions": cut.pieces * cut.length,
        "squares": (chunks + 1) ** 2,
        "layer": 1,
    }
    return numbers, bases


@lru_cache(maxsize=1024)
def state_bytes(sort: Sort, cut: StateCut, element_bytes: int) -> float:
    """What the module of these layers that carries a state keeps of a micro-batch, its input left out.

    Raises:
        StopIteration: they carry none.
    """
    one: Recurrent = next(part for part in sort.parts if part.states)
    numbers, bases = state_sizes(cut, one)
    # A kind that no type has rows of, of a plug-in, keeps what that kind does which it is made from.
    kinds = (*(kind.__name__ for kind in type(one).__mro__), one.kept_as)
    group = next(kind for kind in kinds if types_with(kind))
    flags = {name.replace(type(one).__name__, group, 1): answer for name, answer in sizes(sort)[1].items()}
    rows = rows_for(sort, group, {**flags, **state_answers(cut, one)}, element_bytes)
    return float(
        sum(
            bases[basis] * size * math.prod(numbers[each] for each in name.split("·") if each)
            for basis, own in rows.items()
            for name, size in own.items()
        )
    )


def kept_bytes(work: Workload) -> float:
    """What the module of a layer's state keeps of a micro-batch for its backward pass, the block's input left out."""
    every = (sort for _, sort in sorts(work.shape, range(work.shape.num_hidden_layers)))
    if (sort := next((one for one in every if any(part.states for part in one.parts)), None)) is None:
        return 0.0
    return state_bytes(sort, _cut(work), work.element_bytes)


def _carrying(shape: ModelShape) -> Recurrent | None:
    """The mechanism of its layers that carry a state."""
    return cast("Recurrent | None", next((part for part in shape.parts if part.states), None))


def _cut(work: Workload) -> StateCut:
    pieces = 2 if work.cp > 1 and work.cp_layout == "zigzag" else 1
    length = -(-work.sequence_length // work.cp // pieces)
    return StateCut(work.tp, work.cp, work.micro_batch, pieces, length)


def backward_bytes(work: Workload) -> float:
    """What the backward pass of such a layer makes, and lets go of at its end."""
    return 0.0 if (one := _carrying(work.shape)) is None else one.backward_bytes(_cut(work))


def forward_bytes(work: Workload) -> float:
    """What such a layer holds at the end of its scan beyond what it keeps."""
    return 0.0 if (one := _carrying(work.shape)) is None else one.forward_bytes(_cut(work), work.element_bytes)


def let_go_bytes(work: Workload, stage: Stage, dense: LayerBytes, sparse: LayerBytes, largest: LayerBytes) -> float:
    """What the layers of a stage keep behind the last one that carries a state, and that one's MLP.

    It is not there yet when that one scans, and gone when it runs backward. With full recomputation it is the MLP
    alone, of the `largest` layer.
    """
    shape = work.shape
    if (recurrent := _carrying(shape)) is None:
        return 0.0
    blocks = shape.stack.blocks is not None  # a layer is a state or an MLP
    if work.recomputes_layers:
        entered = largest.gathered / shape.blocks_per_layer * (largest.mlp > 0)
        return (largest.mlp + entered) * work.local_tokens * (not blocks)
    last = within(recurrent.layers, stage.layers)[-1]
    behind, reach = range(last + 1, stage.layers.stop), range(last + blocks, stage.layers.stop)
    of_whole = shape.routed(reach) * sparse.mlp + shape.dense(reach) * dense.mlp
    routed = shape.routed(behind)
    kinds = ((routed, sparse), (len(behind) - routed, dense))
    of_whole += sum(count * one.gathered for count, one in kinds)
    of_whole += shape.attending(behind) * (sparse if routed else dense).attention
    choice = choice_bytes(work, replace(stage, layers=behind)) if work.framework == "deepspeed" else 0.0
    streams = sum(count * one.stream for count, one in kinds)
    return of_whole * work.local_tokens + streams * work.split_tokens + choice


def exchanged_bytes(work: Workload) -> float:
    """What recomputation finds again of a layer and micro-batch: the states and halos that its pieces received."""
    if work.cp == 1 or (one := _carrying(work.shape)) is None:
        return 0.0
    return _cut(work).pieces * sum(handed_bytes(work, one))
