"""Decoders most of whose layers carry a state along the sequence in the place of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parcompile.model.blocks.delta import GatedDeltaTraits, KimiDelta, KimiDeltaTraits
from parcompile.model.blocks.lightning import LightningTraits
from parcompile.model.blocks.short_convolution import ShortConvolutionTraits
from parcompile.model.family import Experts, Family, Latent, Refusal
from parcompile.model.layers import LayersError
from parcompile.model.shape import ModelShape

from .added import all_heads, by_step

# Decoders most of whose layers carry a state along the sequence in the place of attention.


def _all_but_every_fourth(_: Mapping[str, Any], count: int) -> tuple[int, ...]:
    found = tuple(layer for layer in range(count) if layer % 4 != 3)
    return found[:-1] if len(found) == count else found  # one attends at least


def _experts(
    count: int, per_token: int, layers: Callable[[Mapping[str, Any], int], Sequence[int]] | None = None
) -> Experts:
    return Experts(
        layers=layers,
        shared="shared_expert",
        count=("num_experts", count),
        per_token=("num_experts_per_tok", per_token),
        width=("moe_intermediate_size", 512),
        shared_width=("shared_expert_intermediate_size", 512),
    )


_OLD_NAME = Refusal(
    "tie_embedding",
    lambda config: config.get("tie_embedding") not in (None, config.get("tie_word_embeddings", True)),
    "it is the old name of tie_word_embeddings, and says something else: write tie_word_embeddings alone",
)


def _adjusted(config: Mapping[str, Any], width: int) -> int:
    """The width of LFM2's MLP (`Lfm2MLP` of transformers)."""
    width = config.get("block_ff_dim") or width
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
    return width if factor is None else multiple * -(-int(factor * width) // multiple)


_LISTED = Refusal(
    "layer_types",
    lambda config: config.get("layer_types") is None,
    "transformers builds no such model without it: write the kind of each layer",
)


def _lfm2(*refusals: Refusal, **others: Any) -> Family:
    return Family(mlp="feed_forward", parts=(ShortConvolutionTraits(),), refusals=(_OLD_NAME, *refusals), **others)


def _lfm3_convolutions(_: Mapping[str, Any], count: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(count) if layer % 4 in (1, 3) or layer == 0)


LFM2 = _lfm2(mlp_width=_adjusted)
LFM2_MOE = _lfm2(
    _LISTED,
    experts=Experts(
        block="feed_forward",
        count=("num_experts", 32),
        per_token=("num_experts_per_tok", 4),
        width=("moe_intermediate_size", 1792),
        dense_layers=("num_dense_layers", 2),
    ),
)
LFM3 = Family(
    gate="g_proj",
    gate_of_heads=lambda _: True,
    gate_key="use_attention_gate",
    mlp="feed_forward",
    parts=(
        ShortConvolutionTraits(by_default=_lfm3_convolutions, attending_words=("full_attention", "sliding_attention")),
    ),
    defaults={"sliding_window": 256, "conv_L_cache": 7, "use_attention_gate": True},
)
MINIMAX = Family(
    parts=(LightningTraits(module="self_attn", by_default=lambda _, count: tuple(range(1, count, 2))),),
    experts=Experts(),
    refusals=(
        Refusal(
            "router_jitter_noise",
            lambda config: bool(config.get("router_jitter_noise")),
            "transformers multiplies the residual in place with the hidden states, which ranks hold apart: set it to 0",
        ),
    ),
)
OLMO_HYBRID = Family(
    parts=(GatedDeltaTraits(by_default=_all_but_every_fourth, follows_attention=True),),
    refusals=(
        Refusal(
            "layer_types",
            lambda config: len(set(config.get("layer_types") or ("linear_attention", "full_attention"))) == 1,
            "transformers builds no such model of one kind of layer: it needs linear_attention and full_attention",
        ),
        Refusal(
            "num_hidden_layers",
            lambda config: config.get("num_hidden_layers") == 1,
            "transformers builds no such model of one layer: it needs linear_attention and full_attention",
        ),
    ),
)
QWEN3_NEXT = Family(query_gate=True, parts=(GatedDeltaTraits(),), experts=_experts(512, 10, by_step))
QWEN3_5_TEXT = Family(query_gate=True, parts=(GatedDeltaTraits(),))
QWEN3_5_MOE_TEXT = Family(query_gate=True, parts=(GatedDeltaTraits(),), experts=_experts(256, 8))


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


def _values_of_layers(config: Mapping[str, Any], shape: ModelShape) -> Mapping[int, Mapping[str, Any]]:
    """What the section of published files says, by the keys that its class makes of it."""
    states = shape.part(KimiDelta)
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


_KIMI = KimiDeltaTraits(
    module="self_attn",
    by_default=_kimi_layers,
    section=_SECTION,
    gates_by_few=True,
)
_BAILING = KimiDeltaTraits(
    module="self_attn",
    every_key=("layer_group_size", 6),
    sizes={
        "linear_num_heads": "num_attention_heads",
        "linear_head_dim": "head_dim",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    },
)


def _kimi_experts(count: int, width: int, dense: int) -> Experts:
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

KIMI_LINEAR = Family(
    keys={"max_position_embeddings": "model_max_length"},
    latent=Latent(q_lora_rank=None),
    kv_heads=all_heads,
    parts=(_KIMI,),
    values_of_layers=_values_of_layers,
    experts=_kimi_experts(256, 1024, 1),
    refusals=_REFUSALS,
)
BAILING_HYBRID = Family(
    keys={"max_position_embeddings": "model_max_length"},
    latent=Latent(q_lora_rank=None),
    kv_heads=all_heads,
    gate="g_proj",
    gate_of_heads=lambda _: True,
    parts=(_BAILING,),
    experts=_kimi_experts(512, 768, 2),
    refusals=(
        *_REFUSALS,
        Refusal(
            "q_lora_rank",
            lambda config: config.get("q_lora_rank") is not None,
            "transformers' class projects queries at once, and does not read it: leave it out",
        ),
    ),
)
