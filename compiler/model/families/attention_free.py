"""Decoders none of whose layers attends: each is one state-space block (Mamba), without an MLP."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Family, Refusal
from parcompile.model.recurrent import Recurrent, RecurrentKind, SelectiveKeys, StateSpaceKeys

_NO_ATTENTION: Mapping[str, None] = {
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "max_position_embeddings": None,
}
_WIDE = {"residual_in_fp32": True}


def _states(key: str, config: Mapping[str, Any]) -> bool:
    """Whether a configuration has a key, with or without a value."""
    return key in config


def _is_on(key: str, config: Mapping[str, Any]) -> bool:
    return bool(config.get(key))


_LAYERS_AND_STATE = (
    Refusal(
        "layer_types",
        functools.partial(_states, "layer_types"),
        "transformers computes it from num_hidden_layers, and takes no other: remove it",
    ),
    Refusal(
        "ssm_state_size",
        functools.partial(_states, "ssm_state_size"),
        "transformers reads state_size in this model type: write that",
    ),
)
_NO_WIDTH = Refusal(
    "intermediate_size",
    lambda config: "intermediate_size" in config and config["intermediate_size"] is None,
    "transformers builds no layer with null: write the number of channels, or leave it out for expand x hidden_size",
)


def _not_compared(key: str) -> Refusal:
    return Refusal(
        key, functools.partial(_is_on, key), "the scan of mamba.py has not been compared: it has to be false"
    )


def _family(kind: RecurrentKind, refusals: tuple[Refusal, ...], **sizes: Any) -> Family:
    return Family(
        base="backbone",
        keys=_NO_ATTENTION,
        embedding="embeddings",
        attends=False,
        wide_stream="residual_in_fp32",
        recurrent=Recurrent(kind, module="mixer", layers_key="", every_key=None, **sizes),
        refusals=(*_LAYERS_AND_STATE, *refusals),
        defaults=_WIDE,
    )


def _mamba1(*refusals: Refusal) -> Family:
    """Mamba-1 layers, whose channels `intermediate_size` may count in the place of `expand`."""
    keys = SelectiveKeys(
        expand=("expand", 2),
        state=("state_size", 16),
        kernel=("conv_kernel", 4),
        step_rank="time_step_rank",
        convolution_bias=("use_conv_bias", True),
        bias=("use_bias", False),
        width="intermediate_size",
        norms=False,
    )
    return _family(RecurrentKind.MAMBA1, (_NO_WIDTH, *refusals), selective=keys)


ATTENTION_FREE: Mapping[str, Family] = {
    "mamba": _mamba1(_not_compared("use_mambapy")),
    "falcon_mamba": _mamba1(
        _not_compared("use_falcon_mambapy"),
        Refusal(
            "use_mambapy",
            functools.partial(_is_on, "use_mambapy"),
            "transformers reads use_falcon_mambapy in its place: remove it",
        ),
    ),
    "mamba2": _family(
        RecurrentKind.MAMBA2,
        (
            Refusal(
                "rms_norm",
                lambda config: config.get("rms_norm") is False,
                "transformers builds the gated norm whatever it says: remove it",
            ),
        ),
        state_space=StateSpaceKeys(
            heads=("num_heads", 128),
            head_dim=("head_dim", 64),
            groups=("n_groups", 8),
            state=("state_size", 128),
            kernel=("conv_kernel", 4),
            chunk=("chunk_size", 256),
            expand=("expand", 2),
            convolution_bias=("use_conv_bias", True),
            input_bias=("use_bias", False),
            output_bias=("use_bias", False),
        ),
    ),
}
