"""Attention over keys that stand for whole windows of tokens, beside those of single tokens (DeepSeek-V4).

transformers' own attention and compressor modules compute all but the attention itself. It gets the keys of the tokens
with the compressed ones behind them, and the mask of these.

A compressor counts its windows from the first token that it is called with. Of packed documents, and of a sequence that
is spread over ranks, `window_keys` does: a window never reaches over the end of a document, and what is left behind the
last whole window is in none.

The choice of an indexer has no gradient: transformers computes it without one, and its weights are frozen here.

Each rank projects its own tokens and makes the keys of the windows that end among them; what it lacks of a window comes
from the rank that has it. Then every rank gets the keys of all windows, of which there are few. Both ways back are
those of gradients: a key's sums up over the queries of all ranks, a projection's goes to the token's rank. So each rank
has the gradients of weights that its own tokens and windows give, as of all other weights.

transformers' compressors and indexers begin their windows at the first token of a row that a rank has whole; their
weights, norms, rotations and scores are used here.

Shapes: B rows, S tokens and H query heads of this rank, C windows of a row, each with a compressed key, D features of a
key, K chosen keys, T of the C that an indexer scores.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.cost.recurrent import SCORES_AT_ONCE
from parcompile.runtime.collectives import gather_from_sequence
from parcompile.runtime.errors import everywhere
from parcompile.runtime.expert_parallel.routing import exchange
from parcompile.runtime.inject.attention import BESIDE
from parcompile.runtime.inject.interface import function_of
from parcompile.runtime.inject.regions import Call
from parcompile.runtime.inject.ring_place import RingPlace, borders_of_rows, token_order
from parcompile.runtime.micro_batch import current
from parcompile.runtime.ring_attention import TokenOrder, Windows, attention_beside, local_positions, windows_of
from parcompile.runtime.transport import group_rank, group_size

from .mechanism import Placed, chosen_once, refuse_generation


def keys_and_mask(
    compressor: Any, place: RingPlace, hidden: Tensor, residual: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    """What a compressor gives of this rank's tokens: keys [B, 1, C, D] of all windows, and their mask [B, 1, S, C]."""
    rows, length, _ = hidden.shape
    ranks, rank = group_size(place.group), group_rank(place.group)
    series = compressor.position_bias.shape[1] // compressor.head_dim
    windows = windows_of(
        compressor.compress_rate, series, rows, length, place.layout, ranks, rank, borders_of_rows(), hidden.device
    )
    keys = _keys(compressor, hidden, windows, place)
    if not windows.count:
        return keys.unsqueeze(1), None
    order = token_order(place, length, 0, hidden.device)
    indexer = getattr(compressor, "indexer", None)
    if indexer is None:
        mask = keys.new_zeros(rows, length, windows.count)
        mask.masked_fill_(~windows.seen(order.places, order.starts), -torch.inf)
        return keys.unsqueeze(1), mask.unsqueeze(1)

    places = chosen_once(lambda: _chosen(indexer, hidden, residual, positions.expand(rows, -1), windows, order, place))
    mask = keys.new_full((rows, length, windows.count + 1), -torch.inf)
    mask.scatter_(2, places, 0.0)
    return keys.unsqueeze(1), mask[..., : windows.count].unsqueeze(1)


def _keys(part: Any, hidden: Tensor, windows: Windows, place: RingPlace) -> Tensor:
    """Keys [B, C, D] of a compressor or an indexer, of all windows.

    Of no window too they are made of its weights: these have gradients on each dp rank then, whatever its documents.
    """
    tokens = torch.cat([part.kv_proj(hidden), part.gate_proj(hidden)], -1).flatten(0, 1)
    if windows.travels:
        assert place.group is not None, "one rank has all tokens"
        received = exchange(tokens[windows.sent], windows.send, windows.receive, place.group)
        tokens = torch.cat([tokens, received])
    keys = part.kv_norm(_pooled(part, tokens, windows))
    keys = F.pad(keys, (0, 0, 0, len(windows.places) - len(keys)))
    cos, sin = part.rotary_emb(keys, position_ids=windows.places[None], layer_type=part.rope_layer_type)
    keys = function_of(part, "apply_rotary_pos_emb")(keys[None, None], cos, sin)[0, 0]
    return F.pad(gather_from_sequence(keys, 0, place.group), (0, 0, 0, 1))[windows.gathered]


