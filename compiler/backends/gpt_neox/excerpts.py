"""Parts of a gpt-neox file as documents of their own: its keys under the names of their fields, and DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from parcompile.diagnostics import Diagnostic, Edit, Path
from parcompile.text import Document, Place

from .fields import fields

_EXTRA = "deepspeed_extra_args"
"""Holds what goes to DeepSpeed beside the fields for it."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A document of its own whose top-level keys stand at `origins` of the file."""

    document: Document
    origins: Mapping[str, Path]

    def in_file(self, one: Diagnostic) -> Diagnostic:
        """A diagnostic of the excerpt with the paths of the file. Positions are those of the file anyway."""
        fixes = tuple(replace(fix, edits=tuple(map(self._edit, fix.edits))) for fix in one.fixes)
        related = tuple(replace(other, path=self._path(other.path)) for other in one.related)
        return replace(one, path=self._path(one.path), fixes=fixes, related=related)

    def _edit(self, edit: Edit) -> Edit:
        return replace(edit, path=self._path(edit.path))

    def _path(self, path: Path) -> Path:
        if not path:
            return ()
        name = str(path[0])
        return (*self.origins.get(name, (name,)), *path[1:])


def whole(document: Document) -> Excerpt:
    """All keys as gpt-neox names them: it reads a hyphen as an underscore."""
    tree = document.tree if isinstance(document.tree, dict) else {}
    return _excerpt(document, {_name(key): (key,) for key in tree})


def for_deepspeed(document: Document) -> Excerpt:
    """What gpt-neox hands on to `deepspeed.initialize`: what differs from the default, and deepspeed_extra_args."""
    known = fields()
    origins: dict[str, Path] = {}
    for name, path in whole(document).origins.items():
        if name == _EXTRA:
            extra = document.get(path)
            origins.update({key: (*path, key) for key in (extra if isinstance(extra, dict) else {})})
        elif name in known and known[name].handed_on and document.get(path) != known[name].default:
            origins.setdefault(name, path)
    return _excerpt(document, origins)


def _name(key: object) -> str:
    return str(key).replace("-", "_")


def _excerpt(document: Document, origins: Mapping[str, Path]) -> Excerpt:
    places = {name: place for name, path in origins.items() if (place := document.place(path)) is not None}
    tree: dict[str, Any] = {name: document.get(origins[name]) for name in places}

    def moved(paths: frozenset[Path]) -> frozenset[Path]:
        return frozenset(
            (name, *path[len(origin) :])
            for path in paths
            for name, origin in origins.items()
            if path[: len(origin)] == origin
        )

    root = Place(*document.root[:4], places)
    part = replace(
        document, tree=tree, root=root, invalid=moved(document.invalid), duplicates=moved(document.duplicates)
    )
    return Excerpt(part, origins)
