"""Sparse attention of Hugging Face models: an indexer chooses the keys of each query among those of all ranks.

transformers' own indexer and attention modules compute. An indexer is called with a cache that stands in for one: what
it is asked to keep, the keys of this rank's tokens, comes back as the keys of all ranks in the order of the sequence.
So the row that an indexer ranks is that of one process, and equal scores are told apart as there. The choice then hides
keys from the attention over ranks, whatever its implementation is.

All tensor-parallel ranks compute the same choice from the same inputs. It has no gradient: transformers computes it
without one, and its weights are frozen here.

Sparse attention over chosen pools of keys: an indexer scores one key for all tokens of a pool (GLM-5-Next).

transformers' own indexer computes all but the keys of pools, for which it asks which tokens are no padding: the host
would wait for the answer. A cache that stands in for one hands it what the tokens of all ranks give to pools,
those of one document at a time, in which its pools begin anew. It is asked for queries that follow one another, each
time as if the sequence ended behind them: so it sees what one process sees, and ranks the same pools in a row.

Where a query has less keys to choose than there may be, one is named again.

Blocks of keys chosen by their means (Qwen4-Exp): a query is compared with the mean of the keys of each whole block of
tokens that it sees, and attends to the tokens of the best blocks and to those behind the last whole one. Blocks are
counted from the first token of a document. Queries that see as many whole blocks choose among rows of the same length,
as in transformers, which tells equal scores apart by their place in the row.

Shapes: B rows, S tokens of this rank, T tokens of all ranks, L of them in a document, P numbers of a token, N chosen
keys, H heads of an indexer, D features of each.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.cost.recurrent import SCORES_AT_ONCE
from parcompile.model.blocks.indexer import Indexer, IndexerTraits
from parcompile.runtime.inject.regions import Call
from parcompile.runtime.inject.ring_place import Chosen, RingPlace, Unmasked, Visible, token_order
from parcompile.runtime.micro_batch import current
from parcompile.runtime.ring_attention import Run, TokenOrder

from .mechanism import Placed, chosen_once


def of_all_ranks(place: RingPlace, local: Tensor, past: Any, layer: int) -> Tensor:
    """[B, S, ..] of this rank to [B, T, ..] of all; where a rank is alone with those that a cache has kept before."""
    if current().alone:
        kept: Tensor = local if past is None else past.update_indexer(local, layer)
        return kept
    return token_order(place, local.shape[1], 0, local.device).gather(local, place.group)


def choose_pools(
    indexer: Any,
    place: RingPlace,
    hidden_states: Tensor,
    q_resid: Tensor,
    attention_mask: Any = None,  # noqa: ARG001 -- the order of the tokens says it
    past_key_values: Any = None,
) -> Tensor:
    """The keys that each query attends to: int32 [B, S, N], places among the T tokens."""

    def chosen() -> Tensor:
        own = functools.partial(type(indexer).forward, indexer)
        of_tokens = _given_to_pools(own, hidden_states, q_resid)
        every = of_all_ranks(place, of_tokens, past_key_values, indexer.layer_idx)
        order = token_order(place, hidden_states.shape[1], every.shape[1], hidden_states.device)
        return _of_runs(indexer, own, order, every, hidden_states, q_resid)

    return chosen_once(chosen)


def _pooled(indexer: Any, packed_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The keys of the whole pools of a document [B, L, P], the places of their tokens, and that they are whole.

    As the indexer's own (`Glm5NextTextIndexer.get_pooled_states`) of tokens none of which is padding.
    """
    rows, length, _ = packed_states.shape
    count, size = length // indexer.index_kpool, indexer.index_kpool
    of_pools = packed_states[:, : count * size, :-1].reshape(rows, count, size, 2 * indexer.head_dim)
    keys, gates = torch.split(of_pools, indexer.head_dim, -1)
    shares = (gates.float() + indexer.index_kpool_compress_ape.float()).softmax(2).to(keys.dtype)
    places = torch.arange(count * size, device=keys.device).view(1, count, size).expand(rows, -1, -1)
    return (shares * keys).sum(2), places, torch.ones(rows, count, dtype=torch.bool, device=keys.device)


