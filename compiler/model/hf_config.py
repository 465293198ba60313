"""Reads the dimensions out of a Hugging Face `config.json` (a dictionary), family by family.

Defaults are those of the configuration classes of transformers 5.23; a key that a family cannot do without is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .shape import MlaShape, ModelShape, MoeShape

Config = Mapping[str, Any]


class ModelConfigError(ValueError):
    """A configuration that does not describe a model. `key` is the key at fault, when it is one."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "mixtral",
    "deepseek_v3",
    "gpt_neox",
    "gpt2",
)
"""The model types whose parameters the compiler knows exactly."""


def shape_from_config(config: Config) -> ModelShape:
    """The shape that a Hugging Face configuration describes.

    Raises:
        ModelConfigError: an unknown model type, a missing key, or a value that is not a positive whole number.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelConfigError(f"model_type {family!r} is not one of: {', '.join(FAMILIES)}", "model_type")
    read = _Reader(config, _GPT2_NAMES if family == "gpt2" else {})
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    mla = _mla(read) if family == "deepseek_v3" else None
    tied_by_default = family in {"gemma", "gemma2", "gpt2"}
    bias = bool(config.get("attention_bias", family == "gpt_neox"))
    has_biases = family in {"gpt2", "gpt_neox"}
    return ModelShape(
        model_type=family,
        hidden_size=hidden,
        num_hidden_layers=read.size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=heads if has_biases else read.size("num_key_value_heads", heads),
        head_dim=mla.v_head_dim if mla else _head_dim(read, family, hidden, heads),
        intermediate_size=read.size("intermediate_size", 4 * hidden if family == "gpt2" else None),
        vocab_size=read.size("vocab_size"),
        max_position_embeddings=read.size("max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", tied_by_default)),
        rotary=family != "gpt2",
        gated_mlp=not has_biases,
        qkv_bias=family in {"gpt2", "qwen2"} or bias,
        attention_output_bias=family == "gpt2" or (bias and family != "qwen2"),
        mlp_bias=has_biases or bool(config.get("mlp_bias", False)),
        qk_norm=family in {"qwen3", "qwen3_moe"},
        norms_per_layer=4 if family == "gemma2" else 2,
        norm_bias=has_biases,
        sliding_window=_sliding_window(config, family),
        moe=_moe(read, family),
        mla=mla,
    )


class _Reader:
    """Reads sizes under the family's own names and says which key is wrong."""

    def __init__(self, config: Config, names: Mapping[str, str]) -> None:
        self._config = config
        self._names = names

    def size(self, name: str, default: int | None = None) -> int:
        key = self._names.get(name, name)
        value = self._config.get(key, self._config.get(name))
        if value is None:
            if default is None:
                raise ModelConfigError(f"{key} is missing", key)
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelConfigError(f"{key} is {value!r}: it has to be a whole number of 1 or more", key)
        return value


def _head_dim(read: _Reader, family: str, hidden: int, heads: int) -> int:
    if family in {"gemma", "gemma2"}:
        return read.size("head_dim", 256)
    if family == "qwen3":
        return read.size("head_dim", 128)
    if hidden % heads:
        given = read.size("head_dim", -1)
        if given < 0:
            raise ModelConfigError(
                f"hidden_size {hidden} / num_attention_heads {heads} is not whole and head_dim is not given",
                "num_attention_heads",
            )
        return given
    return read.size("head_dim", hidden // heads)


def _sliding_window(config: Config, family: str) -> int | None:
    if family in {"qwen2", "qwen3", "qwen3_moe"} and not config.get("use_sliding_window", False):
        return None
    window = config.get("sliding_window", 4096 if family == "gemma2" else None)
    return window if isinstance(window, int) else None


def _moe(read: _Reader, family: str) -> MoeShape | None:
    if family == "mixtral":
        return MoeShape(
            num_experts=read.size("num_local_experts", 8),
            num_experts_per_token=read.size("num_experts_per_tok", 2),
            intermediate_size=read.size("intermediate_size"),
        )
    if family == "qwen3_moe":
        return MoeShape(
            num_experts=read.size("num_experts", 128),
            num_experts_per_token=read.size("num_experts_per_tok", 8),
            intermediate_size=read.size("moe_intermediate_size", 768),
        )
    if family == "deepseek_v3":
        return MoeShape(
            num_experts=read.size("n_routed_experts", 256),
            num_experts_per_token=read.size("num_experts_per_tok", 8),
            intermediate_size=read.size("moe_intermediate_size", 2048),
            num_shared_experts=read.size("n_shared_experts", 1),
            first_moe_layer=read.size("first_k_dense_replace", 3),
        )
    return None


def _mla(read: _Reader) -> MlaShape:
    return MlaShape(
        q_lora_rank=read.size("q_lora_rank", 1536),
        kv_lora_rank=read.size("kv_lora_rank", 512),
        qk_nope_head_dim=read.size("qk_nope_head_dim", 128),
        qk_rope_head_dim=read.size("qk_rope_head_dim", 64),
        v_head_dim=read.size("v_head_dim", 128),
    )
