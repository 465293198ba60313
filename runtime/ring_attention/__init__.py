"""Exact attention over a sequence that is split over ranks, and the tools to split it."""

from __future__ import annotations

from .documents import document_borders, padding_borders
from .recompute import keep_attention
from .ring import ring_attention
from .sequence import gather_sequence, local_positions, split_sequence
from .ulysses import ulysses_attention

__all__ = [
    "document_borders",
    "gather_sequence",
    "keep_attention",
    "local_positions",
    "padding_borders",
    "ring_attention",
    "split_sequence",
    "ulysses_attention",
]
