"""Values of a configuration that the class of its type does not take: null, or another type than the one declared.

Most classes of transformers are strict, and refuse such a value before a model is built. The keys that they check stand
in `key_types.json`, which `.ci/generate/key_types.py` writes.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

_MEANT = {"whole": "a whole number", "number": "a number", "switch": "true or false"}


@functools.cache
def _stored() -> Mapping[str, Any]:
    text = (importlib.resources.files("parcompile.model") / "key_types.json").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


def mistyped(model_type: str, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first key whose value its class refuses, with what is wrong; None where there is none.

    A type of which nothing is known, such as a plug-in's, has none.
    """
    for kind, keys in _stored()["types"].get(model_type, {}).items():
        for key in keys:
            if key not in config or _is_taken(config[key], kind):
                continue
            if config[key] is None:
                return key, f"{key} is null, which transformers refuses: write {_MEANT[kind]}, or leave the key out"
            return key, f"{key} is {json.dumps(config[key])[:60]}: it has to be {_MEANT[kind]}"
    return None


def _is_taken(value: Any, kind: str) -> bool:
    """A number may stand for a switch, and a switch for a number: Python takes them for each other."""
    if kind == "whole":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, int | float)
