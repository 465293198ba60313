"""Fixes: tried before they are offered, and applied by `--fix`, keeping the file's formatting and comments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path as FilePath

from parcompile.atomic import write_file
from parcompile.diagnostics import Diagnostic, Edit, Fix, Path, Replacement, Safety

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
            changed = None if taken else reduce(apply_edit, fix.edits, document)
        except EditError:
            changed = None
        if changed is None:
            skipped.append(diagnostic)
            continue
        document = changed
        touched += paths
        applied.append(diagnostic)
    return Fixed(document, tuple(applied), tuple(skipped))


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
    write_file(FilePath(document.file), _content(document), expected=_content(before))


def _content(document: Document) -> bytes:
    return (("\ufeff" if document.source.bom else "") + document.text).encode("utf-8")


# Tries fixes before they are offered: one that does not remove its diagnostic, or that adds an error, is none.
#
# That what is mended turns out too large for its accelerator is no fault of the fix: it works, but comes behind those
# after which the run fits.

Recheck = Callable[[Document], Sequence[Diagnostic]]
"""Everything that is wrong with a document."""

MOST_OFFERED = 3
"""So many fixes of one diagnostic are worth reading."""
MOST_WORK = 1500
LARGEST = 200_000
"""A trial checks the whole file again, which takes as long as there are findings: of trials times findings there are no
more than so many, and none in a file of more characters than this. What is not tried is not offered."""


def tried(
    diagnostics: Iterable[Diagnostic], document: Document, recheck: Recheck, *, too_large: str
) -> list[Diagnostic]:
    """The diagnostics, each with the first few of its fixes that work.

    Args:
        diagnostics: of the document.
        document: they are tried on.
        recheck: what is wrong with a changed one.
        too_large: the code that says that a run does not fit: fixes that end there come last.
    """
    found = list(diagnostics)
    errors = Counter(_identity(one) for one in found if one.is_error)
    budget = MOST_WORK // max(1, len(found)) if len(document.text) <= LARGEST else 0
    kept: list[Diagnostic] = []
    for one in found:
        fixes = _working(one, errors, document, recheck, too_large) if len(one.fixes) <= budget else []
        budget -= len(one.fixes)
        kept.append(replace(one, fixes=tuple(fixes)))
    return kept


def _working(
    one: Diagnostic, errors: Counter[tuple[str, Path]], document: Document, recheck: Recheck, too_large: str
) -> list[Fix]:
    working: list[Fix] = []
    last: list[Fix] = []
    for fix in one.fixes:
        if len(working) == MOST_OFFERED:
            break
        try:
            changed = reduce(apply_edit, fix.edits, document)
        except EditError:
            continue
        after = recheck(changed)
        gone = all(_identity(other) != _identity(one) for other in after)
        known = Counter({(code, _renamed(path, fix)): count for (code, path), count in errors.items()})
        added = Counter(_identity(other) for other in after if other.is_error) - known
        if gone and all(code == too_large for code, _ in added):
            # Nobody could tell what memory it takes before: what is too large comes last.
            (last if added else working).append(replace(fix, replacement=_replacement(document, changed)))
    return [*working, *last][:MOST_OFFERED]


def _renamed(path: Path, fix: Fix) -> Path:
    """Where a value stands after the renamings of a fix."""
    for edit in fix.edits:
        size = len(edit.path)
        if edit.rename_to is not None and path[:size] == edit.path:
            path = (*edit.path[:-1], edit.rename_to, *path[size:])
    return path


def _replacement(before: Document, after: Document) -> Replacement:
    """The one stretch of text in which two documents differ."""
    old, new = before.text, after.text
    start = _same(old, new)
    rest = min(len(old), len(new)) - start
    same = _same(old[: -rest - 1 : -1], new[: -rest - 1 : -1])
    end = len(old) - same
    return Replacement(before.source.position(start), before.source.position(end), new[start : len(new) - same])


def _same(left: str, right: str) -> int:
    """Characters that two texts begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(left), len(right)))


def _identity(one: Diagnostic) -> tuple[str, Path]:
    return one.code, one.path
