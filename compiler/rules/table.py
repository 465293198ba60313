"""The rules of specs that stand in a table, `rules.json`, by code; `stored.py` has the words of a row.

A rule has `severity`, `targets` and `run_by` as `rule` takes them. Rows read a `Resolution`: "training.seed" is a value
of the spec or its default, "given.training.seed" whether it is written, "tp" the size of an axis, "config.use_cache" a
key of the model's configuration, "where.head_dim.hidden_size" the path of the first of these keys that the spec gives,
and "how.parallelism.dp" how a value was found. Another name is one of `FACTS` or an attribute, and of None it is None.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from parcompile.backends.statements import Row, Values, holds, rows_of
from parcompile.diagnostics import Severity
from parcompile.spec.resolve import Resolution
from parcompile.user_files import shipped

from . import Finding, also, model_path, rule
from .facts import FACTS
from .stored import finding

_SECTIONS = frozenset(("training", "parallelism", "zero", "cluster", "model", "deepspeed", "backends"))


def value_of(spec: Resolution, name: str) -> Any:
    """What a name of an expression stands for.

    Raises:
        Unavailable: it is a value that is itself wrong, or follows from one.
    """
    head, *rest = name.split(".")
    if head in _SECTIONS:
        return spec.get(head, *rest)
    if head == "given":
        return spec.given(*rest)
    if head == "where":
        return ".".join(model_path(spec, *rest))
    if head == "how":
        found = spec.provenance.get(".".join(rest))
        return found and (found.detail or "the default")
    if head == "config":
        return spec.model_config.get(*rest)
    found = FACTS[head](spec) if head in FACTS else getattr(spec, head)
    for step in rest:
        found = None if found is None else getattr(found, step)
    return found


def _register() -> None:
    """Registers every rule of the table of specs."""
    for code, stored in shipped(__package__, "rules.json").items():
        words = stored.get("words", {})
        (when,) = rows_of([{"when": stored.get("when", "True")}], words)
        rows = tuple(rows_of(stored["finds"], words))
        check = functools.partial(_found, when, rows, once=stored.get("is_once", False))
        check.__module__ = __name__
        targets, run_by = tuple(stored.get("targets", ["all"])), tuple(stored.get("run_by", []))
        rule(code, severity=Severity(stored.get("severity", "error")), targets=targets, run_by=run_by)(check)


def _found(when: Row, rows: tuple[Row, ...], spec: Resolution, *, once: bool) -> Iterator[Finding]:
    """What the rows of a rule find, up to the first that needs a value which is itself wrong."""
    values = Values(spec, {}, functools.partial(value_of, spec))
    for row in rows if holds(when, values) else ():
        for bound in values.over(row):
            if holds(row, bound):
                yield finding(row, bound, lambda path: also(spec, path))
                if once:
                    return


_register()
