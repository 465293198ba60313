"""Exact attention over a sequence that is split over ranks, and the tools to split it."""

from __future__ import annotations

from .beside import attention_beside
from .blockwise import all_gather_attention, ring_attention
from .collator import (
    PackedCollator,
    PackedLoader,
    batches_of_tokens,
    pack_tensors,
    packed_attention,
    unpack_tensors,
)
from .implementations import IMPLEMENTATIONS, attention, double_ring_attention
from .packing import Packing, PackingCosts, document_borders, pack_documents, padding_borders
from .passes import keep_attention
from .sequence import gather_sequence, local_positions, split_sequence
from .token_order import Run, TokenOrder, order_of_last, order_of_packing, order_of_sequence
from .ulysses import UspGroups, ulysses_attention, usp_attention
from .windows import Windows, windows_of

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
