"""Registers rules for files that are no specs, and gives the page of every code, of a spec's rules too."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from parcompile.backends.deepspeed.table import newest
from parcompile.backends.kinds import DEEPSPEED, GPT_NEOX, MEGATRON
from parcompile.diagnostics import Diagnostic, Path, Severity
from parcompile.rules import BROKEN_PLUGIN, INEXPRESSIBLE, Example, Finding, Rule, all_rules, page_of
from parcompile.user_files import shipped

from .deepspeed import UsageContext, UsageOptions

_ROOMS = {DEEPSPEED: ("deepspeed", "advisories"), MEGATRON: ("megatron", "advisories"), GPT_NEOX: (GPT_NEOX,)}
"""The folders with the rules for each kind of file."""


class NotSaidError(Exception):
    """A rule needs a value that the file does not decide."""


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
    *,
    severity: Severity = Severity.ERROR,
    usage: UsageOptions = _UNKNOWN_USAGE,
    page: Mapping[str, Any] | None = None,
) -> Callable[[Check], Check]:
    """Registers the decorated function as the rule `code` for files of `kind`; its page stands in pages.json."""

    def register(check: Check) -> Check:
        assert code not in _RULES, f"two rules are called {code}"
        _RULES[code] = FileRule(code, kind, severity, check=check, usage=usage, **(page or page_of(__package__, code)))
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
        finding.diagnostic(entry.code, entry.severity)
        for entry in _rules_of(kind)
        for finding in _decided(entry.check, settings)
    ]


def _decided(check: Check, settings: Settings) -> Iterator[Finding]:
    """What a rule finds up to the first value that it needs and that the file does not decide."""
    with contextlib.suppress(NotSaidError):
        yield from check(settings)


GROUPS: Mapping[str, str] = shipped(__package__, "groups.json")
"""What the letters of codes stand for."""


_WIDTH = 75
_TOOLS = {DEEPSPEED: "deepspeed", MEGATRON: "megatron", GPT_NEOX: "gpt-neox"}


@dataclass(frozen=True, slots=True)
class Page:
    """What there is to say about a code. `wrong` and `right` are excerpts of a file in `format`."""

    code: str
    severity: Severity
    title: str
    explanation: str
    wrong: str = ""
    right: str = ""
    format: str = "json"
    sources: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("all",)
    origin: str = ""
    """The distribution that the code of a plug-in comes from."""

    @property
    def group(self) -> str:
        """The heading under which the code stands."""
        return f"{self.code[:-3]}: {GROUPS.get(self.code[:-3]) or f'rules of {self.origin}'}"

    @property
    def examples(self) -> list[tuple[str, str]]:
        """The excerpts that can be shown, each under its word; what is wrong with some files is their size."""
        both = (("wrong", self.wrong), ("right", self.right))
        return [(word, text.rstrip("\n")) for word, text in both if text.strip() and len(text.split("\n", 1)[0]) < 100]


FILE_CODES: Mapping[str, Page] = {
    code: Page(code, Severity.ERROR, **stored)
    for code, stored in shipped("parcompile.diagnostics", "file_codes.json").items()
}
"""The pages of the codes that are no rules: J, the text of a file; K, its schema."""


@functools.cache
def pages() -> Mapping[str, Page]:
    """Every page, by code."""
    found = list(FILE_CODES.values())
    for rule in all_rules():
        texts = rule.title, _with_tools(rule), excerpt(rule.wrong), excerpt(rule.right)
        page = Page(rule.code, rule.severity, *texts, sources=rule.sources, targets=rule.targets, origin=rule.origin)
        found.append(page)
    for one in file_rules():
        texts = one.title, _with_use(one), json.dumps(one.wrong, indent=2), json.dumps(one.right, indent=2)
        found.append(Page(one.code, one.severity, *texts, sources=one.sources, targets=(_TOOLS[one.kind],)))
    found += [
        Page(code, Severity.ERROR, **page_of("parcompile.rules", code)) for code in (BROKEN_PLUGIN, INEXPRESSIBLE)
    ]
    return {page.code: page for page in sorted(found, key=lambda page: (bool(page.origin), page.code))}


def _with_use(rule: FileRule) -> str:
    """The explanation, with the options under which the examples are checked."""
    version, used_with = rule.usage.version, rule.usage.used_with
    options = [f"--deepspeed-version {version}"] if version else []
    options += [f"--used-with {used_with}"] if used_with else []
    return f"{rule.explanation} The examples are meant for {' '.join(options)}." if options else rule.explanation


def _with_tools(rule: Rule) -> str:
    """The explanation, with the tools without which what the rule finds is an error."""
    if not rule.run_by:
        return rule.explanation
    return (
        f"{rule.explanation} This is an error unless the files of {' or '.join(rule.run_by)} are asked for (--target): "
        "nobody could run such a plan."
    )


def titles() -> Mapping[str, str]:
    """The title of every code."""
    return {code: page.title for code, page in pages().items()}


def excerpt(part: Example) -> str:
    """A part of a spec as JSON, one line for each of its sections that fits into one."""
    rows = []
    for key, value in part.items():
        row = f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
        if len(row) > _WIDTH:
            row = f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, indent=2)}"
        rows.append(row)
    return ",\n".join(rows)
