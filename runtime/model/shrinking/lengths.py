"""Windows, and the lengths at which rotary embeddings change, that a short sequence crosses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.shape import ModelShape

WINDOW, SWITCH = 7, 24
"""Of a small model, in tokens: its windows, and where its rotary embeddings change."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "index_topk")
_POOL = 3
"""Tokens of a pool of keys."""


def borders(config: Any, sequence_length: int) -> list[int]:
    """The lengths, in tokens, from which on a model computes otherwise: of windows, and where rotary embeddings change.

    Args:
        config: of transformers.
        sequence_length: of the plan's sequences. What is not shorter never begins, and is left out.
    """
    found = [getattr(config, key, None) for key in _WINDOWS]
    rates = _rates(config)
    if rates:
        # An indexer chooses among keys of so many tokens each.
        found[_WINDOWS.index("index_topk")] = config.index_topk * min(rates.values())
    found += [*rates.values(), *crossed(config)]
    found += [_switch(rope, config) for rope in _ropes(config)]
    return sorted({place for place in found if isinstance(place, int) and 0 < place < sequence_length})


def short_lengths(config: Any, before: int, length: int) -> dict[str, Any]:
    """Windows and switches that a real sequence crosses are crossed by a short one; others are not."""
    found: dict[str, Any] = {}
    for key in _WINDOWS:
        if isinstance(window := getattr(config, key, None), int):
            found[key] = min(window, WINDOW) if window < before else max(window, length)
    if pool := getattr(config, "index_kpool", None):
        # Whole pools are chosen, a few of them.
        pool = found["index_kpool"] = min(pool, _POOL)
        found["index_topk"] = max(found["index_topk"] // pool, 1) * pool
    if rates := _rates(config):
        found["compress_rates"] = {kind: min(rate, WINDOW) if rate < before else rate for kind, rate in rates.items()}
    switches = [switch for rope in _ropes(config) if (switch := _switch(rope, config)) is not None]
    if not switches:
        return found
    crossed = min(switches) < before
    start = min(*switches, SWITCH) if crossed else max(*switches, length)
    ropes = config.to_dict()["rope_parameters"]
    found["rope_parameters"] = _moved(ropes, start)
    if any(_kind(rope) == "dynamic" for rope in _ropes(config)):
        return {**found, "max_position_embeddings": start}
    # The attention factor of longrope follows from how much longer a sequence may become.
    longer = config.max_position_embeddings / min(switches)
    found["max_position_embeddings"] = max(round(start * longer), length)
    if getattr(config, "original_max_position_embeddings", None):
        found["original_max_position_embeddings"] = start
    return found


def _rates(config: Any) -> Mapping[str, int]:
    """How many tokens a compressed key stands for, in layers of each kind."""
    return getattr(config, "compress_rates", None) or {}


def _moved(rope: Mapping[str, Any], start: int) -> dict[str, Any]:
    """Rotary parameters, of all layers or by the type of the layer, with another original length."""
    return {
        key: _moved(value, start)
        if isinstance(value, Mapping)
        else start
        if key == "original_max_position_embeddings"
        else value
        for key, value in rope.items()
    }


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    by_type = [value for value in rope.values() if isinstance(value, Mapping)]
    return by_type or [rope]


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _switch(rope: Mapping[str, Any], config: Any) -> int | None:
    """The position from which on other frequencies, or another scale of queries, hold."""
    original = rope.get("original_max_position_embeddings", getattr(config, "original_max_position_embeddings", None))
    if _kind(rope) == "dynamic":
        return int(config.max_position_embeddings)
    if _kind(rope) == "longrope" or rope.get("llama_4_scaling_beta") is not None:
        return None if original is None else int(original)
    return None


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
