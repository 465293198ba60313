"""Sparse attention of Hugging Face models: an indexer chooses the keys of each query among those of all ranks.

transformers' own indexer and attention modules compute. An indexer is called with a cache that stands in for one: what
it is asked to keep, the keys of this rank's tokens, comes back as the keys of all ranks in the order of the sequence.
So the row that an indexer ranks is that of one process, and equal scores are told apart as there. The choice then hides
keys from the attention over ranks, whatever its implementation is.

All tensor-parallel ranks compute the same choice from the same inputs. It has no gradient: transformers computes it
without one, and its weights are frozen here.

Shapes: B rows, S tokens of this rank, T tokens of all ranks, N chosen keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.cost.recurrent import SCORES_AT_ONCE
from parcompile.model.blocks.indexer import Indexer, IndexerTraits
from parcompile.runtime.inject.ring_place import RingPlace, Unmasked, token_order
from parcompile.runtime.micro_batch import current
from parcompile.runtime.ring_attention.passes import once

from .mechanism import Placed
from .pools import of_all_ranks, use_pools, without_masks


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


def _without_mask(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
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

    def chosen() -> tuple[Tensor]:
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
        return (torch.cat(found, 1),)

    # Kept where the layer is computed again: attention is, and the two belong together.
    (places,) = once(chosen)
    return places


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
