"""Reads the sizes of layers that carry a state out of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .kind import RecurrentKind
from .shape import RecurrentShape
from .traits import Recurrent

Size = Callable[[str, int], int]
"""The value of a key, or its default."""


class LayerListError(ValueError):
    """A list of layers that does not fit; `key` is its key."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


def recurrent_shape(traits: Recurrent, config: Mapping[str, Any], num_layers: int, size: Size) -> RecurrentShape | None:
    """The layers with a state; None where a configuration has none.

    Raises:
        LayerListError: the list of layers does not fit their number, or has a kind that nobody knows.
    """
    layers = _layers(traits, config, num_layers, size)
    if not layers:
        return None
    if traits.kind is RecurrentKind.SHORT_CONVOLUTION:
        hidden, bias = size("hidden_size", 1), bool(config.get("conv_bias", False))
        kernel = size("conv_L_cache", 3)
        return RecurrentShape(
            traits.kind, layers, hidden, hidden, 0, 1, kernel, projection_bias=bias, convolution_bias=bias
        )
    return _delta(traits, layers, size)


def _delta(traits: Recurrent, layers: tuple[int, ...], size: Size) -> RecurrentShape:
    heads, groups = size("linear_num_value_heads", 32), size("linear_num_key_heads", 16)
    if heads % groups:
        raise LayerListError(
            f"linear_num_value_heads {heads} / linear_num_key_heads {groups} is not whole: each key head serves as "
            "many value heads as the others",
            "linear_num_value_heads",
        )
    return RecurrentShape(
        traits.kind,
        layers,
        heads=heads,
        groups=groups,
        key_dim=size("linear_key_head_dim", 128),
        value_dim=size("linear_value_head_dim", 128),
        kernel=size("linear_conv_kernel_dim", 4),
    )


def _layers(traits: Recurrent, config: Mapping[str, Any], num_layers: int, size: Size) -> tuple[int, ...]:
    kinds = config.get(traits.layers_key)
    if kinds is None:
        attending = config.get(traits.attending_key)
        if traits.every_key is None:
            if attending is None and traits.attends_by_default:
                return ()
            return tuple(layer for layer in range(num_layers) if layer not in (attending or ()))
        interval = size(*traits.every_key)
        return tuple(layer for layer in range(num_layers) if (layer + 1) % interval)
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        found = len(kinds) if isinstance(kinds, list | tuple) else repr(kinds)
        raise LayerListError(
            f"{traits.layers_key} has {found} entries for {num_layers} layers: write the kind of each",
            traits.layers_key,
        )
    known = (traits.word, "full_attention")
    if others := sorted({str(kind) for kind in kinds} - set(known)):
        raise LayerListError(
            f"{traits.layers_key} has {', '.join(others)}: the kinds of layers here are {' and '.join(known)}",
            traits.layers_key,
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == traits.word)
