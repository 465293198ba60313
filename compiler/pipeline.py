"""From a file to a plan: read, validate, resolve, check, compile. Nothing is printed or written here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import schema, source
from .diagnostics import Diagnostic, has_errors, in_file_order
from .plan import Plan, compile_plan
from .resolve import Resolution
from .rules import check


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


def check_file(path: str | Path) -> Checked:
    """Everything that is wrong with a spec, in one pass.

    Raises:
        SourceError: the file cannot be read.
    """
    read = source.read(path)
    document = read.document
    if document is None:
        return Checked(None, read.diagnostics, None)
    validation = schema.validate(document, "spec")
    folder = Path() if str(path) == "-" else Path(path).resolve().parent
    resolution = Resolution(document.tree, validation.invalid_paths, folder)
    found = [diagnostic.at(document.file, document.position(diagnostic.path)) for diagnostic in check(resolution)]
    diagnostics = in_file_order([*read.diagnostics, *validation.diagnostics, *found])
    return Checked(document, tuple(diagnostics), resolution)


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
