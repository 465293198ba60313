"""Rules that stand in tables, of specs (`table.py`) and of files: `backends/statements.py` is the language.

A rule has the rows `finds`, with `words` that stand for others in them. A row is found where its condition `when` is
true, and that of the rule if there is one; of a rule that `is_once`, the first. `say` is its message, `at` the dotted
path, `help` what to write instead, `severity` its own. Each of `fixes` removes a path, or sets one as `_WAYS` say, by
an expression where that is a text; it may have a `title` and a condition. `related` has paths by what is said of them,
and `also` paths to show where they are given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from parcompile.backends.statements import Formats, Row, Values, filled, holds
from parcompile.diagnostics import Fix, Related, Safety, Severity
from parcompile.layout.groups import divisors
from parcompile.model.tables.expression import compiled
from parcompile.units import format_bytes

from . import Finding, listed, nearest_divisors, nearest_multiples

_FORMATS: Formats = {
    "numbers": listed,
    "two numbers": lambda numbers: listed(numbers[:2]),
    "dashed": "-".join,
    "bytes": format_bytes,
    "divisors": lambda total: listed(divisors(total)),
    "first divisors": lambda total: listed(divisors(total)[:12]),
    "multiples": lambda both: listed(nearest_multiples(*both)),
    "near divisors": lambda numbers: listed(nearest_divisors(*numbers)),
    "terms": lambda factors: " · ".join(map(str, factors)),
}


def finding(row: Row, values: Values, shown: Callable[[tuple[str, ...]], Iterable[Related]]) -> Finding:
    """The finding of a row that is found; `shown` gives what there is to show of a path of `also`."""
    fill = functools.partial(filled, values=values, formats=_FORMATS)
    related = [Related(fill(said), _path(path)) for said, path in row.get("related", {}).items()]
    return Finding(
        fill(row["say"]),
        _path(fill(row["at"])),
        help=fill(row["help"]) if "help" in row else None,
        fixes=tuple(fix for one in row.get("fixes", ()) if holds(one, values) for fix in _fixes(one, values, fill)),
        related=(*related, *(one for path in row.get("also", ()) for one in shown(_path(fill(path))))),
        severity=Severity(row["severity"]) if "severity" in row else None,
    )


def _path(dotted: str) -> tuple[str, ...]:
    return tuple(dotted.split(".")) if dotted else ()


_WAYS: Mapping[str, Callable[[Any], Iterable[Any]]] = {
    "to": lambda value: [value],
    "any": iter,
    "divisors": lambda numbers: nearest_divisors(*numbers),
}
"""What a path may be set to, by the word that the table has for it."""


def _fixes(stored: Row, values: Values, fill: Callable[[str], str]) -> Iterator[Fix]:
    safety = Safety(fill(stored.get("safety", "safe")))
    if "remove" in stored:
        found = [Fix.removing(_path(fill(stored["remove"])), safety)]
    else:
        way = next(one for one in _WAYS if one in stored)
        given = stored[way]
        to = _WAYS[way](compiled(given)(values) if isinstance(given, str) else given)
        found = [Fix.setting(_path(stored["set"]), one, safety) for one in to]
    yield from (replace(one, title=fill(stored["title"])) if "title" in stored else one for one in found)
