"""Kimi delta attention (arXiv 2510.26692) three layers of four or more, latent attention in the others, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Experts, Family, Latent, Refusal
from parcompile.model.recurrent import Recurrent, RecurrentKind
from parcompile.model.recurrent.shape import LayerListError
from parcompile.model.shape import ModelShape

from .traits import all_heads

_SECTION = "linear_attn_config"


def _kimi_layers(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    section = config.get(_SECTION) or {}
    if "full_attn_layers" not in section or "kda_layers" not in section:
        return tuple(layer for layer in range(count) if not layer or layer % 4)
    states = section["kda_layers"]
    if sorted([*section["full_attn_layers"], *states]) != list(range(1, count + 1)):
        raise LayerListError(
            f"{_SECTION}: full_attn_layers and kda_layers have to name each of the {count} layers once, from 1 on",
            _SECTION,
        )
    return tuple(layer - 1 for layer in sorted(states))


def _values_of_layers(config: Mapping[str, Any], shape: ModelShape) -> Mapping[int, Mapping[str, Any]]:
    """What the section of published files says, by the keys that its class makes of it."""
    states = shape.recurrent
    if config.get(_SECTION) is None:
        return {}
    layers = range(shape.num_hidden_layers)
    held = () if states is None else states.layers
    found: dict[str, Any] = {
        "layer_types": ["linear_attention" if layer in held else "full_attention" for layer in layers]
    }
    if states is not None:
        found |= {"linear_num_heads": states.heads, "linear_head_dim": states.key_dim}
        found["linear_conv_kernel_dim"] = states.kernel
    return dict.fromkeys(layers, found)


_KIMI = Recurrent(
    RecurrentKind.KIMI_DELTA_ATTENTION,
    module="self_attn",
    by_default=_kimi_layers,
    section=_SECTION,
    gates_by_few=True,
)
_BAILING = Recurrent(
    RecurrentKind.KIMI_DELTA_ATTENTION,
    module="self_attn",
    every_key=("layer_group_size", 6),
    sizes={
        "linear_num_heads": "num_attention_heads",
        "linear_head_dim": "head_dim",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    },
)


def _experts(count: int, width: int, dense: int) -> Experts:
    return Experts(
        shared="shared_experts",
        count=("num_experts", count),
        per_token=("num_experts_per_token", 8),
        width=("moe_intermediate_size", width),
        shared_count=("num_shared_experts", 1),
        by_layer="mlp_layer_types",
        dense_layers=("first_k_dense_replace", dense),
    )


_REFUSALS = (
    Refusal(
        "tie_word_embeddings",
        lambda config: bool(config.get("tie_word_embeddings")),
        "transformers ties no weights of this type, and would train two: set it to false",
    ),
    Refusal(
        "num_key_value_heads",
        lambda config: config.get("num_key_value_heads", 32) not in (None, config.get("num_attention_heads")),
        "latent attention has a key of each query head: it has to be num_attention_heads",
    ),
)

KIMI_DELTA: Mapping[str, Family] = {
    "kimi_linear": Family(
        keys={"max_position_embeddings": "model_max_length"},
        latent=Latent(q_lora_rank=None),
        kv_heads=all_heads,
        recurrent=_KIMI,
        values_of_layers=_values_of_layers,
        experts=_experts(256, 1024, 1),
        refusals=_REFUSALS,
    ),
    "bailing_hybrid": Family(
        keys={"max_position_embeddings": "model_max_length"},
        latent=Latent(q_lora_rank=None),
        kv_heads=all_heads,
        gate="g_proj",
        gate_of_heads=lambda _: True,
        recurrent=_BAILING,
        experts=_experts(512, 768, 2),
        refusals=(
            *_REFUSALS,
            Refusal(
                "q_lora_rank",
                lambda config: config.get("q_lora_rank") is not None,
                "transformers' class projects queries at once, and does not read it: leave it out",
            ),
        ),
    ),
}
