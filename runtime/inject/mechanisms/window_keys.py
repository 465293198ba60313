"""Keys that stand for windows of tokens, of sequences that are spread over ranks or packed with documents.

Each rank projects its own tokens and makes the keys of the windows that end among them; what it lacks of a window comes
from the rank that has it. Then every rank gets the keys of all windows, of which there are few. Both ways back are
those of gradients: a key's sums up over the queries of all ranks, a projection's goes to the token's rank. So each rank
has the gradients of weights that its own tokens and windows give, as of all other weights.

transformers' compressors and indexers begin their windows at the first token of a row that a rank has whole; their
weights, norms, rotations and scores are used here.

Shapes: B rows, S tokens of this rank, C windows of a row, D features of a key, K chosen keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parcompile.runtime.collectives import gather_from_sequence
from parcompile.runtime.expert_parallel.routing import exchange
from parcompile.runtime.inject.interface import function_of
from parcompile.runtime.inject.ring_place import RingPlace, borders_of_rows, token_order
from parcompile.runtime.ring_attention import TokenOrder, Windows, windows_of
from parcompile.runtime.ring_attention.passes import once


def keys_and_mask(
    compressor: Any, place: RingPlace, hidden: Tensor, residual: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    """What a compressor gives of this rank's tokens: keys [B, 1, C, D] of all windows, and their mask [B, 1, S, C]."""
    rows, length, _ = hidden.shape
    group = place.group
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
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

    def chosen() -> tuple[Tensor]:
        return (_chosen(indexer, hidden, residual, positions.expand(rows, -1), windows, order, place),)

    with torch.no_grad():
        # Kept where the layer is computed again: attention is, and the two belong together.
        (places,) = once(chosen)
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
