"""Decoders before Llama: learned or fixed positions, or scores that fall with the distance (ALiBi)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Family, Refusal

# Decoders before Llama with learned or fixed positions: LayerNorm, tied heads, names and layouts of their own.

_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
_CROSS = Refusal(
    "add_cross_attention",
    lambda config: bool(config.get("add_cross_attention")),
    "it makes the model a decoder behind an encoder",
)


def _kinds_differ(config: Mapping[str, Any]) -> bool:
    """Of GPT-Neo: pairs of kinds and how often these are repeated, `[[["global", "local"], 12]]`."""
    listed, layers = config.get("attention_types"), config.get("num_hidden_layers", 24)
    pairs: Any = [[["global", "local"], 12]] if listed is None else listed
    try:
        return bool(sum(len(kinds) * times for kinds, times in pairs) != config.get("num_layers", layers))
    except (TypeError, ValueError):
        return True


def _gpt(**others: Any) -> Family:
    """What GPT-2 and its relatives have in common."""
    return Family(base="transformer", layers="h", embedding="wte", mlp_ratio=4, **others)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _multiple(config: Mapping[str, Any]) -> Any:
    return config.get("intermediate_multiple_size", 4)


GPT_BIGCODE = _gpt(
    keys=_KEYS,
    positions="wpe",
    attention="attn",
    kv_heads=lambda config, heads: 1 if config.get("multi_query", True) else heads,
    heads_interleaved=True,
    refusals=(_CROSS,),
)
GPT_NEO = _gpt(
    refusals=(
        Refusal("attention_types", _kinds_differ, "it has to list kinds of as many layers as num_layers counts"),
    ),
    keys={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    positions="wpe",
    attention="attn.attention",
    defaults={"max_position_embeddings": 2048},
)
CODEGEN = _gpt(
    keys=_KEYS,
    attention="attn",
    qkv_parts="qvk",
    fused_blocks=4,
    refusals=(
        Refusal(
            "n_head",
            lambda config: int(config.get("n_head", config.get("num_attention_heads", 16))) % 4 > 0,
            "its projection holds 4 blocks of heads, whatever their number: it has to be a multiple of 4",
        ),
    ),
    defaults={"max_position_embeddings": 2048},
)
GPT_NEOX_JAPANESE = Family(
    base="gpt_neox_japanese",
    keys={"intermediate_size": None},
    embedding="embed_in",
    head="embed_out",
    attention="attention",
    heads_interleaved=True,
    mlp_ratio=1,
    mlp_width=lambda config, hidden_size: int(_multiple(config)) * hidden_size,
    refusals=(
        Refusal(
            "intermediate_multiple_size",
            lambda config: not _whole(_multiple(config)),
            "the MLP is this many hidden sizes wide: it has to be a whole number of 1 or more",
        ),
    ),
    defaults={"max_position_embeddings": 2048},
)


# Decoders whose scores fall with the distance of a key (ALiBi, arXiv 2108.12409), and Falcon, which may do so.


def _falcon_kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("new_decoder_architecture"):
        return int(config.get("num_kv_heads") or heads)
    return 1 if config.get("multi_query", True) else heads


FALCON = Family(
    base="transformer",
    keys={"intermediate_size": "ffn_hidden_size"},
    layers="h",
    embedding="word_embeddings",
    alibi="alibi",
    attention="self_attention",
    kv_heads=_falcon_kv_heads,
    heads_interleaved=True,
    mlp_ratio=4,
    refusals=(
        Refusal(
            "num_kv_heads",
            lambda config: (
                not config.get("new_decoder_architecture")
                and not config.get("multi_query", True)
                and config.get("num_kv_heads") not in (None, config.get("num_attention_heads"))
            ),
            "without new_decoder_architecture and multi_query each head has its own key and value: leave it out",
        ),
        Refusal(
            "num_kv_heads",
            lambda config: isinstance(heads := config.get("num_kv_heads"), int) and heads < 1,
            "it has to be a whole number of 1 or more",
        ),
        Refusal(
            "parallel_attn",
            lambda config: (
                bool(config.get("new_decoder_architecture"))
                and not config.get("parallel_attn", True)
                and config.get("num_ln_in_parallel_attn") in (None, 2)
            ),
            "with new_decoder_architecture and two norms transformers misses a norm of such layers: set it to true",
        ),
    ),
    defaults={"max_position_embeddings": 2048},
)
