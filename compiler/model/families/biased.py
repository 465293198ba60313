"""Dense decoders in the manner of GPT: LayerNorm with a bias, mostly an MLP of two linears."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Family, Refusal


def _modernbert_window(config: Mapping[str, Any]) -> int:
    window = config.get("local_attention", 128)
    return window // 2 if isinstance(window, int) else 0


def _other_head_dim(config: Mapping[str, Any]) -> bool:
    width = config.get("head_dim")
    return bool(
        config.get("qk_layernorm") and width and width != config["hidden_size"] // config["num_attention_heads"]
    )


BIASED: Mapping[str, Family] = {
    "jais2": Family(),
    "persimmon": Family(heads_interleaved=True),
    "phi": Family(
        refusals=(
            Refusal("qk_layernorm", _other_head_dim, "its norms take heads of hidden_size / num_attention_heads"),
        )
    ),
    "starcoder2": Family(),
    "nemotron": Family(),
    "gpt_neox": Family(base="gpt_neox", embedding="embed_in", attention="attention", heads_interleaved=True),
    "modernbert-decoder": Family(
        embedding="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
        head="decoder",
        attention="attn",
        window_of=_modernbert_window,
        refusals=(
            Refusal(
                "local_attention",
                lambda config: not config.get("sliding_window") and _modernbert_window(config) < 1,
                "transformers halves it for the window of its layers: it has to be a whole number of 2 or more",
            ),
        ),
        defaults={"intermediate_size": 1152},
    ),
    "stablelm": Family(
        refusals=(
            Refusal(
                "qk_layernorm",
                lambda config: bool(config.get("qk_layernorm")),
                "a LayerNorm of its own for each head is not described: set it to false",
            ),
        )
    ),
}
