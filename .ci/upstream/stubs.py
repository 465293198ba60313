"""Stands in for packages that other projects import and that a machine without a GPU lacks.

A stub answers every attribute with a mock; it is good for code that is imported and not run.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

NEW_ENOUGH = "99.0.0"
"""The version of every stub: checks of a minimum version pass."""


class _Stub(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 -- what makes it a package

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return NEW_ENOUGH
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs of the named packages; with `own`, of every package that is not found and not one of those."""

    def __init__(self, names: Sequence[str] = (), own: Sequence[str] | None = None) -> None:
        self._names = frozenset(names)
        self._own = own

    def find_spec(self, name: str, _path: object, _target: object = None) -> importlib.machinery.ModuleSpec | None:
        steps = name.split(".")
        named = any(".".join(steps[:length]) in self._names for length in range(1, len(steps) + 1))
        missing = self._own is not None and steps[0] not in self._own
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if named or missing else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(names: Sequence[str], *, own: Sequence[str] | None = None) -> None:
    """Puts stubs of `names` before everything else; with `own`, stubs of all other missing packages last."""
    sys.meta_path.insert(0, Stubs(names))
    if own is not None:
        sys.meta_path.append(Stubs(own=own))


def answer_for_missing_versions() -> None:
    """Lets packages that are not installed have a version that is new enough."""
    found = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return found(name)
        except importlib.metadata.PackageNotFoundError:
            return NEW_ENOUGH

    importlib.metadata.version = version
