"""Ring attention: exact attention over a sequence split over ranks, and the tools to split it."""

from __future__ import annotations

from .ring import ring_attention
from .sequence import gather_sequence, local_positions, split_sequence

__all__ = [
    "gather_sequence",
    "local_positions",
    "ring_attention",
    "split_sequence",
]
