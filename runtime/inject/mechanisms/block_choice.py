"""Indexers that choose blocks of keys by their means (Qwen4-Exp), over the keys of all ranks.

A query is compared with the mean of the keys of each whole block of tokens that it sees, and attends to the tokens of
the best blocks and to those behind the last whole one. Blocks are counted from the first token of a document.

Queries that see as many whole blocks choose among rows of the same length, as in transformers, which tells equal scores
apart by their place in the row. The choice has no gradient: transformers computes it without one, and the weights of
the indexer are frozen here.

Shapes: B rows, S tokens of this rank, T tokens of all ranks, H heads of the indexer, D features of each, N blocks.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.model.blocks.indexer import Indexer
from parcompile.runtime.inject.regions import Call
from parcompile.runtime.inject.ring_place import RingPlace, Visible, token_order
from parcompile.runtime.ring_attention import TokenOrder

from .mechanism import Placed, chosen_once


def use_block_choice(placed: Placed) -> None:
    """Makes the attention modules of this rank's layers attend to the blocks that their indexers choose."""
    block = placed.shape.part(Indexer)
    if block is None or not block.block:
        return
    place = RingPlace.of(placed.mesh)
    for _, layer in placed.layers(block.layers):
        attention: Any = layer.get_submodule(placed.family.attention)
        attention.register_forward_pre_hook(_with_visible, with_kwargs=True)
        attention.indexer.requires_grad_(False)
        attention.indexer.forward = functools.partial(_choose, attention.indexer, place)


def _with_visible(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return args, {**kwargs, "past_key_values": None, "attention_mask": Visible()}


def _choose(
    indexer: Any,
    place: RingPlace,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
) -> Tensor:
    """Whether a query sees a key: bool [B, 1, S, T]."""
    return chosen_once(lambda: _visible(indexer, place, hidden_states, position_embeddings)).unsqueeze(1)


def _visible(indexer: Any, place: RingPlace, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    batch, length, width = *hidden.shape[:2], indexer.index_head_dim
    cos, sin = (one.expand(batch, -1, -1) for one in position_embeddings)
    queries, keys = indexer.index_qk_proj(hidden).split([indexer.index_n_heads * width, width], -1)
    queries = queries.view(batch, length, -1, width)
    queries = rotate(indexer.q_layernorm(queries), cos=cos, sin=sin, unsqueeze_dim=2)
    order = token_order(place, length, 0, hidden.device)
    every = order.gather(torch.cat([keys, cos, sin], -1), place.group)
    visible = order.seen(slice(None)).expand(batch, -1, -1).clone()
    visible |= (order.places < 0)[:, None]  # nobody reads what padding sees
    with torch.device("cpu"):  # where their numbers are there without waiting for a device
        known = token_order(place, length, 0, torch.device("cpu"))
    for group in _documents(known, indexer.compress_ratio, indexer.block_topk):
        start, count = group.start, group.choosing[-1][0]
        tokens = every[group.rows, start : start + count * indexer.compress_ratio]
        tokens = tokens.view(-1, count, indexer.compress_ratio, tokens.shape[-1])
        means = tokens[..., :width].float().mean(2).to(keys.dtype)
        first_cos, first_sin = tokens[:, :, 0, width:].chunk(2, -1)
        blocks = rotate(indexer.k_layernorm(means).unsqueeze(2), cos=first_cos, sin=first_sin, unsqueeze_dim=2)
        blocks = blocks.squeeze(2).float()
        for seen, own in group.choosing:
            found = _best(indexer, queries[group.rows, own].float(), blocks[:, :seen])
            stop = start + seen * indexer.compress_ratio
            visible[group.rows, own, start:stop] = found.repeat_interleave(indexer.compress_ratio, 2)
    return visible


def _best(indexer: Any, queries: Tensor, blocks: Tensor) -> Tensor:
    """Of queries [B, S, H, D] and blocks [B, N, D] which are the best of each query: bool [B, S, N]."""
    scores = torch.relu(queries @ blocks.unsqueeze(1).mT).sum(2) / math.sqrt(indexer.index_head_dim)
    chosen = scores.topk(indexer.block_topk, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, chosen, value=True)


@dataclass(frozen=True, slots=True)
class _Document:
    """Queries of this rank in a document, or in the first of every row where rows are one document each."""

    rows: slice
    start: int
    """Its place among the T tokens."""
    choosing: tuple[tuple[int, slice], ...]
    """Whole blocks that queries see, ascending, with the queries that see so many: only where not all are chosen."""


@functools.lru_cache(maxsize=8)
def _documents(order: TokenOrder, block: int, most: int) -> tuple[_Document, ...]:
    places, starts = order.places.tolist(), order.starts.tolist()
    alike, found = len(starts) == 1, []
    for row, begins in enumerate(starts):
        rows = slice(None) if alike else slice(row, row + 1)
        held: dict[int, list[tuple[int, slice]]] = {}
        for start, seen, own in _runs(places, begins, block):
            if seen > most:
                held.setdefault(start, []).append((seen, own))
        found += [_Document(rows, start, tuple(sorted(runs, key=lambda run: run[0]))) for start, runs in held.items()]
    return tuple(found)


def _runs(places: list[int], starts: list[int], block: int) -> Iterator[tuple[int, int, slice]]:
    """Neighbouring queries of one document that see as many whole blocks: its start, how many, and which they are."""
    keys = [
        None if place < 0 else (start, (place - start + 1) // block)
        for place, start in zip(places, starts, strict=True)
    ]
    first = 0
    for at in range(1, len(keys) + 1):
        if at == len(keys) or keys[at] != keys[first]:
            if (key := keys[first]) is not None:
                yield *key, slice(first, at)
            first = at
