"""Which findings count: those of chosen codes, and how much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import click

from parcompile.diagnostics import Diagnostic, Severity


@dataclass(frozen=True, slots=True)
class Selection:
    """Which findings count, and how much."""

    select: tuple[str, ...]
    ignore: tuple[str, ...]
    warnings_as_errors: bool

    def of(self, diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
        """Those of the findings that count."""
        kept = [
            one
            for one in diagnostics
            if (not self.select or _is_among(one.code, self.select)) and not _is_among(one.code, self.ignore)
        ]
        if not self.warnings_as_errors:
            return kept
        return [replace(one, severity=Severity.ERROR) if one.severity is Severity.WARNING else one for one in kept]


def _is_among(code: str, given: Iterable[str]) -> bool:
    """Whether a code is given, or its beginning: letters stand for all of their codes, and for no longer letters."""
    return any(code.startswith(one) and (one[-1].isdigit() or code[len(one) : len(one) + 1].isdigit()) for one in given)


def codes_of(given: tuple[str, ...]) -> tuple[str, ...]:
    """The codes or beginnings of codes, separated by commas or given several times."""
    codes = tuple(code.strip().upper() for one in given for code in one.split(",") if code.strip())
    if codes:
        from parcompile.diagnostics.suggest import closest
        from parcompile.rules.pages import pages

        for code in codes:
            if not any(_is_among(known, (code,)) for known in pages()):
                near = closest(code, list(pages()))
                raise click.UsageError(f"there is no code {code}" + (f"; did you mean {near}?" if near else ""))
    return codes
