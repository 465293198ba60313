"""Studies one model type: draws, builds, learns, and adds what its table gets wrong until fresh draws agree."""

from __future__ import annotations

import ast
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from collecting import Collection, LeftOutError, TooSlowError
from comparing import DEEP, disagreement, miscompleted
from completion import completion
from drawing import Draws
from rows import rows_and_stacks
from trees import UnlearnableError

from parcompile.model.tables.expression import names as names_of

GATE = 100
"""Configurations that a table has to get right, none of which it was learnt from."""
_DEEP_MODELS = 10
"""Of up to 60 layers: in models of 6 an eighth of the number of layers is 0, and fits into every sum."""
_FIRST, _BATCH, _ROUNDS = 90, 30, 12


@dataclass(frozen=True)
class Studied:
    """A table that passed the gate, as it is stored."""

    stored: dict[str, Any]
    builds: int
    rounds: int


def study(name: str, seconds: int = 240) -> Studied:
    """The table of a type.

    Raises:
        LeftOutError: it cannot be expressed exactly; why.
    """
    problem: list[str] = []
    try:
        with limit(seconds):
            return _studied(Collection(name), problem)
    except TooSlowError:
        last = f": {problem[-1]}" if problem else ""
        raise LeftOutError(f"not learnt within {seconds} s{last}") from None


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Ends what takes longer than so many seconds of a processor, however busy the machine is."""

    def stop(*_: object) -> None:
        raise TooSlowError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _studied(models: Collection, problems: list[str]) -> Studied:
    """Learns from more and more models; `problems` gets what stood in the way of each round."""
    models.prepare()
    models.samples += models.collect(_FIRST)
    if len(models.samples) < 40:
        raise LeftOutError(f"few configurations can be built: {models.why()}")
    models.configure()
    for number in range(_ROUNDS):
        try:
            stored = learnt(models)
        except (UnlearnableError, ValueError) as error:
            problems.append(str(error))
            models.samples += models.collect(_BATCH)
            continue
        found, fresh = _problem(models, stored)
        if found is None:
            return Studied(stored, models.builds, number + 1)
        problems.append(found)
        models.samples += fresh
    raise LeftOutError(problems[-1])


def _problem(models: Collection, stored: dict[str, Any]) -> tuple[str | None, list[Any]]:
    """What a table gets wrong on fresh draws, then on those of a seed of its own, and the models of these."""
    fresh = models.collect(_BATCH)
    for sample in fresh:
        if found := disagreement(stored, sample.given, sample.parameters, models.name):
            return found, fresh
    draws = Draws(models.kind, f"gate {models.name} {len(models.samples)}")
    draws.required = models.draws.required  # nothing else that the learner found out
    fresh = models.collect(GATE, draws, tries=12)
    if len(fresh) < GATE:
        raise LeftOutError(f"too few configurations for the gate can be built: {len(fresh)}; {models.why()}")
    deep_models = models.collect(_DEEP_MODELS, draws, deepest=DEEP)
    for sample in fresh:
        if found := disagreement(stored, sample.given, sample.parameters, models.name):
            return found, fresh
    # What follows from other keys first: parameters follow from it, and models do not show it.
    deep = [one for _ in range(GATE) for one in models.configuration(draws, DEEP)]
    for sample in deep:
        if found := miscompleted(stored, sample, models.name):
            models.configs += deep
            return found, fresh
    for sample in deep_models:
        if found := disagreement(stored, sample.given, sample.parameters, models.name):
            return found, fresh + deep_models
    return None, fresh


def learnt(models: Collection) -> dict[str, Any]:
    """The table that the models show, as it is stored.

    Raises:
        UnlearnableError: no expression explains something.
        LeftOutError: something never varied that has to.
    """
    kind = models.kind
    rows, stacks = rows_and_stacks(kind, models.samples)
    stored: dict[str, Any] = {"class": kind.model_class}
    if kind.nested or kind.numbers:
        stored["nested"] = sorted({*kind.nested, *kind.numbers})
    if names := {old: new for old, new in kind.names.items() if old.rpartition(".")[2] != new}:
        stored["names"] = names
    used = {one for row in rows for text in (row.get("when", "True"), *row["shape"]) for one in names_of(text)}
    used |= {one for text in stacks.values() for one in names_of(text)}
    if models.draws.required:
        stored["required"] = models.draws.required
    stored |= completion(models, used)
    for held in (stored.get("derived", {}), stacks):
        held.update({key: _plain(text) for key, text in held.items()})
    for row in rows:
        row["shape"] = [_plain(text) for text in row["shape"]]
        if "when" in row:
            row["when"] = _plain(row["when"])
    return {**stored, "stacks": stacks, "rows": rows}


def _plain(text: str) -> str:
    """An expression without parentheses that it does not need."""
    return ast.unparse(ast.parse(text, mode="eval"))
