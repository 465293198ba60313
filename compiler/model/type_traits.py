"""What single model types have beside their rows (`families.json`, by type). Who reads a trait says what it means."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any


@functools.cache
def _types() -> Mapping[str, Mapping[str, Any]]:
    text = (importlib.resources.files("parcompile.model") / "families.json").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, Any]] = json.loads(text)
    return found


def by_type(trait: str) -> Mapping[str, Any]:
    """The values of a trait, by the types that have it."""
    return {name: traits[trait] for name, traits in _types().items() if trait in traits}


def types_with(trait: str) -> frozenset[str]:
    """The types that have a trait."""
    return frozenset(by_type(trait))


# What the activation of an MLP keeps in memory for its backward pass, beside its input and its result.

_KEYS = ("hidden_act", "activation_function", "afn")
"""What configurations call it."""

_OF_CLASS = by_type("activation")
"""Those that classes take by default, where they are not what torch computes in one piece from what it keeps."""

_KEPT = {
    **dict.fromkeys(("gelu_accurate", "gelu_new", "gelu_python_tanh"), 3),
    "gelu_10": 1,
    "gelu_fast": 6,
    "gelu_python": 2,
    "quick_gelu": 1,
    "relu": -1,  # its result alone, not its input
}
"""Numbers for each feature, in the type of the weights: counted with autograd's hooks for saved tensors in
transformers/activations.py, which writes these functions out."""


def kept_numbers(model_type: str, config: Mapping[str, Any]) -> int:
    """How many more numbers than one for its input and one for its result, for each feature of the MLP."""
    name = next((config[key] for key in _KEYS if isinstance(config.get(key), str)), _OF_CLASS.get(model_type))
    if model_type in types_with("gelu_is_new") and name in (None, "gelu"):
        name = "gelu_new"  # what its class calls so
    return _KEPT.get(str(name), 0)
