"""The causal language model inside the configuration of a multimodal one: what is planned and trained of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .catalogue import ALIKE, TEXT_PARTS, model_types

Config = Mapping[str, Any]

_BESIDE = frozenset(
    {
        *("architectures", "model_type", "text_config", "torch_dtype", "dtype", "transformers_version"),
        "tie_word_embeddings",  # read by text_part
    }
)


def text_part(config: Config) -> Config:
    """The configuration of the text part of a multimodal model; any other configuration as it is.

    A type of code that comes with the weights is read as the type of transformers that has its layers.

    What the text part leaves out keeps the default of its own class, except for `tie_word_embeddings`, which
    transformers reads from the whole model whatever its text part says.
    """
    inner, name = config.get("text_config"), config.get("model_type")
    if name in ALIKE:
        return {key: value for key, value in config.items() if key != "auto_map"} | {"model_type": ALIKE[str(name)]}
    if name not in TEXT_PARTS or not isinstance(inner, Mapping):
        return config
    known = model_types()[str(name)]
    kind = inner.get("model_type") or known.text
    kind = ALIKE.get(str(kind), kind)
    if not (kind in model_types() and model_types()[str(kind)].works):
        return config  # refused, with the reasons of both
    return {**inner, "model_type": kind, "tie_word_embeddings": bool(config.get("tie_word_embeddings", known.tied))}


def left_out(config: Config) -> tuple[str, ...]:
    """The keys of a multimodal configuration that its text part does not have."""
    return tuple(key for key in config if key not in _BESIDE)
