"""Data files that are installed with the package."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any


@functools.cache
def shipped(package: str, name: str) -> Any:
    """The JSON tree of a file beside the modules of `package`, read once: nobody changes it."""
    return json.loads((importlib.resources.files(package) / name).read_text(encoding="utf-8"))
