"""The importers, by the kind of file that each reads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .deepspeed.read import IMPORTER as DEEPSPEED_IMPORTER
from .importer import Importer
from .kinds import DEEPSPEED

IMPORTERS: Mapping[str, Importer] = MappingProxyType({DEEPSPEED: DEEPSPEED_IMPORTER})
