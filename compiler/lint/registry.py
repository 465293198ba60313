"""Registers rules for files that are no specs: a DeepSpeed configuration or Megatron-LM arguments on their own."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from parcompile.backends.deepspeed.table import newest
from parcompile.backends.kinds import DEEPSPEED, GPT_NEOX, MEGATRON
from parcompile.diagnostics import Diagnostic, Path, Severity
from parcompile.lint.deepspeed.usage import UsageContext, UsageOptions
from parcompile.rules.registry import Finding

_ROOMS = {DEEPSPEED: ("deepspeed", "advisories"), MEGATRON: ("megatron", "advisories"), GPT_NEOX: ("gpt_neox",)}
"""The folders with the rules for each kind of file."""


class Settings:
    """The values of such a file. What the schema refused is named in `invalid` and reads as left out.

    `usage` says where a DeepSpeed configuration is used; without it, by the newest DeepSpeed and by nobody known.
    """

    def __init__(self, tree: object, invalid: frozenset[Path], usage: UsageContext | None = None) -> None:
        self.tree: Mapping[str, Any] = tree if isinstance(tree, dict) else {}
        self._invalid = invalid
        self.usage = usage or UsageContext(newest())

    def get(self, *path: str | int, default: Any = None) -> Any:
        """The value at a path; the default when there is none, or none that can be used."""
        node: Any = self.tree
        for length, step in enumerate(path, 1):
            if not isinstance(node, dict) or step not in node or (self._invalid and path[:length] in self._invalid):
                return default
            node = node[step]
        return default if node == "auto" else node

    def left_out(self, *path: str | int) -> bool:
        """Whether a key is not there, under no misspelt name either."""
        node: Any = self.tree
        for length, step in enumerate(path, 1):
            if path[:length] in self._invalid:
                return False
            if not isinstance(node, dict) or step not in node:
                return True
            node = node[step]
        return False

    def number(self, *path: str | int) -> float | None:
        """The same when it is a number."""
        value = self.get(*path)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def section(self, *path: str | int) -> Mapping[str, Any]:
        """The same when it is an object, else an empty one."""
        value = self.get(*path)
        return value if isinstance(value, dict) else {}


_UNKNOWN_USAGE = UsageOptions()

Check = Callable[[Settings], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class FileRule:
    """A rule for one kind of file, with its page.

    `wrong` and `right` are whole files, to be checked with what `usage` says of their use.
    """

    code: str
    kind: str
    severity: Severity
    title: str
    explanation: str
    wrong: Mapping[str, Any]
    right: Mapping[str, Any]
    sources: tuple[str, ...]
    check: Check
    usage: UsageOptions = _UNKNOWN_USAGE


_RULES: dict[str, FileRule] = {}


def file_rule(
    code: str,
    kind: str,
    title: str,
    explanation: str,
    *,
    wrong: Mapping[str, Any],
    right: Mapping[str, Any],
    severity: Severity = Severity.ERROR,
    sources: tuple[str, ...] = (),
    usage: UsageOptions = _UNKNOWN_USAGE,
) -> Callable[[Check], Check]:
    """Registers the decorated function as the rule `code` for files of `kind`."""

    def register(check: Check) -> Check:
        assert code not in _RULES, f"two rules are called {code}"
        text = " ".join(explanation.split())
        _RULES[code] = FileRule(code, kind, severity, title, text, wrong, right, sources, check, usage)
        return check

    return register


@functools.cache
def _rules_of(kind: str) -> tuple[FileRule, ...]:
    """Every rule for files of `kind`, by code: no module of another tool's rules is imported."""
    for room in _ROOMS[kind]:
        for module in pkgutil.iter_modules([str(FilePath(__file__).parent / room)]):
            importlib.import_module(f"{__package__}.{room}.{module.name}")
    return tuple(_RULES[code] for code in sorted(_RULES) if _RULES[code].kind == kind)


def file_rules() -> tuple[FileRule, ...]:
    """Every rule for other tools' files, by code."""
    return tuple(sorted((entry for kind in _ROOMS for entry in _rules_of(kind)), key=lambda entry: entry.code))


def check_settings(settings: Settings, kind: str) -> list[Diagnostic]:
    """Runs every rule for files of `kind` once."""
    return [
        Diagnostic(
            code=entry.code,
            severity=finding.severity or entry.severity,
            message=finding.message,
            path=finding.path,
            help=finding.help,
            fixes=finding.fixes,
            related=finding.related,
        )
        for entry in _rules_of(kind)
        for finding in entry.check(settings)
    ]