def without_masks(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A hook of the base model, which would make a mask of padding for its layers where it is given none."""
    return args, {**kwargs, "attention_mask": dict.fromkeys(("indexed_attention", "linear_attention"))}


def _given_to_pools(own: Callable[..., Tensor], hidden_states: Tensor, q_resid: Tensor) -> Tensor:
    """What the tokens of this rank give to the keys of pools: [B, S, P]."""
    try:
        own(hidden_states, q_resid, _counting(hidden_states), _Cache())
    except _TakenError as taken:
        return taken.of_tokens
    raise AssertionError("an indexer asks its cache")


def _of_runs(
    indexer: Any, own: Callable[..., Tensor], order: TokenOrder, every: Tensor, hidden_states: Tensor, q_resid: Tensor
) -> Tensor:
    width = indexer.index_topk + (indexer.index_kpool - 1 if indexer.index_kpool_always_select_tail else 0)
    found = torch.zeros(*hidden_states.shape[:2], width, dtype=torch.int32, device=hidden_states.device)
    # Row by row: of several rows at once torch copies the keys for each query.
    rows = [(run, row) for run in order.runs() for row in range(len(every))[run.rows]]
    for run in [replace(run, rows=slice(row, row + 1)) for run, row in rows]:
        document = every[run.rows, run.first : run.stop]
        pools = max(1, document.shape[1] // indexer.index_kpool)
        at_once = max(1, SCORES_AT_ONCE // (indexer.n_heads * pools))
        for start in range(run.tokens.start, run.tokens.stop, at_once):
            queries = slice(start, min(start + at_once, run.tokens.stop))
            found[run.rows, queries] = _chosen_in(own, run, document, queries, hidden_states, q_resid)
    return found


def _chosen_in(
    own: Callable[..., Tensor], run: Run, document: Tensor, queries: slice, hidden_states: Tensor, q_resid: Tensor
) -> Tensor:
    """Of some queries of a document [B, L, P]: places among the T tokens."""
    here = (run.rows, queries)
    behind = run.end - run.first - (run.tokens.stop - queries.stop)
    places = own(hidden_states[here], q_resid[here], _counting(hidden_states[here]), _Cache(document, behind))
    # Each query sees a token at least, the largest place that is named.
    return torch.where(places < 0, places.amax(-1, keepdim=True), places) + run.first


def _counting(hidden_states: Tensor) -> Tensor:
    """The mask of padding [B, S], of which there is none."""
    return torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)


class _TakenError(Exception):
    """An indexer has made what its tokens give; nothing behind it needs to run."""

    def __init__(self, of_tokens: Tensor) -> None:
        super().__init__()
        self.of_tokens = of_tokens


class _Cache:
    """Stands for the cache of an indexer; each of its layers is `layer`.

    With a document [B, L, P], whose last query is the one before `behind`; without one it takes what it is to keep.
    """

    def __init__(self, document: Tensor | None = None, behind: int = 0) -> None:
        self.keys, self._behind = document, behind
        self.layers: Any = defaultdict(lambda: None if document is None else self)

    def update_indexer(self, of_tokens: Tensor, _: int) -> Tensor:
        if self.keys is None:
            raise _TakenError(of_tokens)
        return self.keys

    def get_seq_length(self) -> int:
        return self._behind


def use_indexers(placed: Placed) -> None:
    """Makes the attention modules of this rank's layers that have an indexer, or take the choice of one, attend so."""
    block, family = placed.shape.part(Indexer), placed.family
    if any(isinstance(one, IndexerTraits) and one.pool is not None for one in family.parts):
        placed.model.get_submodule(family.base).register_forward_pre_hook(without_masks, with_kwargs=True)
    if block is None:
        return
    place = RingPlace.of(placed.mesh)
    choose = choose_blocks if block.block else choose_pools if block.pool else choose_keys
    for _, layer in placed.layers(block.layers if block.block else block.attending):
        attention: Any = layer.get_submodule(family.attention)
        attention.register_forward_pre_hook(_with_visible if block.block else _without_mask, with_kwargs=True)
        if block.pool:  # its choice, not a mask, goes to the attention over ranks
            attention.build_attention_mask_from_topk = lambda topk_indices, **_: Chosen(topk_indices)
        if (indexer := attention.indexer) is not None:
            indexer.requires_grad_(False)
            indexer.forward = functools.partial(choose, indexer, place)
            if block.pool:
                indexer.get_pooled_states = functools.partial(_pooled, indexer)


def _without_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    caches = {} if current().alone else {"past_key_values": None}
    return args, {**kwargs, **caches, "attention_mask": Unmasked()}


def choose_keys(
    indexer: Any,
    place: RingPlace,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,  # noqa: ARG001 -- the order of the tokens says it
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
) -> Tensor:
    """The keys that each query attends to: int32 [B, S, N], places among the T tokens."""

    def chosen() -> Tensor:
        own = functools.partial(type(indexer).forward, indexer)
        cos, sin = position_embeddings
        keys = _Keys(lambda local: of_all_ranks(place, local, past_key_values, indexer.layer_idx))
        see_first = torch.ones(1, 1, 1, dtype=torch.bool, device=hidden_states.device)
        own(hidden_states, q_resid, (cos, sin), see_first, position_ids, past_key_values=keys)
        order = token_order(place, hidden_states.shape[1], keys.every.shape[1], hidden_states.device)
        at_once = max(1, SCORES_AT_ONCE // (indexer.n_heads * order.length))
        parts = [slice(start, start + at_once) for start in range(0, hidden_states.shape[1], at_once)]

        def of_row(row: int) -> Tensor:
            keys.row = row
            own_row = [one[row if len(one) > 1 else 0][None] for one in (hidden_states, q_resid, cos, sin)]
            found = []
            for part in parts:
                hidden, queries, *turned = (one[:, part] for one in own_row)
                seen = order.seen(part)[row if len(order.starts) > 1 else 0][None]
                found.append(own(hidden, queries, tuple(turned), seen, position_ids, past_key_values=keys))
            return torch.cat(found, 1)

        # Row by row: of several rows at once torch copies the keys for each query.
        return torch.cat([of_row(row) for row in range(len(hidden_states))])

    return chosen_once(chosen)


class _Keys:
    """Stands for the cache of an indexer's keys: takes those of this rank once, and gives a row's of all ranks."""

    def __init__(self, of_all: Callable[[Tensor], Tensor]) -> None:
        self._of_all = of_all
        self.every: Tensor = torch.empty(0)
        self.row = 0
        self._taken = False

    def update_indexer(self, keys: Tensor, _: int) -> Tensor:
        """[B, S, D] → [B, T, D]; the first time one key only, since nothing is chosen from them yet."""
        if self._taken:
            return self.every[self.row][None]
        self._taken, self.every = True, self._of_all(keys)
        return self.every[:, :1]


def _with_visible(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return args, {**kwargs, "past_key_values": None, "attention_mask": Visible()}


def choose_blocks(
    indexer: Any, place: RingPlace, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any
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
    for key, run in itertools.groupby(keys):
        stop = first + len(list(run))
        if key is not None:
            yield *key, slice(first, stop)
        first = stop
