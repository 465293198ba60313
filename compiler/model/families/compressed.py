"""Sparse attention: keys that an indexer chooses, and keys that stand for windows of tokens (DeepSeek)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from parcompile.model.compressed_keys import CompressedKeys, KeyChoice, LowRank
from parcompile.model.layers import LayersError, LayerShape, whole

# Attention over keys that stand for whole windows of tokens (DeepSeek-V4).

_WINDOW, _CHOSEN, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_CHOSEN: 4, _HEAVY: 128}
_OLD_RATES = {_CHOSEN: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
_BY_RATIO = {0: _WINDOW, 4: _CHOSEN, 128: _HEAVY}
_BY_HASH, _BY_SCORE = "hash_moe", "moe"
_GROUPS, _HEAD_DIM = 8, 512


def _of_layers(key: str, given: Any, known: Sequence[Any], count: int) -> tuple[Any, ...]:
    """The entries of a list for each layer; transformers reads no more than there are layers."""
    if not isinstance(given, list | tuple):
        raise LayersError(f"{key} is {given!r}: it has to be a list with an entry for each layer", key)
    if len(given) < count:
        raise LayersError(f"{key} has {len(given)} entries for {count} layers: write one for each", key)
    found = tuple(given[:count])
    if others := [one for one in found if one not in known]:
        raise LayersError(f"{key} has {others[0]!r}: its entries are {', '.join(map(str, known))}", key)
    return found


def _kinds(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """The kinds of layers: a list, an older list of how many tokens a key stands for, or two kinds in turn."""
    if (given := config.get("layer_types")) is not None:
        return _of_layers("layer_types", given, (_WINDOW, *_RATES), count)
    if (ratios := config.get("compress_ratios")) is not None:
        return tuple(_BY_RATIO[one] for one in _of_layers("compress_ratios", ratios, tuple(_BY_RATIO), count))
    return tuple(_HEAVY if layer < 2 or layer % 2 == 0 else _CHOSEN for layer in range(count))


def _rate(config: Mapping[str, Any], kind: str) -> int:
    if config.get(_OLD_RATES[kind]) is not None:
        return whole(config, _OLD_RATES[kind], 0)
    rates = config.get("compress_rates")
    if rates is None:
        return _RATES[kind]
    if not isinstance(rates, Mapping) or kind not in rates:
        sentence = f"compress_rates has no {kind}, which layers are: write how many tokens a key stands for"
        raise LayersError(sentence, "compress_rates")
    return whole(rates, kind, 0)


def _layer_shapes(config: Mapping[str, Any], common: LayerShape, count: int) -> list[LayerShape]:
    choice = KeyChoice(
        whole(config, "index_n_heads", 64), whole(config, "index_head_dim", 128), whole(config, "index_topk", 512)
    )

    def with_keys(compressed: CompressedKeys) -> LayerShape:
        return replace(common, attention=replace(common.attention, compressed=compressed))

    found: dict[str, LayerShape] = {_WINDOW: common}
    kinds = _kinds(config, count)
    if _CHOSEN in kinds:
        found[_CHOSEN] = with_keys(CompressedKeys(_rate(config, _CHOSEN), 2, choice))
    if _HEAVY in kinds:
        found[_HEAVY] = with_keys(CompressedKeys(_rate(config, _HEAVY)))
    return [found[kind] for kind in kinds]


def _low_rank(config: Mapping[str, Any]) -> LowRank:
    return LowRank(
        whole(config, "q_lora_rank", 1024), whole(config, "o_groups", _GROUPS), whole(config, "o_lora_rank", 1024)
    )


def _hashed(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """The layers whose router looks a token's experts up by its number."""
    if (given := config.get("mlp_layer_types")) is not None:
        kinds = _of_layers("mlp_layer_types", given, (_BY_HASH, _BY_SCORE), count)
        return tuple(layer for layer, kind in enumerate(kinds) if kind == _BY_HASH)
    first = 3 if config.get("num_hash_layers") is None else whole(config, "num_hash_layers", None, least=0)
    return tuple(range(min(count, first)))


def _balances_nothing(config: Mapping[str, Any]) -> bool:
    count = config.get("num_hidden_layers", 43)
    try:
        return bool(config.get("output_router_logits")) and len(_hashed(config, count)) == count
    except LayersError:
        return False  # said where layers are read


def _narrow(config: Mapping[str, Any]) -> bool:
    """Whether fewer features of an indexer's head are there than are rotated."""
    width, part = config.get("head_dim", _HEAD_DIM), config.get("partial_rotary_factor")
    rotated = config.get("qk_rope_head_dim", width // 8) if part is None else int(width * part)
    return isinstance(rotated, int) and config.get("index_head_dim", 128) < rotated
