"""The importers, by the kind of file that each reads."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from parcompile import entry_points

from . import kinds as of
from .accelerate.read import DISTRIBUTED_IMPORTER, PARALLELISM_IMPORTER
from .accelerate.read import IMPORTER as ACCELERATE_IMPORTER
from .deepspeed.read import IMPORTER as DEEPSPEED_IMPORTER
from .gpt_neox.read import IMPORTER as GPT_NEOX_IMPORTER
from .megatron.over_model import BRIDGE_IMPORTER
from .megatron.read import IMPORTER as MEGATRON_IMPORTER
from .reading import Importer
from .torchtitan import IMPORTER as TORCHTITAN_IMPORTER
from .trainers.automodel import IMPORTER as AUTOMODEL_IMPORTER
from .trainers.importers import (
    AXOLOTL_IMPORTER,
    LLAMA_FACTORY_IMPORTER,
    MEGATRON_SWIFT_IMPORTER,
    SWIFT_IMPORTER,
    TRAINER_IMPORTER,
)

IMPORTERS: Mapping[str, Importer] = {
    of.DEEPSPEED: DEEPSPEED_IMPORTER,
    of.MEGATRON: MEGATRON_IMPORTER,
    of.GPT_NEOX: GPT_NEOX_IMPORTER,
    of.ACCELERATE: ACCELERATE_IMPORTER,
    of.PARALLELISM: PARALLELISM_IMPORTER,
    of.DISTRIBUTED: DISTRIBUTED_IMPORTER,
    of.AXOLOTL: AXOLOTL_IMPORTER,
    of.LLAMA_FACTORY: LLAMA_FACTORY_IMPORTER,
    of.TRAINER: TRAINER_IMPORTER,
    of.TORCHTITAN: TORCHTITAN_IMPORTER,
    of.BRIDGE: BRIDGE_IMPORTER,
    of.AUTOMODEL: AUTOMODEL_IMPORTER,
    of.SWIFT: SWIFT_IMPORTER,
    of.MEGATRON_SWIFT: MEGATRON_SWIFT_IMPORTER,
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
    for kind in kinds():
        if kind in IMPORTERS:
            continue
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
