"""Learns the rows of a table: which parameters there are, how often, and the size of each dim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

from building import INERT, ModelType, Sample, plan_of
from collecting import LeftOutError
from structure import Structure
from trees import At, Learner, UnlearnableError

from parcompile.model.tables.expression import evaluate

Held: TypeAlias = "list[dict[str, dict[tuple[int, ...], tuple[int, ...]]]]"
"""For each model: shapes by row, and by the numbers in the name."""
Counts: TypeAlias = "list[Counter[tuple[str, tuple[int, ...]]]]"
"""For each model: entries of a stack, for each entry of the stacks around it."""


def keys_of(samples: Sequence[Sample]) -> list[str]:
    """Keys that a configuration has, without those that change no shape."""
    found = dict.fromkeys(key for sample in samples for key in sample.full)
    return [key for key in found if not INERT.search(key.rpartition(".")[2])]


def rows_and_stacks(kind: ModelType, samples: Sequence[Sample]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows as they are stored, in the order of registration, and the number of entries of each stack."""
    structure = Structure([[name for name, _ in sample.parameters] for sample in samples])
    learner = Learner([sample.full for sample in samples], keys_of(samples))
    held: Held = []
    for sample in samples:
        rows: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
        for name, shape in sample.parameters:
            row, numbers = structure.split(name)
            rows.setdefault(row, {})[numbers] = shape
        held.append(rows)
    stacks, counts = _stacks(learner, held)
    return _rows(learner, structure.rows, held, counts, _plan(kind.name)), stacks


def _stacks(learner: Learner, held: Held) -> tuple[dict[str, str], Counts]:
    counts: Counts = [Counter() for _ in held]
    stacks: dict[str, None] = {}
    for at, rows in enumerate(held):
        for row, shapes in rows.items():
            parts = row.split(".")
            places = [end for end, part in enumerate(parts) if part.startswith("{")]
            for depth, end in enumerate(places):
                stack = ".".join(parts[: end + 1])
                stacks.setdefault(stack)
                for numbers in shapes:
                    key = stack, numbers[:depth]
                    counts[at][key] = max(counts[at][key], numbers[depth] + 1)
    found = {}
    for stack in sorted(stacks, key=lambda one: one.count("{")):
        outer = stack.rpartition(".")[0]
        samples: list[At] = [(at, one) for at in range(len(held)) for one in _places(counts[at], outer)]
        try:
            try:
                sizes = [counts[at][stack, one] for at, one in samples]
                found[stack] = learner.size(samples, sizes, layered="{" in outer)
            except UnlearnableError:
                if "{" not in outer:
                    raise
                found[stack] = _most(learner, stack, samples, counts)
        except UnlearnableError as error:
            raise UnlearnableError(f"the number of {stack}: {error}") from error
        if "{" not in outer and found[stack].isdigit():
            raise LeftOutError(f"the number of {outer} never varied: {found[stack]}")
    return found, counts


def _most(learner: Learner, stack: str, samples: Sequence[At], counts: Counts) -> str:
    """The most entries that a stack has within an entry around it, where some there have no parameters.

    From here on each has so many, and the conditions of the rows tell which have parameters.
    """
    most: dict[int, int] = {}
    for at, one in samples:
        most[at] = max(most.get(at, 0), counts[at][stack, one])
    there = [at for at, number in most.items() if number]
    found = learner.size([(at, ()) for at in there], [most[at] for at in there], layered=False)
    for at, one in samples:
        counts[at][stack, one] = evaluate(found, learner.configs[at]) or 0
    return found


def _rows(
    learner: Learner, names: Sequence[str], held: Held, counts: Counts, plan: dict[str, str]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for row in names:
        layered = "{" in row
        samples: list[At] = [(at, one) for at in range(len(held)) for one in _places(counts[at], row)]
        shapes = [held[at].get(row, {}).get(one) for at, one in samples]
        for dims in sorted({len(shape) for shape in shapes if shape is not None}):
            here = [shape is not None and len(shape) == dims for shape in shapes]
            there = [(one, shape) for one, shape in zip(samples, shapes, strict=True) if shape and len(shape) == dims]
            at = [one for one, _ in there]
            try:
                when = learner.choice(samples, [str(one) for one in here], layered=layered)
                shape = [learner.size(at, [sizes[dim] for _, sizes in there], layered=layered) for dim in range(dims)]
            except UnlearnableError as error:
                raise UnlearnableError(f"{row}: {error}") from error
            entry: dict[str, Any] = {"name": row, "shape": shape}
            if when != "True":
                entry["when"] = when
            if (cut := _cut(plan, row)) is not None:
                entry["tp"] = cut
            rows.append(entry)
    return rows


def _places(counts: Counter[tuple[str, tuple[int, ...]]], row: str) -> list[tuple[int, ...]]:
    """Every tuple of indices under which a row may stand."""
    found: list[tuple[int, ...]] = [()]
    parts = row.split(".")
    for end, part in enumerate(parts):
        if part.startswith("{"):
            stack = ".".join(parts[: end + 1])
            found = [(*one, number) for one in found for number in range(counts[stack, one])]
    return found


def _plan(name: str) -> dict[str, str]:
    try:
        return plan_of(name)
    except Exception:  # the defaults of some classes build no model, and such a type has no plan to show
        return {}


def _cut(plan: dict[str, str], row: str) -> str | None:
    """How transformers' plan cuts a row; None where it does not name it."""
    name = ".".join("*" if part.startswith("{") else part for part in row.split("."))
    for candidate in (name, name.rpartition(".")[0]):
        if candidate in plan:
            return plan[candidate]
    return None
