"""Decoders whose scores fall with the distance of a key (ALiBi, arXiv 2108.12409), and Falcon, which may do so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Family, Refusal


def _falcon_kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("new_decoder_architecture"):
        return int(config.get("num_kv_heads") or heads)
    return 1 if config.get("multi_query", True) else heads


ALIBI: Mapping[str, Family] = {
    "falcon": Family(
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
    ),
    "bloom": Family(
        base="transformer",
        keys={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "intermediate_size": None},
        layers="h",
        embedding="word_embeddings",
        embedding_norm="word_embeddings_layernorm",
        alibi=True,
        attention="self_attention",
        heads_interleaved=True,
        mlp_ratio=4,
        refusals=(
            Refusal(
                "slow_but_exact",
                lambda config: bool(config.get("slow_but_exact")) and config.get("pretraining_tp", 1) > 1,
                "it adds up slices of the weights one after the other, as one rank alone can: set it to false",
            ),
        ),
        defaults={"max_position_embeddings": 2048},
    ),
    "mpt": Family(
        base="transformer",
        keys={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "intermediate_size": None,
        },
        layers="blocks",
        embedding="wte",
        alibi=True,
        attention="attn",
        mlp="ffn",
        mlp_ratio=4,
        defaults={"max_position_embeddings": 2048},
    ),
}
