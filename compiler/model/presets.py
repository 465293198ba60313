"""Public models by short name: their Hugging Face configuration and exact parameter count.

A preset holds every key of the published `config.json` that changes numbers or that generation needs, under the names
that stand there; `source` says where it was published. What a published file leaves out has the default of the model's
configuration class. The tests check the counts and that no class reads a key that is neither stated nor known to be
left out.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """A public model."""

    name: str
    hf_name: str
    source: str
    """Where the configuration was published."""
    parameters: int
    config: Mapping[str, Any]


@functools.cache
def presets() -> Mapping[str, Preset]:
    """All presets under their short names."""
    text = (importlib.resources.files("parcompile.model") / "presets.json").read_text(encoding="utf-8")
    return {name: Preset(name, **entry) for name, entry in json.loads(text).items()}


def near_presets(name: str) -> tuple[str, ...]:
    """The presets that a name may mean: those that it begins with, or that begin with it, whatever stands between.

    A name of the Hugging Face Hub is read without its owner, and as that of the model that was trained further.
    """
    wanted = _bare(_untuned(name))
    longer = [one for one in presets() if _bare(one).startswith(wanted)] if len(wanted) > 2 else []
    if longer:
        return tuple(longer)
    shorter = [one for one in presets() if wanted.startswith(_bare(one))]
    return (max(shorter, key=len),) if shorter else ()


_TUNED = ("instruct", "chat", "it", "base", "hf", "pt", "thinking")
"""What the names of further trained models of one shape have: parts between hyphens."""


def preset_alike(name: str) -> Preset | None:
    """The preset of which a name of the Hugging Face Hub names a further trained model, without or with its owner.

    Such a model has the same dimensions; its `config.json` may say other positions or tokens.
    """
    wanted = _untuned(name)
    return next((one for one in presets().values() if wanted in {_untuned(one.name), _untuned(one.hf_name)}), None)


def _untuned(name: str) -> str:
    parts = name.rpartition("/")[2].lower().split("-")
    return "-".join(part for part in parts if part not in _TUNED).removeprefix("meta-")


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def find_preset(name: str) -> Preset | None:
    """The preset of this short or Hugging Face name, in any case; None when there is none."""
    wanted = name.lower()
    for preset in presets().values():
        if wanted in {preset.name, preset.hf_name.lower()}:
            return preset
    return None
