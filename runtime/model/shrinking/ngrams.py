"""Small embeddings of n-grams, and few blocks of keys to choose among, for a small model of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parcompile.model.shape import ModelShape

_ROWS, _WIDTH_OF_A_HEAD, _BLOCK, _BLOCKS = 500, 8, 4, 2
"""Rows of each head of a table, about, and its features; tokens of a block, and how many blocks queries choose."""


def small_ngrams(shape: ModelShape, config: Any, layers: Sequence[int]) -> dict[str, Any]:
    """The keys of the tables, for those of these layers that have one; every layer hashes with numbers of its own."""
    ngrams = shape.ngrams
    if ngrams is None:
        return {}
    return {
        "ple_layer_ids": [place + 1 for place, layer in enumerate(layers) if layer in ngrams.layers],
        "ple_embed_dim": ngrams.heads * min(ngrams.width // ngrams.heads, _WIDTH_OF_A_HEAD),
        "ngram_vocab_size_base": min(config.ngram_vocab_size_base, _ROWS),
    }


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
