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
