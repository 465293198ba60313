"""The rules of specs that stand in a table, `rules.json`, by code; `stored.py` has the words of a row.

A rule has `severity`, `targets` and `run_by` as `rule` takes them. Rows read a `Resolution`: "training.seed" is a value
of the spec or its default, "given.training.seed" whether it is written, "tp" the size of an axis, "config.use_cache" a
key of the model's configuration, "where.head_dim.hidden_size" the path of the first of these keys that the spec gives,
and "how.parallelism.dp" how a value was found. Another name is one of `FACTS` or an attribute, and of None it is None.
"""

from __future__ import annotations

import functools
from typing import Any

from parcompile.backends.statements import Values
from parcompile.spec.resolve import Resolution

from . import also, model_path, rule
from .facts import FACTS
from .stored import stored_rules

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


def _values(spec: Resolution) -> Values:
    return Values(spec, {}, functools.partial(value_of, spec))


for _code, _stored, _severity, _check in stored_rules(__package__, __name__, _values, also):
    _targets, _run_by = tuple(_stored.get("targets", ["all"])), tuple(_stored.get("run_by", []))
    rule(_code, severity=_severity, targets=_targets, run_by=_run_by)(_check)
