"""Exact attention over a sequence that is split over ranks, and the tools to split it."""

from __future__ import annotations

from .blockwise import all_gather_attention, attention_beside, ring_attention
from .collator import PackedCollator, PackedLoader, batches_of_tokens, pack_tensors, packed_attention, unpack_tensors
from .passes import keep_attention
from .sequence import (
    Packing,
    PackingCosts,
    document_borders,
    gather_sequence,
    local_positions,
    pack_documents,
    padding_borders,
    split_sequence,
)
from .token_order import Run, TokenOrder, Windows, order_of_last, order_of_packing, order_of_sequence, windows_of
from .ulysses import IMPLEMENTATIONS, UspGroups, attention, double_ring_attention, ulysses_attention, usp_attention

__all__ = [
    "IMPLEMENTATIONS",
    "PackedCollator",
    "PackedLoader",
    "Packing",
    "PackingCosts",
    "Run",
    "TokenOrder",
    "UspGroups",
    "Windows",
    "all_gather_attention",
    "attention",
    "attention_beside",
    "batches_of_tokens",
    "document_borders",
    "double_ring_attention",
    "gather_sequence",
    "keep_attention",
    "local_positions",
    "order_of_last",
    "order_of_packing",
    "order_of_sequence",
    "pack_documents",
    "pack_tensors",
    "packed_attention",
    "padding_borders",
    "ring_attention",
    "split_sequence",
    "ulysses_attention",
    "unpack_tensors",
    "usp_attention",
    "windows_of",
]
