"""The switches of a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.shape import ModelShape, MoeShape

from .families import FAMILIES, Switches
from .switches import ACTIVATIONS, Architecture, InexpressibleError, Rope, Router

Config = Mapping[str, Any]

_NO_SCALING = ("default", None)
_SCALING_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)


def architecture_of(config: Config, shape: ModelShape) -> Architecture:
    """The switches of a model.

    Raises:
        InexpressibleError: a model type with activations, norms or scales of its own, or a key that no switch stands
            for.
    """
    name = shape.model_type
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InexpressibleError(f"model_type {name}", f"its layers are none of those that can be described: {known}")
    family = FAMILIES[name]
    activation = str(_value(config, *family.activation))
    if activation not in ACTIVATIONS:
        raise InexpressibleError(f"{family.activation[0]} {activation}", "there is no switch for it")
    if shape.head_bias:
        raise InexpressibleError("head_bias", "there is no switch for a bias of the head")
    return Architecture(
        rms_norm=family.rms_norm,
        epsilon=float(_value(config, *family.epsilon)),
        activation=ACTIVATIONS[activation],
        gated=shape.gated_mlp,
        biases=(shape.qkv_bias, shape.attention_output_bias, shape.mlp_bias),
        rope=_rope(config, family),
        tied=shape.tie_word_embeddings,
        grouped=shape.num_key_value_heads != shape.num_attention_heads,
        own_head_dim=shape.head_dim * shape.num_attention_heads != shape.hidden_size,
        centered_norm=family.centered_norm,
        qk_norm=shape.qk_norm,
        parallel=_switch(config, family.parallel, default=name == "gpt_neox"),
        window=_window(config, shape),
        **{part: float(_value(config, *key)) for part, key in family.dropouts.items()},
        initializer_range=float(_value(config, "initializer_range", family.initializer_range)),
        router=_router(config, family, shape.moe),
        latent=family.latent,
    )


def _value(config: Config, key: str, default: Any) -> Any:
    found = config.get(key)
    return default if found is None else found


def _switch(config: Config, ways: Mapping[bool, Mapping[str, bool]], *, default: bool) -> bool:
    keys = {key for way in ways.values() for key in way}
    return bool(_value(config, next(iter(keys)), default)) if keys else next(iter(ways))


def _router(config: Config, family: Switches, moe: MoeShape | None) -> Router | None:
    if family.router is None or moe is None:
        return None
    given = {part: _value(config, *key) for part, key in family.router_keys.items()}
    fixed = family.router
    return Router(
        score=fixed.score,
        normalized=bool(given.get("normalized", fixed.normalized)),
        scale=float(given.get("scale", fixed.scale)),
        groups=int(given.get("groups", fixed.groups)),
        groups_per_token=int(given.get("groups_per_token", fixed.groups_per_token)),
        correction_bias=fixed.correction_bias,
        shared_gate=fixed.shared_gate,
        shared=fixed.shared,
        dense_layers=moe.first_moe_layer > 0 or moe.layers is not None,
    )


def _window(config: Config, shape: ModelShape) -> int | None:
    window = shape.sliding_window
    kinds = set(config.get("layer_types") or ())
    if window is None or kinds == {"full_attention"} or window >= shape.max_position_embeddings:
        return None
    first = config.get("max_window_layers")
    if len(kinds) > 1 or (config.get("use_sliding_window") and first not in (None, 0)):
        raise InexpressibleError(f"sliding_window {window}", "only some layers have it")
    return window


def _rope(config: Config, family: Switches) -> Rope | None:
    """Rotary positions, as transformers 5 writes them (`rope_parameters`) or as transformers 4 did."""
    if family.theta is None:
        return None
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise InexpressibleError("rope_parameters", "layers have rotary positions of different kinds")
    theta = given.get("rope_theta", _value(config, family.theta_key, family.theta))
    percent = 1.0
    if family.percent is not None:
        percent = given.get("partial_rotary_factor", _value(config, *family.percent))
    kind = given.get("rope_type", given.get("type"))
    scaling: dict[str, Any] = {}
    if kind not in _NO_SCALING:
        kept = {key: given[key] for key in _SCALING_KEYS if given.get(key) is not None}
        original = config.get("original_max_position_embeddings")
        if original is not None:
            kept.setdefault("original_max_position_embeddings", original)
        scaling = {"rope_type": str(kind), **kept}
    if family.latent and config.get("rope_interleave") is False:
        raise InexpressibleError("rope_interleave false", "latent attention turns neighbouring elements together")
    return Rope(float(theta), float(percent), scaling)
