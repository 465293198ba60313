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

Shapes: B rows, S tokens of this rank, T tokens of all ranks, L of them in a document, P numbers of a token, N chosen
keys.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.cost.recurrent import SCORES_AT_ONCE
from parcompile.model.blocks.indexer import Indexer, IndexerTraits
from parcompile.runtime.inject.regions import Call
from parcompile.runtime.inject.ring_place import Chosen, RingPlace, Unmasked, token_order
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


def use_pools(attention: Any, place: RingPlace) -> None:
    """Makes an attention hand its choice, not a mask, to the attention over ranks, and its indexer choose."""
    attention.build_attention_mask_from_topk = lambda topk_indices, **_: Chosen(topk_indices)
    if (indexer := attention.indexer) is not None:
        indexer.requires_grad_(False)
        indexer.forward = functools.partial(choose_pools, indexer, place)
        indexer.get_pooled_states = functools.partial(_pooled, indexer)


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
    for run in order.runs():
        document = every[run.rows, run.first : run.stop]
        pools = max(1, document.shape[1] // indexer.index_kpool)
        at_once = max(1, SCORES_AT_ONCE // (document.shape[0] * indexer.n_heads * pools))
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
    if block is None or block.block:
        return
    place = RingPlace.of(placed.mesh)
    for _, layer in placed.layers(block.attending):
        attention: Any = layer.get_submodule(family.attention)
        attention.register_forward_pre_hook(_without_mask, with_kwargs=True)
        if block.pool:
            use_pools(attention, place)
        elif attention.indexer is not None:
            attention.indexer.requires_grad_(False)
            attention.indexer.forward = functools.partial(_choose, attention.indexer, place)


def _without_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    caches = {} if current().alone else {"past_key_values": None}
    return args, {**kwargs, **caches, "attention_mask": Unmasked()}


def _choose(
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
        at_once = max(1, SCORES_AT_ONCE // (hidden_states.shape[0] * indexer.n_heads * order.length))
        found = []
        for start in range(0, hidden_states.shape[1], at_once):
            rows = slice(start, start + at_once)
            turned = (cos[:, rows], sin[:, rows])
            seen = order.seen(rows)
            found.append(
                own(hidden_states[:, rows], q_resid[:, rows], turned, seen, position_ids, past_key_values=keys)
            )
        return torch.cat(found, 1)

    return chosen_once(chosen)


class _Keys:
    """Stands for the cache of an indexer's keys: takes those of this rank once, and gives those of all ranks."""

    def __init__(self, of_all: Callable[[Tensor], Tensor]) -> None:
        self._of_all = of_all
        self.every: Tensor = torch.empty(0)
        self._taken = False

    def update_indexer(self, keys: Tensor, _: int) -> Tensor:
        """[B, S, D] → [B, T, D]; the first time one key only, since nothing is chosen from them yet."""
        if self._taken:
            return self.every
        self._taken, self.every = True, self._of_all(keys)
        return self.every[:, :1]
