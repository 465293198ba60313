"""The tokens of all ranks, for what an indexer keeps of them: in the order of the sequence, on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.runtime.micro_batch import current
from parcompile.runtime.ring_attention import TokenOrder, order_of_last, order_of_packing, order_of_sequence

from .ring_place import RingPlace


def of_all_ranks(place: RingPlace, local: Tensor, past: Any, layer: int) -> Tensor:
    """[B, S, ..] of this rank to [B, T, ..] of all; where a rank is alone with those that a cache has kept before."""
    if current().alone:
        kept: Tensor = local if past is None else past.update_indexer(local, layer)
        return kept
    return token_order(place, local.shape[1], 0, local.device).gather(local, place.group)


def token_order(place: RingPlace, length: int, total: int, device: torch.device) -> TokenOrder:
    """Of the micro-batch: `length` tokens of this rank; `total` with those that are kept, where a rank is alone."""
    batch = current()
    if batch.alone:
        return order_of_last(length, total, batch.documents, device)
    ranks, rank = (1, 0) if place.group is None else (dist.get_world_size(place.group), dist.get_rank(place.group))
    if batch.packing is not None:
        return order_of_packing(batch.packing, rank, device)
    return order_of_sequence(length, place.layout, ranks, rank, borders_of_rows(), device)


def borders_of_rows() -> tuple[tuple[int, ...], ...] | None:
    """Of the micro-batch: where the documents of each row begin, and its length; None where each row is one."""
    documents = current().documents
    return None if documents is None else tuple(tuple(int(edge) for edge in row) for row in documents)
