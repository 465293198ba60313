"""Layers that carry a state beside keys that an indexer chooses, by blocks or by pools: Qwen4-Exp, GLM-5-Next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.blocks.indexer import FULL, NONE, kinds_between
from parcompile.model.tables import OLDER_KINDS

_CARRYING = "linear_attention"
_BLOCK_KEYS = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")


def _carrying(config: Mapping[str, Any], count: int) -> set[int]:
    """The layers that carry a state; what is wrong with their list is said where they are read."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list | tuple):
        return {layer for layer, kind in enumerate(kinds) if OLDER_KINDS.get(str(kind), kind) == _CARRYING}
    every = config.get("full_attention_interval", 4)
    return {layer for layer in range(count) if not isinstance(every, int) or every < 1 or (layer + 1) % every}


def _kinds(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    carrying = _carrying(config, count)
    return tuple(NONE if layer in carrying else FULL for layer in range(count))


def _attends(config: Mapping[str, Any]) -> bool:
    count = config.get("num_hidden_layers", 40)
    return isinstance(count, int) and len(_carrying(config, count)) < count


def _unblocked(config: Mapping[str, Any]) -> bool:
    given = [config.get(key) for key in _BLOCK_KEYS]
    return None in given and (_attends(config) or any(one is not None for one in given))


def _rotated(config: Mapping[str, Any]) -> int:
    rope = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    head = config.get("head_dim", 256)
    return int(head * (1.0 if part is None else part)) if isinstance(head, int) else 0


def _narrow(config: Mapping[str, Any]) -> bool:
    width = config.get("indexer_head_dim")
    return isinstance(width, int) and _rotated(config) > width


# GLM-5-Next: Kimi delta attention in most layers, latent attention over chosen pools of keys in the others, experts.
# Blocks read and write several residual streams, whose mean is the last hidden state.


_SECTION = "linear_attn_config"


def _three_of_four(_: Mapping[str, Any], count: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(count) if layer % 4 != 3)


def _kinds_of_pools(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    listed = config.get("layer_types")
    if not isinstance(listed, list | tuple):
        return kinds_between(config, count, _three_of_four(config, count))
    return kinds_between(config, count, {layer for layer, kind in enumerate(listed) if kind == _CARRYING})


def _bound_is_no_fraction(config: Mapping[str, Any]) -> bool:
    section = config.get(_SECTION)
    bound = section.get("gate_lower_bound") if isinstance(section, Mapping) else None
    return bound is not None and not isinstance(bound, float)
