"""What keys that stand for windows of tokens send over cp, and what they keep there.

| message, of a layer and micro-batch of b rows | bytes of a rank |
|---|---|
| all-to-all of tokens of others' windows, forward; of gradients, back | w b · tokens · 2 · series · D each |
| all-gather of keys of windows, forward; reduce-scatter of gradients | w b · most · D · (c − 1) each |

A rank makes the windows whose last tokens it has; `most` is how many the rank with most of them makes, and each of its
tokens gives values and weights of `series` times D features. An indexer sends the same with features of its own,
forward only. Full recomputation repeats forward, without the indexer, whose choice is kept.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from parcompile.layout.grid import Axis
from parcompile.layout.sequence import CpLayout, chunk_ids
from parcompile.model.compressed_keys import CompressedKeys
from parcompile.model.shape import ModelShape

from .context_exchanges import ContextExchange
from .workload import Workload


def compressed_layers(shape: ModelShape, layers: range) -> Iterator[tuple[int, CompressedKeys, int]]:
    """How many of these layers have compressed keys of each kind, and the features of a key."""
    for own, one in shape.by_kind:
        if one.compressed is not None and (count := len(set(own) & set(layers))):
            yield count, one.compressed, one.head_dim


def window_exchanges(work: Workload, layers: range, cp_rank: int | None = None) -> tuple[ContextExchange, ...]:
    """The messages of a step with these layers, by operation; those of the rank that sends most by default."""
    if work.cp == 1 or not any(compressed_layers(work.shape, layers)):
        return ()
    ranks = range(work.cp) if cp_rank is None else (cp_rank,)
    return max((_of_rank(work, layers, rank) for rank in ranks), key=lambda all_: sum(one.wire_bytes for one in all_))


def _of_rank(work: Workload, layers: range, rank: int) -> tuple[ContextExchange, ...]:
    found: dict[str, list[float]] = {}

    def send(operation: str, messages: int, size: float) -> None:
        one = found.setdefault(operation, [0, 0.0])
        one[0] += messages
        one[1] += messages * size

    forward = 2 if work.recomputes_layers else 1
    width = work.micro_batch * work.element_bytes
    for count, keys, head_dim in compressed_layers(work.shape, layers):
        times = count * work.micro_batches
        sent, received, most = window_tokens(keys.rate, keys.series, work.sequence_length, work.cp, work.cp_layout)
        if not most:
            continue
        features = [(head_dim, forward, 1)]
        if keys.choice is not None:
            features.append((keys.choice.head_dim, 1, 0))
        for dim, ahead, back in features:
            if any(sent):
                projected = 2 * keys.series * dim * width
                send("all-to-all", times * ahead, sent[rank] * projected)
                send("all-to-all", times * back, received[rank] * projected)
            send("all-gather", times * ahead, (work.cp - 1) * most * dim * width)
            if back:
                send("reduce-scatter", times, (work.cp - 1) * most * dim * width)
    return tuple(
        ContextExchange(Axis.CP, operation, work.cp, 1, int(messages), size, neighbours=False)
        for operation, (messages, size) in found.items()
    )


@functools.lru_cache(maxsize=256)
def window_tokens(
    rate: int, series: int, length: int, cp: int, layout: str
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Of one row: tokens that each rank sends, and gets; and the windows of the rank that makes most."""
    pieces = CpLayout(layout).chunks_per_rank * cp
    holders = {piece: rank for rank in range(cp) for piece in chunk_ids(CpLayout(layout), cp, rank)}
    borders = [piece * length // pieces for piece in range(pieces + 1)]
    sent, received, made = [0] * cp, [0] * cp, [0] * cp
    wanted: set[tuple[int, int]] = set()
    for piece, (start, stop) in enumerate(itertools.pairwise(borders)):
        first, count = start // rate, stop // rate - start // rate
        made[holders[piece]] += count
        if count:
            wanted |= {(holders[piece], token) for token in range(max(0, first - series + 1) * rate, start)}
    for rank, token in wanted:
        holder = holders[token * pieces // length]
        if holder != rank:
            sent[holder] += 1
            received[rank] += 1
    return tuple(sent), tuple(received), max(made)


def gathered_bytes(work: Workload, layers: range) -> float:
    """Keys of other ranks' windows, which the layers keep for backward of one micro-batch; recomputed, one layer's."""
    width = work.micro_batch * work.element_bytes * (1 - 1 / work.cp)
    sizes = [
        (count, keys.count(work.sequence_length) * head_dim)
        for count, keys, head_dim in compressed_layers(work.shape, layers)
    ]
    if work.recomputes_layers:
        return width * max((size for _, size in sizes), default=0)
    return width * sum(count * size for count, size in sizes)
