"""`--fix`: applies the fixes that diagnostics offer, keeping the file's formatting and comments."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path as FilePath

from parcompile.atomic import write_file
from parcompile.diagnostics import Diagnostic, Edit, Fix, Path, Safety
from parcompile.user_files import read_bytes

from . import Document
from .edits import EditError, apply_edit


@dataclass(frozen=True, slots=True)
class Fixed:
    """A document after its fixes.

    `skipped` are the findings whose fix would touch what another has changed, or that the text forbids.
    """

    document: Document
    applied: tuple[Diagnostic, ...]
    skipped: tuple[Diagnostic, ...]


def chosen_fix(diagnostic: Diagnostic, *, unsafe: bool) -> Fix | None:
    """The fix to apply for a diagnostic: its first safe one, with `unsafe` else its first of any kind."""
    safe = next((fix for fix in diagnostic.fixes if fix.safety is Safety.SAFE), None)
    return safe or (diagnostic.fixes[0] if unsafe and diagnostic.fixes else None)


def apply_fixes(document: Document, diagnostics: Iterable[Diagnostic], *, unsafe: bool = False) -> Fixed:
    """Apply one fix for each diagnostic of this document that has one.

    Fixes that touch the same values are not mixed: the first counts, the others are left to a second round, when the
    changed document has been checked again.
    """
    applied: list[Diagnostic] = []
    skipped: list[Diagnostic] = []
    touched: list[Path] = []
    for diagnostic in diagnostics:
        fix = chosen_fix(diagnostic, unsafe=unsafe) if diagnostic.file in (None, document.file) else None
        if fix is None:
            continue
        paths = [path for edit in fix.edits for path in _paths(edit)]
        taken = any(_overlap(path, other) for path in paths for other in touched)
        try:
            changed = None if taken else _all(document, fix)
        except EditError:
            changed = None
        if changed is None:
            skipped.append(diagnostic)
            continue
        document = changed
        touched += paths
        applied.append(diagnostic)
    return Fixed(document, tuple(applied), tuple(skipped))


def _all(document: Document, fix: Fix) -> Document:
    for edit in fix.edits:
        document = apply_edit(document, edit)
    return document


def _paths(edit: Edit) -> list[Path]:
    """The paths that an edit changes. Removing a list's entry moves the others: the whole list."""
    if edit.rename_to is not None:
        return [edit.path, (*edit.path[:-1], edit.rename_to)]
    if edit.remove and isinstance(edit.path[-1], int):
        return [edit.path[:-1]]
    return [edit.path]


def _overlap(left: Path, right: Path) -> bool:
    length = min(len(left), len(right))
    return left[:length] == right[:length]


def save(document: Document, before: Document) -> None:
    """Write a document back to its file, whole or not at all, with its byte order mark and permissions.

    Args:
        document: after its fixes.
        before: as it was read. A file that is another one now stays as it is.

    Raises:
        OSError: the file cannot be written, or was changed since it was read.
    """
    if read_bytes(before.file) != _content(before):
        raise OSError(errno.EBUSY, "it was changed while it was checked; check it again", before.file)
    write_file(FilePath(document.file), _content(document))


def _content(document: Document) -> bytes:
    return (("\ufeff" if document.source.bom else "") + document.text).encode("utf-8")
