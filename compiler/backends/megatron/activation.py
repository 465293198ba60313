"""Megatron-LM's words for norms, activations and biases."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from parcompile.backends.architecture import Architecture, InexpressibleError
from parcompile.backends.reading import Arguments, Source

OPTIONS = (
    "normalization",
    "norm_epsilon",
    "apply_layernorm_1p",
    "swiglu",
    "quick_geglu",
    "squared_relu",
    "no_bias_gelu_fusion",
    "disable_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
)

_ACTIVATIONS: Mapping[tuple[bool, str], str | None] = MappingProxyType(
    {
        (True, "silu"): "swiglu",
        (True, "quick_gelu"): "quick_geglu",
        (False, "squared_relu"): "squared_relu",
        (False, "gelu"): None,
        (False, "gelu_tanh"): None,
    }
)
"""The flag of each activation, gated or not."""


def write(found: Architecture) -> Arguments:
    """The flags of a layer.

    Raises:
        InexpressibleError: Megatron-LM has no flag for something.
    """
    flags: Arguments = {
        "normalization": "RMSNorm" if found.rms_norm else "LayerNorm",
        "norm_epsilon": found.epsilon,
        **({"apply_layernorm_1p": True} if found.centered_norm else {}),
        **_write_biases(found),
        # Latent attention has a norm of its compressed parts only with this flag.
        **({"qk_layernorm": True} if found.qk_norm or found.latent else {}),
    }
    kind = found.gated, found.activation
    if kind not in _ACTIVATIONS:
        gated = "a gated MLP" if found.gated else "an MLP without a gate"
        raise InexpressibleError(f"{found.activation} in {gated}", "Megatron-LM has no flag for it")
    if found.activation == "gelu_tanh" and not all(found.biases):
        raise InexpressibleError("gelu by tanh without biases", "Megatron-LM computes it only with its fused bias")
    flag = _ACTIVATIONS[kind]
    if flag is not None:
        flags[flag] = True
    if found.activation in ("gelu", "squared_relu") and not found.gated and all(found.biases):
        # The fused kernel of bias and GELU computes its approximation with tanh, and there is none of squared ReLU.
        flags["no_bias_gelu_fusion"] = True
    return flags


def _write_biases(found: Architecture) -> Arguments:
    if all(found.biases):
        return {}
    if not any(found.biases):
        return {"disable_bias_linear": True}
    if found.biases == (True, False, False):
        return {"disable_bias_linear": True, "add_qkv_bias": True}
    where = [name for name, on in zip(("qkv", "attention output", "MLP"), found.biases, strict=True) if on]
    raise InexpressibleError(
        f"biases of {' and '.join(where)} alone",
        "Megatron-LM has biases of all linears, of queries, keys and values, or none",
    )


def read(source: Source) -> dict[str, Any]:
    """The same flags as switches of an `Architecture`.

    Raises:
        UndecidedError: the file does not say a value.
    """

    def on(name: str) -> bool:
        return source.value(name, ("model",)) is True

    biased, latent = not on("disable_bias_linear"), on("multi_latent_attention")
    biases = (True, True, True) if biased else (on("add_qkv_bias"), False, False)
    gated = {"swiglu": "silu", "quick_geglu": "quick_gelu"}
    flag = next((name for name in gated if on(name)), None)
    fused = not on("no_bias_gelu_fusion")
    activation = gated[flag] if flag else "squared_relu" if on("squared_relu") else "gelu"
    if activation == "gelu" and biased and fused:
        activation = "gelu_tanh"
    kind = str(source.value("normalization", ("model",)))
    return {
        "rms_norm": kind == "RMSNorm",
        "epsilon": float(source.value("norm_epsilon", ("model",))),
        "centered_norm": on("apply_layernorm_1p"),
        "activation": activation,
        "gated": flag is not None,
        "biases": biases,
        "qk_norm": on("qk_layernorm") and not latent,
    }
