"""Registers rules and runs all of them in one pass."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from parcompile.diagnostics import Diagnostic, Fix, Path, Related, Severity
from parcompile.resolve import Resolution, Unavailable

_MODULES = ("world", "batch", "model", "tensor", "sequence", "precision", "zero", "moe", "runtime", "deepspeed")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found: the equation with the user's numbers, where, and what to write instead."""

    message: str
    path: Path
    help: str | None = None
    fixes: tuple[Fix, ...] = ()
    related: tuple[Related, ...] = ()


Check = Callable[[Resolution], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule and its page.

    `targets` names what the rule concerns: "all" for what is true of any run, else the backends that demand it.
    """

    code: str
    severity: Severity
    title: str
    explanation: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    check: Check


_RULES: dict[str, Rule] = {}


def rule(
    code: str,
    title: str,
    explanation: str,
    *,
    severity: Severity = Severity.ERROR,
    sources: tuple[str, ...] = (),
    targets: tuple[str, ...] = ("all",),
) -> Callable[[Check], Check]:
    """Registers the decorated function as the rule `code`."""

    def register(check: Check) -> Check:
        assert code not in _RULES or _RULES[code].check.__qualname__ == check.__qualname__, (
            f"two rules are called {code}"
        )
        _RULES[code] = Rule(code, severity, title, " ".join(explanation.split()), sources, targets, check)
        return check

    return register


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code."""
    for name in _MODULES:
        importlib.import_module(f"parcompile.rules.{name}")
    return tuple(_RULES[code] for code in sorted(_RULES))


def check(resolution: Resolution) -> list[Diagnostic]:
    """Runs every rule once. A rule that needs a value which is itself wrong stays quiet."""
    found: list[Diagnostic] = []
    for entry in all_rules():
        try:
            findings = list(entry.check(resolution))
        except Unavailable:
            continue
        found.extend(
            Diagnostic(
                code=entry.code,
                severity=entry.severity,
                message=finding.message,
                path=finding.path,
                help=finding.help,
                fixes=finding.fixes,
                related=finding.related,
            )
            for finding in findings
        )
    return found
