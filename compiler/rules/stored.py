"""Rules that stand in tables, of specs (`table.py`) and of files: `backends/statements.py` is the language.

A rule has the rows `finds`, with `words` that stand for others in them. A row is found where its condition `when` is
true, and that of the rule if there is one; of a rule that `is_once`, the first. It may go `over` the values of a list,
which have a name in its expressions. `say` is its message, `at` the path, dotted or an expression, `help` what to write
instead, `severity` its own. `fixes` are those that an expression gives, or a list: each removes a path, or sets one as
`_WAYS` say, by an expression where that is a text, or does what several such `edits` do; it may have a `title` and a
condition. `related` has paths by what is said of them, and `also` paths to show where they are given; an empty one is
none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from parcompile.backends.statements import Formats, Row, Values, filled, holds, made, rows_of
from parcompile.diagnostics import Fix, Path, Related, Safety, Severity
from parcompile.layout.groups import divisors
from parcompile.model.tables.expression import compiled
from parcompile.units import format_bytes, format_seconds
from parcompile.user_files import shipped

from . import Finding, listed, nearest_divisors, nearest_multiples

_FORMATS: Formats = {
    "numbers": listed,
    "two numbers": lambda numbers: listed(numbers[:2]),
    "dashed": "-".join,
    "and": lambda values: " and ".join(map(str, values)),
    "auto": lambda names: " and ".join(f'{name} "auto"' for name in names),
    "bytes": format_bytes,
    "seconds": format_seconds,
    "divisors": lambda total: listed(divisors(total)),
    "first divisors": lambda total: listed(divisors(total)[:12]),
    "multiples": lambda both: listed(nearest_multiples(*both)),
    "near divisors": lambda numbers: listed(nearest_divisors(*numbers)),
    "terms": lambda factors: " · ".join(map(str, factors)),
}


Found = Callable[[Any], Iterator[Finding]]


def stored_rules(
    package: str,
    module: str,
    values_of: Callable[[Any], Values],
    shown: Callable[..., Iterable[Related]],
    quiet: tuple[type[Exception], ...] = (),
) -> Iterator[tuple[str, Row, Severity, Found]]:
    """The rules of a table: the code of each, its entry, its severity, and what finds.

    Args:
        package: the package whose `rules.json` it is.
        module: where the rules stand.
        values_of: what rows read of a subject.
        shown: what there is to show of a subject at a path of `also`.
        quiet: with which of these a row finds nothing; any other ends the rule.
    """
    for code, stored in shipped(package, "rules.json").items():
        words = stored.get("words", {})
        (when,) = rows_of([{"when": stored.get("when", "True")}], words)
        rows = tuple(rows_of(stored["finds"], words))
        check = functools.partial(_found, values_of, shown, quiet, when, rows, once=stored.get("is_once", False))
        check.__module__ = module
        yield code, stored, Severity(stored.get("severity", "error")), check


def _found(
    values_of: Callable[[Any], Values],
    shown: Callable[..., Iterable[Related]],
    quiet: tuple[type[Exception], ...],
    when: Row,
    rows: tuple[Row, ...],
    subject: Any,
    *,
    once: bool,
) -> Iterator[Finding]:
    values = values_of(subject)
    try:
        if not holds(when, values):
            return
    except quiet:
        return
    for row in rows:
        with contextlib.suppress(*quiet):
            for bound in values.over(row):
                if holds(row, bound):
                    yield _finding(row, bound, functools.partial(shown, subject))
                    if once:
                        return


def _finding(row: Row, values: Values, shown: Callable[[tuple[Any, ...]], Iterable[Related]]) -> Finding:
    """The finding of a row that is found; `shown` gives what there is to show of a path of `also`."""
    fill = functools.partial(filled, values=values, formats=_FORMATS)
    related = [Related(fill(said), _path(path, values)) for said, path in row.get("related", {}).items()]
    fixes = row.get("fixes", [])
    if isinstance(fixes, str):
        fixes = compiled(fixes)(values)
    else:
        fixes = (fix for one in fixes if holds(one, values) for fix in _fixes(one, values, fill))
    return Finding(
        fill(row["say"]),
        _path(row["at"], values),
        help=fill(row["help"]) if "help" in row else None,
        fixes=tuple(fixes),
        related=(*related, *(one for path in row.get("also", ()) if fill(path) for one in shown(_path(path, values)))),
        severity=Severity(row["severity"]) if "severity" in row else None,
    )


def _path(said: str, values: Values) -> Path:
    """A path that is dotted, or the value of an expression, where a step has a dot or is a number."""
    found = made(said, values)
    return tuple(filter(None, str(found).split("."))) if isinstance(found, str) else tuple(found)


_WAYS: Mapping[str, Callable[[Any], Iterable[Any]]] = {
    "to": lambda value: [value],
    "any": iter,
    "divisors": lambda numbers: nearest_divisors(*numbers),
    "nearest divisor": lambda numbers: nearest_divisors(*numbers, count=1),
    "multiples": lambda both: (one for one in nearest_multiples(*both) if one != both[0]),
    "divisor below": lambda both: [one for one in divisors(both[0]) if one < both[1]][-1:],
}
"""What a path may be set to, by the word that the table has for it."""


def _fixes(stored: Row, values: Values, fill: Callable[[str], str]) -> Iterator[Fix]:
    safety = Safety(fill(stored.get("safety", "safe")))
    if "edits" in stored:
        fixes = (fix for one in stored["edits"] if holds(one, values) for fix in _fixes(one, values, fill))
        found = [Fix("", safety, tuple(edit for fix in fixes for edit in fix.edits))]
    elif "remove" in stored:
        found = [Fix.removing(_path(stored["remove"], values), safety)]
    else:
        way = next(one for one in _WAYS if one in stored)
        given = stored[way]
        to = _WAYS[way](compiled(given)(values) if isinstance(given, str) else given)
        found = [Fix.setting(_path(stored["set"], values), one, safety) for one in to]
    yield from (replace(one, title=fill(stored["title"])) if "title" in stored else one for one in found)
