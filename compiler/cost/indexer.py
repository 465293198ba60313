"""What an indexer holds while it chooses keys, and what is kept of its choice."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.layout.pipeline import Stage
from parcompile.model.blocks.indexer import Indexer
from parcompile.model.compressed_keys import CompressedKeys, KeyChoice
from parcompile.model.shape import ModelShape
from parcompile.model.table import within

from .blocks import compressed_layers, gathered_bytes
from .workload import Workload

INDEX_BYTES = 4
"""A chosen key is an int32."""

SCORES_AT_ONCE = 2**24
"""Scores of an indexer that the runtime has in memory at a time."""


def scoring_bytes(work: Workload, stage: Stage) -> float:
    """What an indexer holds while it scores: its scores in fp32, and what is left of them above zero.

    Of compressed keys this is scaled, too, in a tensor of its own, and each row of a batch is scored alone.
    """
    indexer = work.shape.part(Indexer)
    if work.shape.low_rank is not None:
        length, queries = work.sequence_length, work.sequence_length // work.cp
        scored = (queries * choice.heads * keys.count(length) for _, keys, choice in _choices(work.shape, stage.layers))
        return 3.0 * 4 * min(SCORES_AT_ONCE, max(scored, default=0))
    if indexer is None or not within(indexer.layers, stage.layers):
        return 0.0
    if indexer.block:  # what each query sees, twice
        return 2.0 * work.local_tokens * work.sequence_length
    return 2 * 4 * min(SCORES_AT_ONCE, work.local_tokens * indexer.heads * indexer.scored(work.sequence_length))


def choice_bytes(work: Workload, stage: Stage) -> float:
    """What the layers of a stage keep for backward of one micro-batch: what hides keys, and the choice beside.

    With full recomputation the choice of each layer, and what hides the keys of one.
    """
    if work.shape.low_rank is not None:
        return _compressed_bytes(work, stage)
    indexer = work.shape.part(Indexer)
    if indexer is None:
        return 0.0
    hiding = work.sequence_length * work.element_bytes
    # The places of chosen pools are padded to as many as there may be, with the rest of a pool behind them.
    most = indexer.top_k + indexer.pool - 1 if indexer.pool else min(indexer.top_k, work.sequence_length)
    # Of blocks what each query sees is kept, a byte for each key.
    chosen = work.sequence_length if indexer.block else INDEX_BYTES * most
    attending = len(within(indexer.attending, stage.layers))
    own = len(within(indexer.layers, stage.layers))
    if work.recomputes_layers:
        return work.local_tokens * (hiding * bool(attending) + chosen * own)
    return float(work.local_tokens * hiding * attending)


def _choices(shape: ModelShape, layers: range) -> Iterator[tuple[int, CompressedKeys, KeyChoice]]:
    """The same of those among whose compressed keys an indexer chooses."""
    of_kinds = compressed_layers(shape, layers)
    return ((count, keys, keys.choice) for count, keys, _ in of_kinds if keys.choice is not None)


def _compressed_bytes(work: Workload, stage: Stage) -> float:
    """What hides compressed keys, of later windows and such as were not chosen, and the keys of other ranks' windows.

    Recomputed, the choice of each layer. A choice is of 64-bit numbers.
    """
    length, kinds = work.sequence_length, list(compressed_layers(work.shape, stage.layers))
    others = gathered_bytes(work, stage.layers)
    if not work.recomputes_layers:
        hiding = sum(count * keys.count(length) for count, keys, _ in kinds)
        return others + work.local_tokens * work.element_bytes * hiding
    hiding = max((keys.count(length) for _, keys, _ in kinds), default=0)
    chosen = sum(
        count * min(choice.top_k, keys.count(length)) for count, keys, choice in _choices(work.shape, stage.layers)
    )
    return others + work.local_tokens * (work.element_bytes * hiding + 2 * INDEX_BYTES * chosen)
