"""From a file to a plan: read, validate, resolve, check, compile. Nothing is printed or written here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from . import schema, source
from .diagnostics import Diagnostic, has_errors, in_file_order
from .plan import Plan, compile_plan
from .resolve import Resolution
from .rules import DEFAULT_TARGETS, check


@dataclass(frozen=True, slots=True)
class Checked:
    """A spec that was read and checked. `document` is None when its syntax is broken; `resolution` too, then."""

    document: source.Document | None
    diagnostics: tuple[Diagnostic, ...]
    resolution: Resolution | None

    @property
    def valid(self) -> bool:
        """Whether a plan can be made."""
        return not has_errors(self.diagnostics)


def check_file(path: str | Path, targets: Collection[str] = DEFAULT_TARGETS) -> Checked:
    """Everything that is wrong with a spec for these targets, in one pass.

    Raises:
        SourceError: the file cannot be read.
    """
    read = source.read(path)
    folder = Path() if str(path) == "-" else Path(path).resolve().parent
    return check_read(read, folder, targets)


def check_read(read: source.Result, folder: Path, targets: Collection[str] = DEFAULT_TARGETS) -> Checked:
    """The same for a text that was read already; paths in it are relative to `folder`."""
    document = read.document
    if document is None:
        return Checked(None, read.diagnostics, None)
    found, resolution = _found(document, folder, targets)
    if any(one.fixes for one in found):
        from .rules.trial import tried

        found = tried(found, document, lambda changed: _found(changed, folder, targets)[0])
    return Checked(document, tuple(in_file_order([*read.diagnostics, *found])), resolution)


def _found(document: source.Document, folder: Path, targets: Collection[str]) -> tuple[list[Diagnostic], Resolution]:
    validation = schema.validate(document, "spec")
    resolution = Resolution(document.tree, validation.invalid_paths, folder)
    found = [document.locate(diagnostic) for diagnostic in check(resolution, targets)]
    return [*validation.diagnostics, *found], resolution


def compile_file(path: str | Path) -> tuple[Plan | None, Checked]:
    """The plan of a spec, or None when it has errors.

    Raises:
        SourceError: the file cannot be read.
    """
    checked = check_file(path)
    if not checked.valid:
        return None, checked
    assert checked.document is not None
    assert checked.resolution is not None
    spec = checked.resolution.spec()
    return compile_plan(spec, checked.document.tree, list(checked.diagnostics)), checked
