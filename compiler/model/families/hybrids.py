"""Decoders most of whose layers carry a state along the sequence in the place of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.blocks.delta import KimiDelta
from parcompile.model.blocks.indexer import FULL, SHARED, Indexer
from parcompile.model.layers import STATE, LayersError, nemotron_kinds, whole
from parcompile.model.shape import ModelShape
from parcompile.model.shared_blocks import zamba2_kinds


def _adjusted(config: Mapping[str, Any], width: int) -> int:
    """The width of LFM2's MLP (`Lfm2MLP` of transformers)."""
    width = whole(config, "block_ff_dim", width)
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), whole(config, "block_multiple_of", 256)
    return width if factor is None else multiple * -(-int(factor * width) // multiple)


# Kimi delta attention (arXiv 2510.26692) three layers of four or more, latent attention in the others, and experts.

_SECTION = "linear_attn_config"


def _kimi_layers(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    section = config.get(_SECTION) or {}
    if "full_attn_layers" not in section or "kda_layers" not in section:
        return tuple(layer for layer in range(count) if not layer or layer % 4)
    states = section["kda_layers"]
    if sorted([*section["full_attn_layers"], *states]) != list(range(1, count + 1)):
        raise LayersError(
            f"{_SECTION}: full_attn_layers and kda_layers have to name each of the {count} layers once, from 1 on",
            _SECTION,
        )
    return tuple(layer - 1 for layer in sorted(states))


def _values_of_layers(
    config: Mapping[str, Any], shape: ModelShape, *, chooses: bool = False
) -> Mapping[int, Mapping[str, Any]]:
    """What the section of published files says, by the keys that its class makes of it, with the kinds of layers.

    `chooses`: layers that attend do so to keys that an indexer chooses.
    """
    if config.get(_SECTION) is None and not chooses:
        return {}
    states, indexer, layers = shape.part(KimiDelta), shape.part(Indexer), range(shape.num_hidden_layers)
    held, full = () if states is None else states.layers, () if indexer is None else indexer.layers
    attending = "indexed_attention" if chooses else "full_attention"
    found: dict[str, Any] = {"layer_types": [STATE if layer in held else attending for layer in layers]}
    if chooses:
        found["indexer_types"] = [FULL if layer in full else SHARED for layer in layers]
    if states is not None:
        found |= {"linear_num_heads": states.heads, "linear_head_dim": states.key_dim}
        found["linear_conv_kernel_dim"] = states.kernel
    return dict.fromkeys(layers, found)


# Decoders with state-space layers (Mamba), beside attention or alone.


def _narrows_experts(config: Mapping[str, Any]) -> bool:
    return config.get("moe_latent_size") is not None and "moe" in nemotron_kinds(config)


def _all_of_zamba2(config: Mapping[str, Any], _: int) -> tuple[int, ...]:
    return tuple(range(len(zamba2_kinds(config))))


def _states_of_nemotron(config: Mapping[str, Any], _: int) -> tuple[int, ...]:
    return tuple(number for number, kind in enumerate(nemotron_kinds(config)) if kind == STATE)
