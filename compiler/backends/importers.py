"""The importers, by the kind of file that each reads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .deepspeed.read import IMPORTER as DEEPSPEED_IMPORTER
from .gpt_neox.read import IMPORTER as GPT_NEOX_IMPORTER
from .importer import Importer
from .kinds import DEEPSPEED, GPT_NEOX, MEGATRON
from .megatron.read import IMPORTER as MEGATRON_IMPORTER

IMPORTERS: Mapping[str, Importer] = MappingProxyType(
    {DEEPSPEED: DEEPSPEED_IMPORTER, MEGATRON: MEGATRON_IMPORTER, GPT_NEOX: GPT_NEOX_IMPORTER}
)
