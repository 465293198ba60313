"""The importers, by the kind of file that each reads."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from parcompile import entry_points

from .accelerate.read import DISTRIBUTED_IMPORTER, PARALLELISM_IMPORTER
from .accelerate.read import IMPORTER as ACCELERATE_IMPORTER
from .deepspeed.read import IMPORTER as DEEPSPEED_IMPORTER
from .gpt_neox.read import IMPORTER as GPT_NEOX_IMPORTER
from .kinds import (
    ACCELERATE,
    AUTOMODEL,
    AXOLOTL,
    BRIDGE,
    DEEPSPEED,
    DISTRIBUTED,
    GPT_NEOX,
    LLAMA_FACTORY,
    MEGATRON,
    MEGATRON_SWIFT,
    PARALLELISM,
    SWIFT,
    TORCHTITAN,
    TRAINER,
)
from .megatron.over_model import BRIDGE_IMPORTER
from .megatron.read import IMPORTER as MEGATRON_IMPORTER
from .reading import Importer
from .torchtitan import IMPORTER as TORCHTITAN_IMPORTER
from .trainers.automodel import IMPORTER as AUTOMODEL_IMPORTER
from .trainers.axolotl import IMPORTER as AXOLOTL_IMPORTER
from .trainers.llama_factory import IMPORTER as LLAMA_FACTORY_IMPORTER
from .trainers.llama_factory import TRAINER_IMPORTER
from .trainers.ms_swift import IMPORTER as SWIFT_IMPORTER
from .trainers.ms_swift import MEGATRON_IMPORTER as MEGATRON_SWIFT_IMPORTER

IMPORTERS: Mapping[str, Importer] = {
    DEEPSPEED: DEEPSPEED_IMPORTER,
    MEGATRON: MEGATRON_IMPORTER,
    GPT_NEOX: GPT_NEOX_IMPORTER,
    ACCELERATE: ACCELERATE_IMPORTER,
    PARALLELISM: PARALLELISM_IMPORTER,
    DISTRIBUTED: DISTRIBUTED_IMPORTER,
    AXOLOTL: AXOLOTL_IMPORTER,
    LLAMA_FACTORY: LLAMA_FACTORY_IMPORTER,
    TRAINER: TRAINER_IMPORTER,
    TORCHTITAN: TORCHTITAN_IMPORTER,
    BRIDGE: BRIDGE_IMPORTER,
    AUTOMODEL: AUTOMODEL_IMPORTER,
    SWIFT: SWIFT_IMPORTER,
    MEGATRON_SWIFT: MEGATRON_SWIFT_IMPORTER,
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
