"""Rules for files that stand in tables: `rules.json` of a tool's room has them by code (`backends/statements.py`).

A rule has the rows `finds`, with `words` that stand for others in them. A row is found where its condition `when` is
true, and that of the rule if there is one; of a rule that `is_once`, the first. `say` is its message, `at` the dotted
path, `help` what to write instead, `severity` its own. Each of `fixes` removes a path or sets one to a value, which is
an expression where it is a text. `related` has paths by what is said of them, and `also` names what to show if given.

Expressions read values by their paths. "number.a.b" is that of a.b where it is a number, else None; see `_READERS`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from parcompile.backends.statements import Facts, Row, Values, filled, holds, rows_of
from parcompile.diagnostics import Fix, Path, Related, Safety, Severity
from parcompile.layout.groups import divisors
from parcompile.model.tables.expression import compiled
from parcompile.rules import Finding, listed, nearest_multiples
from parcompile.user_files import shipped

from .deepspeed import UsageOptions
from .registry import Check, NotSaidError, Settings, file_rule


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


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "divisors": lambda total: listed(divisors(total)),
    "first divisors": lambda total: listed(divisors(total)[:12]),
    "multiples": lambda both: listed(nearest_multiples(*both)),
    "terms": lambda factors: " · ".join(map(str, factors)),
}


def register(package: str, kind: str, facts: Facts, further: Mapping[str, Check]) -> None:
    """Registers every rule of a room's table; `further` has by code what functions find beside the rows."""
    for code, stored in shipped(package, "rules.json").items():
        rows = tuple(rows_of(stored["finds"], stored.get("words", {})))
        (when,) = rows_of([{"when": stored.get("when", "True")}], stored.get("words", {}))
        more = further.get(code, lambda _settings: iter(()))
        check = functools.partial(_found, facts, when, rows, more, once=stored.get("is_once", False))
        check.__module__ = package
        severity = Severity(stored.get("severity", "error"))
        usage = UsageOptions(**stored.get("usage", {}))
        file_rule(code, kind, severity=severity, usage=usage)(check)


def _found(
    facts: Facts,
    when: Row,
    rows: tuple[Row, ...],
    more: Check,
    settings: Settings,
    *,
    once: bool,
) -> Iterator[Finding]:
    """What the rows of a rule find; one that needs a value that the file does not decide is quiet."""
    values = Values(settings, facts, lambda name: _value(settings, values, name))
    applies = False
    with contextlib.suppress(NotSaidError):
        applies = holds(when, values)
    for row in rows if applies else ():
        with contextlib.suppress(NotSaidError):
            if holds(row, values):
                yield _finding(row, values, settings.tree)
                if once:
                    break
    yield from more(settings)


def _finding(row: Row, values: Values, tree: Mapping[str, Any]) -> Finding:
    fill = functools.partial(filled, values=values, formats=_FORMATS)
    also = (Related(f"{name} {tree[name]} is set here", (name,)) for name in row.get("also", ()) if tree.get(name))
    return Finding(
        fill(row["say"]),
        _path(fill(row["at"])),
        help=fill(row["help"]) if "help" in row else None,
        fixes=tuple(_fix(one, values) for one in row.get("fixes", ())),
        related=(*(Related(fill(said), _path(path)) for said, path in row.get("related", {}).items()), *also),
        severity=Severity(row["severity"]) if "severity" in row else None,
    )


def _path(dotted: str) -> Path:
    return tuple(dotted.split(".")) if dotted else ()


def _fix(stored: Mapping[str, Any], values: Values) -> Fix:
    safety = Safety(stored.get("safety", "safe"))
    if "remove" in stored:
        return Fix.removing(_path(stored["remove"]), safety)
    to = compiled(stored["to"])(values) if isinstance(stored["to"], str) else stored["to"]
    fix = Fix.setting(_path(stored["set"]), to, safety)
    return replace(fix, title=stored["title"]) if "title" in stored else fix
