"""Reads the sizes of layers that carry a state out of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from parcompile.model.layer_kind import LayersError
from parcompile.model.tables import OLDER_KINDS

from .shape import RecurrentKind, RecurrentShape
from .state_space import selective_shape, state_space_shape
from .traits import Recurrent

Size = Callable[[str, "int | None"], int]
"""The value of a key, or its default."""


def recurrent_shape(traits: Recurrent, config: Mapping[str, Any], num_layers: int, size: Size) -> RecurrentShape | None:
    """The layers with a state; None where a configuration has none.

    Raises:
        LayersError: the list of layers does not fit their number, or has a kind that nobody knows; the period of
            layers that attend does not fit its offset.
    """
    layers = _layers(traits, config, num_layers, size)
    if not layers:
        return None
    if traits.kind is RecurrentKind.LIGHTNING_ATTENTION:
        heads = size("num_attention_heads", 32)
        width = size("head_dim", size("hidden_size", 1) // heads)
        block = size("block_size", 256)
        return RecurrentShape(
            traits.kind, layers, heads, heads, width, width, 1, groups_key="num_attention_heads", chunk=block
        )
    if traits.kind is RecurrentKind.KIMI_DELTA_ATTENTION:
        return _kimi_delta(traits, config, layers, size)
    if traits.kind is RecurrentKind.SHORT_CONVOLUTION:
        hidden, bias = size("hidden_size", 1), bool(config.get("conv_bias", False))
        kernel = size("conv_L_cache", 3)
        return RecurrentShape(
            traits.kind, layers, hidden, hidden, 0, 1, kernel, projection_bias=bias, convolution_bias=bias
        )
    if traits.selective is not None:
        return selective_shape(traits.selective, layers, config, size)
    if traits.state_space is not None:
        found = state_space_shape(traits.state_space, layers, config, size)
        return replace(found, beside_attention=traits.beside_attention)
    return _delta(traits, layers, size)


def _kimi_delta(traits: Recurrent, config: Mapping[str, Any], layers: tuple[int, ...], size: Size) -> RecurrentShape:
    section = {} if config.get(traits.section) is None else config[traits.section]
    if not isinstance(section, Mapping):
        raise LayersError(f"{traits.section} is {section!r}: it has to be an object", traits.section)

    def called(key: str) -> str:
        # A configuration that transformers saved has both names, and its class takes the value of the longer one:
        # it writes another width over the published head_dim.
        return key if config.get(key) is not None else traits.sizes.get(key, key)

    def of(key: str, inside: str, default: int) -> int:
        if inside not in section:
            return size(called(key), default)
        value = section[inside]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            message = f"{traits.section}.{inside} is {value!r}: it has to be a whole number of 1 or more"
            raise LayersError(message, traits.section)
        return value

    heads, width = of("linear_num_heads", "num_heads", 32), of("linear_head_dim", "head_dim", 128)
    heads_key = traits.sizes.get("linear_num_heads", "linear_num_heads")
    if size(heads_key, 32) != heads:
        heads_key = "linear_num_heads"
    return RecurrentShape(
        traits.kind,
        layers,
        heads=heads,
        groups=heads,
        key_dim=width,
        value_dim=width,
        kernel=of("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
        groups_key=traits.section if "num_heads" in section else heads_key,
        gate_rank=width if traits.gates_by_few else 0,
    )


def _delta(traits: Recurrent, layers: tuple[int, ...], size: Size) -> RecurrentShape:
    # What follows from the attention: as many heads, keys of 3/4 of the hidden size together, values twice as wide.
    attending = size("num_attention_heads", 1) if traits.follows_attention else 0
    groups, heads = size("linear_num_key_heads", attending or 16), size("linear_num_value_heads", attending or 32)
    width = max(int(0.75 * size("hidden_size", 1) / groups), 1) if attending else 128
    key_dim = size("linear_key_head_dim", width)
    if heads % groups:
        raise LayersError(
            f"linear_num_value_heads {heads} / linear_num_key_heads {groups} is not whole: each key head serves as "
            "many value heads as the others",
            "linear_num_value_heads",
        )
    return RecurrentShape(
        traits.kind,
        layers,
        heads=heads,
        groups=groups,
        key_dim=key_dim,
        value_dim=size("linear_value_head_dim", 2 * key_dim if attending else 128),
        kernel=size("linear_conv_kernel_dim", 4),
        groups_key="linear_num_key_heads",
    )


def _layers(traits: Recurrent, config: Mapping[str, Any], num_layers: int, size: Size) -> tuple[int, ...]:
    kinds = next((found for key in traits.layers_keys if (found := config.get(key)) is not None), None)
    if kinds is None:
        if traits.attending_period is not None:
            periodic = traits.attending_period.layers(config, num_layers)
            return tuple(layer for layer in range(num_layers) if layer not in periodic)
        if traits.by_default is not None:
            return traits.by_default(config, num_layers)
        attending = config.get(traits.attending_key)
        if traits.every_key is None:
            if attending is None and traits.attends_by_default:
                return ()
            return tuple(layer for layer in range(num_layers) if layer not in (attending or ()))
        interval = size(*traits.every_key)
        return tuple(layer for layer in range(num_layers) if (layer + 1) % interval)
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        found = len(kinds) if isinstance(kinds, list | tuple) else repr(kinds)
        raise LayersError(
            f"{traits.layers_key} has {found} entries for {num_layers} layers: write the kind of each",
            traits.layers_key,
        )
    kinds = [OLDER_KINDS.get(str(kind), kind) for kind in kinds]
    known = (traits.word, *traits.attending_words)
    if others := sorted({str(kind) for kind in kinds} - set(known)):
        raise LayersError(
            f"{traits.layers_key} has {', '.join(others)}: the kinds of layers here are {' and '.join(known)}",
            traits.layers_key,
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == traits.word)
