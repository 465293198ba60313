"""Registers rules for files that are no specs: a DeepSpeed configuration or Megatron-LM arguments on their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parcompile.backends.deepspeed.surroundings import Asked, Surroundings
from parcompile.backends.deepspeed.table import newest
from parcompile.diagnostics import Diagnostic, Path, Severity

from .registry import Finding, import_modules

DEEPSPEED, MEGATRON, GPT_NEOX = "ds_config", "megatron", "gpt_neox"


class Settings:
    """The values of such a file. What the schema refused is named in `invalid` and reads as left out.

    `around` says where a DeepSpeed configuration is used; without it, by the newest DeepSpeed and by nobody known.
    """

    def __init__(self, tree: object, invalid: frozenset[Path], around: Surroundings | None = None) -> None:
        self.tree: Mapping[str, Any] = tree if isinstance(tree, dict) else {}
        self._invalid = invalid
        self.around = around or Surroundings(newest())

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


_NOTHING_ASKED = Asked()

Check = Callable[[Settings], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class FileRule:
    """A rule for one kind of file, with its page.

    `wrong` and `right` are whole files, to be checked with what `asked` says of their use.
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
    asked: Asked = _NOTHING_ASKED


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
    asked: Asked = _NOTHING_ASKED,
) -> Callable[[Check], Check]:
    """Registers the decorated function as the rule `code` for files of `kind`."""

    def register(check: Check) -> Check:
        assert code not in _RULES, f"two rules are called {code}"
        text = " ".join(explanation.split())
        _RULES[code] = FileRule(code, kind, severity, title, text, wrong, right, sources, check, asked)
        return check

    return register


@functools.cache
def file_rules() -> tuple[FileRule, ...]:
    """Every such rule, by code."""
    import_modules(of_files=True)
    return tuple(_RULES[code] for code in sorted(_RULES))


@functools.cache
def _rules_of(kind: str) -> tuple[FileRule, ...]:
    return tuple(entry for entry in file_rules() if entry.kind == kind)


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
