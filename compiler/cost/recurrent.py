"""What layers that carry a state, and those that choose keys, keep for backward and hold while they work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from parcompile.layout.pipeline import Stage
from parcompile.model import within
from parcompile.model.blocks.delta import GatedDelta, KimiDelta
from parcompile.model.blocks.indexer import Indexer
from parcompile.model.blocks.lightning import Lightning
from parcompile.model.blocks.mamba1 import Mamba1
from parcompile.model.blocks.mamba2 import Mamba2
from parcompile.model.blocks.recurrent import STATE_BYTES, Recurrent
from parcompile.model.compressed_keys import CompressedKeys, KeyChoice
from parcompile.model.shape import ModelShape

from .activations import LayerBytes
from .blocks import compressed_layers, gathered_bytes, handed_bytes, kept_apart
from .kept import CHOICE, SEVERAL, Sort, rows_for, sizes, sorts, types_with
from .workload import Workload

INDEX_BYTES = 4
"""A chosen key is an int32."""

SCORES_AT_ONCE = 2**24
"""Scores of an indexer that the runtime has in memory at a time."""

ROWS, SPREAD, PIECES = "rows>1", "cp>1", "pieces>1"
SHARED, CHUNKS, WHOLE = "heads>groups", "chunks>1", "whole chunks"
"""Questions about a module that carries a state: of a micro-batch, a sequence, a rank's part of it, heads, a piece."""


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
    if (one := work.shape.part(Recurrent)) is None:
        return 0
    pieces, length = _pieces(work)
    return pieces * -(-length // one.chunk)


@dataclass(frozen=True, slots=True)
class StateCut:
    """What a rank has of a layer that carries a state, and of a micro-batch."""

    tp: int
    cp: int
    rows: int
    """Sequences of the micro-batch."""
    pieces: int
    """Of each sequence, on the rank."""
    length: int
    """Tokens of a piece."""

    def answers(self, one: Recurrent) -> dict[str, bool]:
        """To questions about a module that carries a state."""
        of_piece = {CHUNKS: self.length > one.chunk, WHOLE: self.length % one.chunk == 0}
        of_ranks = {SEVERAL: self.tp > 1, ROWS: self.rows > 1, SPREAD: self.cp > 1, PIECES: self.pieces > 1}
        return {**of_ranks, **of_piece, SHARED: one.heads > one.groups}

    def sizes(self, one: Recurrent) -> tuple[dict[str, float], dict[str, float]]:
        """The sizes of a module that carries a state on its rank, by name; and what its rows are of."""
        chunk = min(one.chunk, self.length) if isinstance(one, Lightning) else one.chunk  # others fill up their last
        chunks, pieces = -(-self.length // chunk), self.rows * self.pieces
        numbers: dict[str, float] = {
            "heads": one.heads / self.tp,
            "groups": one.groups_of_rank(self.tp),
            "channels": one.channels_of_rank(self.tp),
            "chunk": chunk,
            "halo": one.kernel - 1,
            **{name: getattr(one, name, 0) for name in ("key_dim", "value_dim", "step_rank", "gate_rank")},
        }
        bases: dict[str, float] = {
            "tokens": pieces * self.length,
            "whole": pieces * self.length * (self.length % chunk == 0),
            "chunks": pieces * chunks,
            "later": pieces * (chunks - 1),
            "several": pieces * (chunks > 1),
            "pairs": pieces * (chunks + 1) ** 2,
            "pieces": pieces,
            "slots": self.pieces,
            "positions": self.pieces * self.length,
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
    one = next(part for part in sort.parts if isinstance(part, Recurrent))
    numbers, bases = cut.sizes(one)
    # A kind that no type has rows of, of a plug-in, keeps what that kind does which it is made from.
    kinds = (kind.__name__ for kind in (*type(one).__mro__, GatedDelta))
    group = next(kind for kind in kinds if types_with(kind))
    flags = {name.replace(type(one).__name__, group, 1): answer for name, answer in sizes(sort)[1].items()}
    rows = rows_for(sort, group, {**flags, **cut.answers(one)}, element_bytes)
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
    pieces, length = _pieces(work)
    return state_bytes(sort, StateCut(work.tp, work.cp, work.micro_batch, pieces, length), work.element_bytes)


def _pieces(work: Workload) -> tuple[int, int]:
    """Those that a rank has of a sequence, and their tokens."""
    pieces = 2 if work.cp > 1 and work.cp_layout == "zigzag" else 1
    return pieces, -(-work.sequence_length // work.cp // pieces)


def backward_bytes(work: Workload) -> float:
    """What the backward pass of such a layer makes, and lets go of at its end.

    Of a Mamba-1 layer, whose scan in transformers goes token by token: the gradients of all discrete A and of what is
    written to the states, in fp32, and of both those of one token among zeros; for one piece at a time. Of Kimi delta
    attention the gradient of what each channel of a key has with each token of its chunk, in fp32: the sum, what is
    added to it and what comes of it. Of other layers nothing is counted.
    """
    one = work.shape.part(Recurrent)
    if one is None or not isinstance(one, Mamba1 | KimiDelta):
        return 0.0
    _, length = _pieces(work)
    if isinstance(one, KimiDelta):
        padded = work.micro_batch * -(-length // one.chunk) * one.chunk
        return 3.0 * STATE_BYTES * padded * one.heads * one.key_dim * one.chunk / work.tp
    tokens = work.micro_batch * length
    # The scan has let go of both tensors that a piece makes of a received state.
    return (4.0 - 2 * (work.cp > 1)) * STATE_BYTES * tokens * one.state_numel / work.tp


def let_go_bytes(work: Workload, stage: Stage, dense: LayerBytes, sparse: LayerBytes, largest: LayerBytes) -> float:
    """What the layers of a stage behind the last one that carries a state have kept, and that one's MLP.

    When it runs backward they have let go of it. With full recomputation it is the MLP alone, of the `largest` layer.
    """
    recurrent = work.shape.part(Recurrent)
    if recurrent is None or work.shape.stack.blocks is not None or recurrent.beside_attention:
        return 0.0
    if work.recomputes_layers:
        entered = largest.gathered / work.shape.blocks_per_layer * (largest.mlp > 0)
        return (largest.mlp + entered) * work.local_tokens
    last = within(recurrent.layers, stage.layers)[-1]
    behind = range(last + 1, stage.layers.stop)
    routed = work.shape.routed(range(last, stage.layers.stop))
    mlps = routed * sparse.mlp + (len(behind) + 1 - routed) * dense.mlp
    of_whole = len(behind) * (dense.attention + dense.gathered) + mlps
    choice = choice_bytes(work, replace(stage, layers=behind)) if work.framework == "deepspeed" else 0.0
    return of_whole * work.local_tokens + len(behind) * dense.stream * work.split_tokens + choice


def _kept_values(one: Mamba2) -> int:
    """Fp32 numbers of each value that a Mamba-2 layer keeps."""
    return 10 if one.gated_norm else 7


def forward_bytes(work: Workload) -> float:
    """What the scan of a Mamba-2 layer holds at its end beyond what the layer keeps; of other layers 0.

    Its function holds two more fp32 numbers of each state feature, 11 of each value, where the layer goes on to keep 10
    or 7, and a state of each chunk; its caller the channels behind their activation, but not yet the output. One piece
    is scanned at a time.
    """
    one = work.shape.part(Recurrent)
    if one is None or not isinstance(one, Mamba2):
        return 0.0
    pieces, length = _pieces(work)
    of_heads: float = 4 * (2 * one.key_dim + (11 - _kept_values(one)) * one.value_dim)
    of_heads += STATE_BYTES * one.key_dim * one.value_dim / one.chunk
    beyond_output = one.channels_of_rank(work.tp) - one.values / work.tp
    of_token = one.heads * of_heads / work.tp + pieces * work.element_bytes * beyond_output
    return work.micro_batch * -(-length // one.chunk) * one.chunk * of_token


def exchanged_bytes(work: Workload) -> float:
    """What recomputation finds again of a layer and micro-batch: the states and halos that its pieces received."""
    if work.cp == 1 or (one := work.shape.part(Recurrent)) is None:
        return 0.0
    return _pieces(work)[0] * sum(handed_bytes(work, one))
