"""The importers, by the kind of file that each reads."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from parcompile import entry_points

from . import kinds as of
from . import torchtitan
from .accelerate import read as accelerate
from .deepspeed import read as deepspeed
from .gpt_neox import read as gpt_neox
from .megatron import over_model
from .megatron import read as megatron
from .reading import Importer
from .trainers import automodel
from .trainers import importers as trainers

IMPORTERS: Mapping[str, Importer] = {
    of.DEEPSPEED: deepspeed.IMPORTER,
    of.MEGATRON: megatron.IMPORTER,
    of.GPT_NEOX: gpt_neox.IMPORTER,
    of.ACCELERATE: accelerate.IMPORTER,
    of.PARALLELISM: accelerate.PARALLELISM_IMPORTER,
    of.DISTRIBUTED: accelerate.DISTRIBUTED_IMPORTER,
    of.AXOLOTL: trainers.AXOLOTL_IMPORTER,
    of.LLAMA_FACTORY: trainers.LLAMA_FACTORY_IMPORTER,
    of.TRAINER: trainers.TRAINER_IMPORTER,
    of.TORCHTITAN: torchtitan.IMPORTER,
    of.BRIDGE: over_model.BRIDGE_IMPORTER,
    of.AUTOMODEL: automodel.IMPORTER,
    of.SWIFT: trainers.SWIFT_IMPORTER,
    of.MEGATRON_SWIFT: trainers.MEGATRON_SWIFT_IMPORTER,
}
"""The importers of this package."""


def kinds() -> tuple[str, ...]:
    """The kinds of files that can be imported, those of plug-ins behind the others."""
    return (*IMPORTERS, *(name for name in entry_points.offers(entry_points.IMPORTERS) if name not in IMPORTERS))


def importer(kind: str) -> Importer:
    """The importer of one of `kinds()`.

    Raises:
        PluginError: that of a plug-in cannot be used.
    """
    return IMPORTERS[kind] if kind in IMPORTERS else entry_points.load(entry_points.IMPORTERS, kind, _as_importer)


def added_kind(tree: Mapping[str, Any]) -> str | None:
    """The plug-in's kind that a file is of, which no importer of this package knows.

    Raises:
        PluginError: a plug-in that might know it cannot be used.
    """
    for kind in (name for name in kinds() if name not in IMPORTERS):
        if entry_points.called(entry_points.IMPORTERS, kind, functools.partial(_recognises, importer(kind), tree)):
            return kind
    return None


def _recognises(one: Importer, tree: Mapping[str, Any]) -> bool:
    return bool(one.recognises(tree))


def _as_importer(given: object) -> Importer:
    if not isinstance(given, Importer):
        raise TypeError(f"it has to be a parcompile.plugins.Importer, and is of type {type(given).__name__}")
    if type(given.tool) is not str:
        raise TypeError("tool is the name of one, a text")
    return given
