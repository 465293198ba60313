"""Few blocks of keys to choose among, for a small model of the same kind."""

from __future__ import annotations

from typing import Any

from parcompile.model.shape import ModelShape

_BLOCK, _BLOCKS = 4, 2
"""Tokens of a block, and how many blocks queries choose."""


def small_blocks(shape: ModelShape, before: int, length: int) -> dict[str, int]:
    """The keys of blocks: a short sequence has more than are chosen if one of length `before` has."""
    if (indexer := shape.indexer) is None or not indexer.block:
        return {}
    block = min(indexer.block, _BLOCK)
    blocks = indexer.top_k // indexer.block
    chosen = min(blocks, _BLOCKS) if indexer.top_k < before else max(blocks, -(-length // block))
    return {"indexer_compress_ratio": block, "indexer_budget": block * chosen}


def crossed(config: Any) -> list[int]:
    """Tokens from which on queries choose among blocks, and do not see them all."""
    budget, block = (getattr(config, f"indexer_{key}", None) for key in ("budget", "compress_ratio"))
    return [budget + block] if isinstance(budget, int) and isinstance(block, int) else []
