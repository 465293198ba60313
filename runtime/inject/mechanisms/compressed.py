"""Attention over keys that stand for whole windows of tokens, beside those of single tokens (DeepSeek-V4).

transformers' own attention and compressor modules compute all but the attention itself. It gets the keys of the tokens
with the compressed ones behind them, and the mask of these.

A compressor counts its windows from the first token that it is called with. Of packed documents, and of a sequence that
is spread over ranks, `window_keys` does: a window never reaches over the end of a document, and what is left behind the
last whole window is in none.

The choice of an indexer has no gradient: transformers computes it without one, and its weights are frozen here.

Shapes: B rows, S tokens, H query heads of this rank, D features of a head, C compressed keys of a row, T of these that
an indexer scores.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.cost.recurrent import SCORES_AT_ONCE
from parcompile.runtime.errors import RunError
from parcompile.runtime.inject.attention import BESIDE
from parcompile.runtime.inject.ring_place import RingPlace
from parcompile.runtime.micro_batch import current
from parcompile.runtime.ring_attention import attention_beside, local_positions
from parcompile.runtime.ring_attention.passes import once

from .mechanism import Placed
from .window_keys import keys_and_mask

_TILE = 512
"""Queries of a tile: the first of a sequence see few compressed keys."""


def use_compressed_keys(placed: Placed) -> None:
    """Makes the attention modules of this rank's layers attend to compressed keys too."""
    if placed.shape.heads.low_rank is None:
        return
    place = RingPlace.of(placed.mesh)
    for _, layer in placed.layers():
        attention: Any = layer.get_submodule(placed.family.attention)
        compressor = attention.compressor
        attention.register_forward_pre_hook(
            functools.partial(_with_mask, compressed=compressor is not None), with_kwargs=True
        )
        if compressor is None:
            continue
        setattr(attention, BESIDE, functools.partial(_attend, compressor.compress_rate))
        compressor.forward = functools.partial(_compress, compressor.forward, compressor, place)
        indexer = getattr(compressor, "indexer", None)
        if indexer is not None:
            indexer.requires_grad_(False)
            indexer.forward = functools.partial(_choose, indexer.forward)
            indexer.scorer.forward = functools.partial(_score, indexer.scorer.forward)


def is_grouped(module: Any) -> bool:
    """Whether a linear projects groups of features, each on its own: what tp cuts it by, inputs and outputs."""
    return isinstance(module, nn.Linear) and hasattr(module, "n_groups")


def keep_groups(attention: Any, linear: Any, tp: int) -> None:
    """Tells an attention and its grouped linear that their heads are in 1 / tp of the groups."""
    linear.n_groups //= tp
    linear.out_features = linear.weight.shape[0]
    attention.config = copy.copy(attention.config)
    attention.config.o_groups //= tp


def _with_mask(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, compressed: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """No mask of tokens, which the ring knows: [B, 1, S, 0], to which the attention adds that of compressed keys."""
    if current().alone:
        raise RunError(
            "generate() of a model with compressed keys is not injected: write it with `parcompile "
            "checkpoint export DIR --hf OUT` and generate with AutoModelForCausalLM.from_pretrained(OUT)",
            everywhere=True,
        )
    hidden = args[0] if args else kwargs["hidden_states"]
    # Under sequence parallelism the hidden states are still a share of the sequence here.
    length = current().sequence_length or hidden.shape[1]
    mask = hidden.new_empty(hidden.shape[0], 1, length, 0) if compressed else None
    return args, {**kwargs, "attention_mask": mask, "past_key_values": None}


def _attend(
    rate: int,
    place: RingPlace,
    query: Tensor,
    key: Tensor,
    mask: Tensor,
    scaling: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Query [B, H, S, D], key [B, 1, S + C, D] and mask [B, 1, S, C] to [B, S, H, D]."""
    length = query.shape[2]
    own, further = key[:, :, :length], key[:, :, length:]
    masks: dict[str, Any] = {"causal": True, "scale": scaling, "window": window, "sinks": sinks}
    if not further.shape[2]:
        alone = place.attend(query, own, own, **masks)
        return alone.transpose(1, 2).contiguous()
    documents = current().documents
    tiles = None if documents is not None else _tiles(place, length, rate, further.shape[2])
    out = attention_beside(query, own, own, further, mask, tiles=tiles, documents=documents, **place.options, **masks)
    found: Tensor = out.transpose(1, 2).contiguous()
    return found


def _tiles(place: RingPlace, length: int, rate: int, keys: int) -> list[tuple[slice, slice]]:
    """Queries, some at a time, and the compressed keys that stand for windows before the last of them."""
    ranks, rank = (1, 0) if place.group is None else (dist.get_world_size(place.group), dist.get_rank(place.group))
    positions = local_positions(place.layout, ranks, rank, length * ranks)
    rows = [slice(start, min(start + _TILE, length)) for start in range(0, length, _TILE)]
    ready = [min((int(positions[one].max()) + 1) // rate, keys) for one in rows]
    return [(one, slice(0, count)) for one, count in zip(rows, ready, strict=True) if count]


def _compress(
    own: Callable[..., tuple[Tensor, Tensor | None]],
    compressor: Any,
    place: RingPlace,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    past_key_values: Any,
    layer_idx: int,
) -> tuple[Tensor, Tensor | None]:
    """Compressed keys [B, 1, C, D] of all windows, and their mask [B, 1, S, C]: of each query those of its document."""
    if current().packing is not None:
        raise RunError(
            "documents that are dealt one by one are not injected with compressed keys: pack them into rows",
            everywhere=True,
        )
    if place.group is None and current().documents is None:
        return own(hidden_states, q_residual, position_ids, past_key_values, layer_idx)
    return keys_and_mask(compressor, place, hidden_states, q_residual, position_ids)


def _choose(own: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    # Kept where the layer is computed again: attention is, and the two belong together.
    with torch.no_grad():
        (places,) = once(lambda: (own(*args, **kwargs),))
    return places


def _score(own: Callable[..., Tensor], q: Tensor, compressed_kv: Tensor, hidden_states: Tensor) -> Tensor:
    """Scores [B, S, T], some queries at a time: one of each head, query and key would be in memory.

    Row by row: of several rows at once torch copies the keys for each query.
    """
    _, length, heads, _ = q.shape
    at_once = max(1, SCORES_AT_ONCE // max(1, heads * compressed_kv.shape[1]))
    parts = [slice(start, start + at_once) for start in range(0, length, at_once)]
    rows = zip(*(torch.split(one, 1) for one in (q, compressed_kv, hidden_states)), strict=True)
    return torch.cat([torch.cat([own(one[:, part], keys, h[:, part]) for part in parts], 1) for one, keys, h in rows])
