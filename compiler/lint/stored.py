"""Rules for files that stand in tables: `rules.json` of a tool's room has them by code (`rules/stored.py`).

Expressions read values by their paths. "number.a.b" is that of a.b where it is a number, else None; see `_READERS`.
A row that needs a value which the file does not decide is quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from parcompile.backends.statements import Facts, Values
from parcompile.diagnostics import Related
from parcompile.rules.stored import stored_rules

from .deepspeed import UsageOptions
from .registry import NotSaidError, Settings, file_rule


def _only(*types: type) -> Callable[[Any], Any]:
    """Reads a value that is of one of these types, and no switch."""
    return lambda value: value if isinstance(value, types) and not isinstance(value, bool) else None


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "number": _only(int, float),
    "whole": _only(int),
    "text": _only(str),
    "list": _only(list),
    "section": _only(dict),
    "is_section": lambda value: isinstance(value, dict),
}
_LOST = object()


def _raw(tree: Any, path: list[str]) -> Any:
    for step in path:
        tree = tree.get(step, _LOST) if isinstance(tree, Mapping) else _LOST
    return tree


def _value(settings: Settings, values: Values, name: str) -> Any:
    """What a name of an expression stands for; "raw" is as the file has it, also what is wrong or "auto"."""
    head, _, rest = name.partition(".")
    if head in _READERS and rest:
        return _READERS[head](values[rest])
    path = rest.split(".")
    if head == "left_out":
        return settings.left_out(*path)
    if head in ("has", "raw"):
        found = _raw(settings.tree, path)
        return found is not _LOST if head == "has" else None if found is _LOST else found
    return settings.get(*name.split("."))


def register(package: str, kind: str, facts: Facts) -> None:
    """Registers every rule of a room's table."""

    def values_of(settings: Settings) -> Values:
        values = Values(settings, facts, lambda name: _value(settings, values, name))
        return values

    for code, stored, severity, check in stored_rules(package, package, values_of, _shown, (NotSaidError,)):
        file_rule(code, kind, severity=severity, usage=UsageOptions(**stored.get("usage", {})))(check)


def _shown(settings: Settings, path: tuple[str, ...]) -> Iterator[Related]:
    """What stands at a key of the file, unless it is nothing."""
    (name,) = path
    if settings.tree.get(name):
        yield Related(f"{name} {settings.tree[name]} is set here", path)
