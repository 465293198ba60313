"""Collects what is said about one document, so that each mistake is said once."""

from __future__ import annotations

from typing import Any

from parcompile.diagnostics import Diagnostic, Fix, Path, Related, Severity, format_path

NOTHING = object()
"""Stands for a value that is not there."""


class Findings:
    """Diagnostics of one tree.

    `unusable` holds the paths whose values must not be used, `at_key` the (code, path) of what is about a key rather
    than its value, `meant` the paths that misspelt keys were meant to be. Nothing is said about paths in `skipped`.
    """

    def __init__(self, tree: object, skipped: frozenset[Path]) -> None:
        self.tree = tree
        self.unusable: set[Path] = set()
        self.at_key: set[tuple[str, Path]] = set()
        self.meant: set[Path] = set()
        self._skipped = skipped
        self._said: dict[tuple[str, Path], Diagnostic] = {}

    def say(
        self,
        code: str,
        path: Path,
        message: str,
        advice: str | None = None,
        *,
        at_key: bool = False,
        fixes: tuple[Fix, ...] = (),
        related: tuple[Related, ...] = (),
        severity: Severity = Severity.ERROR,
    ) -> None:
        """Something about the value (or with `at_key` the key) at `path`; the first of a code and a path counts.

        Only a value that an error is about must not be used.
        """
        if any(path[:length] in self._skipped for length in range(len(path) + 1)):
            return
        if at_key:
            self.at_key.add((code, path))
        found = Diagnostic(code, severity, message, path=path, help=advice, fixes=fixes, related=related)
        self._said.setdefault((code, path), found)
        if severity is Severity.ERROR:
            self.unusable.add(path)

    def diagnostics(self) -> list[Diagnostic]:
        """All that was said, without the consequences: a misspelt key is missing too, a text is no number in range."""
        return [
            found
            for (code, path), found in self._said.items()
            if not (code in ("K002", "K009") and path in self.meant)
            and not (code in ("K004", "K005", "K006", "K007") and ("K003", path) in self._said)
        ]

    def value(self, path: Path) -> object:
        """The document's value at `path`, NOTHING when there is none."""
        value: Any = self.tree
        for step in path:
            if isinstance(value, dict):
                value = value.get(step, NOTHING) if isinstance(step, str) else NOTHING
            elif isinstance(value, list) and isinstance(step, int) and step < len(value):
                value = value[step]
            else:
                return NOTHING
        return value


def named(path: Path) -> str:
    """A path as the start of a message."""
    return format_path(path) or "the document"