def _pooled(part: Any, tokens: Tensor, windows: Windows) -> Tensor:
    """Means [N, D] of what the tokens of windows give, by weights of each feature.

    With two series of features the first are of the window before.
    """
    width, rate = part.head_dim, windows.rate
    values, gates = tokens.chunk(2, -1)
    series = [
        (windows.tokens[:, start * rate : (start + 1) * rate], slice(start * width, (start + 1) * width))
        for start in range(values.shape[1] // width)
    ]
    every = torch.cat([values[:, features][of] for of, features in series], 1)
    gate = torch.cat([gates[:, features][of] + part.position_bias[:, features] for of, features in series], 1)
    gate = gate.masked_fill(windows.missing[..., None], -torch.inf)
    return (every * gate.softmax(1, dtype=torch.float32).to(every.dtype)).sum(1)


def _chosen(
    indexer: Any,
    hidden: Tensor,
    residual: Tensor,
    positions: Tensor,
    windows: Windows,
    order: TokenOrder,
    place: RingPlace,
) -> Tensor:
    """The windows that each query attends to, int64 [B, S, K]; C for none. Each document is ranked alone."""
    keys = _keys(indexer, hidden, windows, place)
    cos, sin = indexer.rotary_emb(hidden, position_ids=positions, layer_type=indexer.rope_layer_type)
    queries = indexer.q_b_proj(residual).unflatten(-1, (-1, indexer.head_dim))
    queries = function_of(indexer, "apply_rotary_pos_emb")(queries, cos, sin, unsqueeze_dim=2)
    rows, length, _ = hidden.shape
    found = torch.full((rows, length, min(indexer.index_topk, windows.count)), windows.count, device=hidden.device)
    seen = windows.seen(order.places, order.starts)
    for row, own, columns in windows.documents:
        scores = indexer.scorer(queries[row][:, own], keys[row, columns], hidden[row][:, own])
        open_to = seen[row][:, own, columns]
        best = scores.masked_fill(~open_to, -torch.inf).topk(min(found.shape[2], scores.shape[2]), -1).indices
        best = torch.where(open_to.gather(2, best), best + (columns.start or 0), windows.count)
        found[row, own, : best.shape[2]] = best
    return found


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
        if (indexer := getattr(compressor, "indexer", None)) is not None:
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


def _with_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, compressed: bool) -> Call:
    """No mask of tokens, which the ring knows: [B, 1, S, 0], to which the attention adds that of compressed keys."""
    refuse_generation("with compressed keys")
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
        return place.attend(query, own, own, **masks).transpose(1, 2).contiguous()
    documents = current().documents
    tiles = None if documents is not None else _tiles(place, length, rate, further.shape[2])
    out = attention_beside(query, own, own, further, mask, tiles=tiles, documents=documents, **place.options, **masks)
    found: Tensor = out.transpose(1, 2).contiguous()
    return found


def _tiles(place: RingPlace, length: int, rate: int, keys: int) -> list[tuple[slice, slice]]:
    """Queries, some at a time, and the compressed keys that stand for windows before the last of them."""
    ranks, rank = group_size(place.group), group_rank(place.group)
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
        raise everywhere(
            "documents that are dealt one by one are not injected with compressed keys: pack them into rows"
        )
    if place.group is None and current().documents is None:
        return own(hidden_states, q_residual, position_ids, past_key_values, layer_idx)
    return keys_and_mask(compressor, place, hidden_states, q_residual, position_ids)


def _choose(own: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return chosen_once(lambda: own(*args, **kwargs))


def _score(own: Callable[..., Tensor], q: Tensor, compressed_kv: Tensor, hidden_states: Tensor) -> Tensor:
    """Scores [B, S, T], some queries at a time: one of each head, query and key would be in memory.

    Row by row: of several rows at once torch copies the keys for each query.
    """
    _, length, heads, _ = q.shape
    at_once = max(1, SCORES_AT_ONCE // max(1, heads * compressed_kv.shape[1]))
    parts = [slice(start, start + at_once) for start in range(0, length, at_once)]
    rows = zip(*(torch.split(one, 1) for one in (q, compressed_kv, hidden_states)), strict=True)
    return torch.cat([torch.cat([own(one[:, part], keys, h[:, part]) for part in parts], 1) for one, keys, h in rows])
