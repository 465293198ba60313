"""Studies one model type: draws, builds, learns, and adds what its table gets wrong until fresh draws agree."""

from __future__ import annotations

import ast
import contextlib
import json
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from building import INERT, ModelType, Sample, nest, plan_of
from drawing import Draws
from structure import Structure
from trees import At, Learner, UnlearnableError

from parcompile.model.tables.completing import TableError
from parcompile.model.tables.expression import names as names_of
from parcompile.model.tables.parameters import parameters
from parcompile.model.tables.reading import table_from

GATE = 40
"""Configurations that a table has to get right, none of which it was learnt from."""
_FEW = 3
"""What so few configurations agree on may be chance."""
_FIRST, _BATCH, _ROUNDS, _CONFIGS = 90, 30, 8, 150


class LeftOutError(ValueError):
    """A type whose parameters cannot be expressed."""


@dataclass(frozen=True)
class Studied:
    """A table that passed the gate, as it is stored."""

    stored: dict[str, Any]
    builds: int
    rounds: int


class TooSlowError(Exception):
    """A type that takes too long."""


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Ends what takes too long."""

    def stop(*_: object) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def study(name: str, seconds: int = 240) -> Studied:
    """The table of a type.

    Raises:
        LeftOutError: it cannot be expressed exactly; why.
    """
    try:
        with limit(seconds):
            return _Study(name).result()
    except TooSlowError:
        raise LeftOutError(f"not learnt within {seconds} s") from None


def compared(name: str, stored: dict[str, Any], count: int, seed: str) -> tuple[int, list[str]]:
    """How many models were built from fresh draws, and what a table says otherwise than they."""
    draws = Draws(ModelType(name), seed)
    draws.required = stored.get("required", {})
    built, wrong = 0, []
    for _ in range(12 * count):
        if built == count:
            break
        try:
            sample = draws.kind.model(draws.one())
        except Exception:  # transformers refuses this configuration
            continue
        built += 1
        if found := disagreement(stored, sample.given, sample.parameters, name):
            wrong.append(f"{found} for {json.dumps(sample.given)}")
    return built, wrong


class _Study:
    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self.kind = ModelType(name)
        except Exception as error:
            raise LeftOutError(f"its configuration class: {_told(error)}") from error
        self.draws = Draws(self.kind, f"learn {name}")
        self.samples: list[Sample] = []
        self.configs: list[Sample] = []
        self.rejected: Counter[str] = Counter()
        self.builds = 0

    def result(self) -> Studied:
        self._prepare()
        self._collect(self.draws, _FIRST, self.samples)
        if len(self.samples) < 40:
            raise LeftOutError(f"few configurations can be built: {self._why()}")
        self._configurations()
        problem = ""
        for number in range(_ROUNDS):
            try:
                stored = self._learnt()
            except (UnlearnableError, ValueError) as error:
                problem = str(error)
                self._collect(self.draws, _BATCH, self.samples)
                continue
            fresh: list[Sample] = []
            self._collect(self.draws, _BATCH, fresh)
            wrong = [sample for sample in fresh if disagreement(stored, sample.given, sample.parameters, self.name)]
            if not wrong and (problem := self._gate(stored)) == "":
                return Studied(stored, self.builds, number + 1)
            if wrong:
                one = wrong[0]
                problem = disagreement(stored, one.given, one.parameters, self.name) or ""
            self.samples += fresh
        raise LeftOutError(problem)

    def _gate(self, stored: dict[str, Any]) -> str:
        """What a table gets wrong on draws of its own seed; empty where it gets all right."""
        draws = Draws(self.kind, f"gate {self.name} {len(self.samples)}")
        draws.required = self.draws.required  # nothing else that the learner found out
        fresh: list[Sample] = []
        self._collect(draws, GATE, fresh, tries=12)
        if len(fresh) < GATE // 2:
            return f"too few configurations for the gate: {len(fresh)}"
        for sample in fresh:
            if found := disagreement(stored, sample.given, sample.parameters, self.name):
                self.samples += fresh
                return found
        return ""

    def _why(self) -> str:
        return self.rejected.most_common(1)[0][0] if self.rejected else "none"

    def _build(self, given: dict[str, Any]) -> Sample | None:
        self.builds += 1
        try:
            return self.kind.model(given)
        except TooSlowError:
            raise
        except Exception as error:
            self.rejected[_told(error)] += 1
            return None

    def _collect(self, draws: Draws, count: int, into: list[Sample], tries: int = 4) -> None:
        """Adds models that are built from draws, until there are enough or nearly all are refused."""
        left, wanted = tries * count, len(into) + count
        while len(into) < wanted and left > 0:
            left -= 1
            if (sample := self._build(draws.one())) is not None:
                into.append(sample)

    def _prepare(self) -> None:
        """Finds what is required to build anything, and the keys that cannot be changed alone or to any prime."""
        if self._build(self.draws.one(only="")) is None and not self._require():
            raise LeftOutError(f"no configuration can be built: {self._why()}")
        for key, default in self.draws.keys.items():
            if key in self.draws.layer_keys:
                continue
            if not self._changes(key, odd=False):
                self.draws.refused.add(key)
            elif isinstance(default, int | None) and not isinstance(default, bool) and not self._changes(key, odd=True):
                self.draws.whole.add(key)

    def _changes(self, key: str, *, odd: bool) -> bool:
        """Whether anything is built with another value of a key: alone, or with others."""
        for number in range(10):
            given = self.draws.one(only=key, odd=odd) if number < 5 else self.draws.one(0.6, odd=odd, besides=key)
            if key in given and (sample := self._build(given)) is not None:
                self.samples.append(sample)
                return True
        return False

    def _require(self) -> bool:
        """Looks for the fewest values with which a class whose defaults are refused builds anything."""
        kinds = sorted({word for words in self.draws.words.values() for word in words})
        ropes = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in kinds}
        if kinds and self._build({**self.draws.one(only=""), "rope_parameters": ropes}) is not None:
            self.draws.required["rope_parameters"] = ropes
            return True
        for _ in range(60):
            given = self.draws.one(share=0.8, odd=False)
            if self._build(given) is None:
                continue
            needed = {key: value for key, value in given.items() if key not in self.draws.layer_keys}
            for key in list(needed):
                less = {other: value for other, value in given.items() if other != key}
                if self._build(less) is not None:
                    needed.pop(key)
                    given = less
            self.draws.required |= {key: value for key, value in needed.items() if not isinstance(value, list)}
            return True
        return False

    def _configurations(self) -> None:
        """Many configurations without their models: what a class derives is learnt from these."""
        self.configs = list(self.samples)
        for _ in range(_CONFIGS):
            given = self.draws.one(deepest=15)
            with contextlib.suppress(Exception):
                self.configs.append(self.kind.configuration(given)[1])

    # -- learning ------------------------------------------------------------------------------------------------------

    def _learnt(self) -> dict[str, Any]:
        structure = Structure([[name for name, _ in sample.parameters] for sample in self.samples])
        keys = _keys(self.samples)
        learner = Learner([sample.full for sample in self.samples], keys)
        held: list[dict[str, dict[tuple[int, ...], tuple[int, ...]]]] = []
        for sample in self.samples:
            rows: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
            for name, shape in sample.parameters:
                row, numbers = structure.split(name)
                rows.setdefault(row, {})[numbers] = shape
            held.append(rows)
        stacks, counts = self._stacks(learner, held)
        rows = self._rows(learner, structure, held, counts)
        stored: dict[str, Any] = {"class": self.kind.model_class}
        if self.kind.nested:
            stored["nested"] = sorted(self.kind.nested)
        if names := {old: new for old, new in self.kind.names.items() if old.rpartition(".")[2] != new}:
            stored["names"] = names
        used = {one for row in rows for text in (row.get("when", "True"), *row["shape"]) for one in names_of(text)}
        used |= {one for text in stacks.values() for one in names_of(text)}
        if self.draws.required:
            stored["required"] = self.draws.required
        stored |= self._completion(used)
        for held in (stored.get("derived", {}), stacks):
            held.update({key: _plain(text) for key, text in held.items()})
        for row in rows:
            row["shape"] = [_plain(text) for text in row["shape"]]
            if "when" in row:
                row["when"] = _plain(row["when"])
        return {**stored, "stacks": stacks, "rows": rows}

    def _stacks(self, learner: Learner, held: Any) -> tuple[dict[str, str], Any]:
        counts: list[Counter[tuple[str, tuple[int, ...]]]] = [Counter() for _ in held]
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
            found[stack] = learner.size(samples, [counts[at][stack, one] for at, one in samples], layered="{" in outer)
            if "{" not in outer and found[stack].isdigit():
                raise LeftOutError(f"the number of {outer} never varied: {found[stack]}")
        return found, counts

    def _rows(self, learner: Learner, structure: Structure, held: Any, counts: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        plan = self._plan()
        for row in structure.rows:
            layered = "{" in row
            samples: list[At] = [(at, one) for at in range(len(held)) for one in _places(counts[at], row)]
            shapes = [held[at].get(row, {}).get(one) for at, one in samples]
            for dims in sorted({len(shape) for shape in shapes if shape is not None}):
                here = [shape is not None and len(shape) == dims for shape in shapes]
                try:
                    when = learner.choice(samples, [str(one) for one in here], layered=layered)
                    there = [
                        (one, shape) for one, shape in zip(samples, shapes, strict=True) if shape and len(shape) == dims
                    ]
                    at = [one for one, _ in there]
                    shape = [
                        learner.size(at, [sizes[dim] for _, sizes in there], layered=layered) for dim in range(dims)
                    ]
                except UnlearnableError as error:
                    raise UnlearnableError(f"{row}: {error}") from error
                entry: dict[str, Any] = {"name": row, "shape": shape}
                if when != "True":
                    entry["when"] = when
                if (cut := _of_plan(plan, row)) is not None:
                    entry["tp"] = cut
                rows.append(entry)
        return rows

    def _plan(self) -> dict[str, str]:
        try:
            return plan_of(self.name)
        except Exception:  # the defaults of some classes build no model, and such a type has no plan to show
            return {}

    def _completion(self, used: set[str]) -> dict[str, Any]:
        """Defaults and derived values of the keys that the rows read, and of those from which these follow."""
        keys = _keys(self.configs)
        derived: dict[str, str] = {}
        todo, seen = [key for key in used if key not in ("layer", "item", "part")], set(used)
        while todo:
            key = todo.pop()
            if key not in keys:
                continue
            try:
                text = self._derived(key, keys)
            except UnlearnableError as error:
                raise UnlearnableError(f"what {key} follows from: {error}") from error
            if text is None:
                continue
            derived[key] = text
            for other in names_of(text) - seen - {"layer"}:
                seen.add(other)
                todo.append(other)
        order = _ordered(derived)
        defaults = {key: value for key, value in self.kind.defaults.items() if key in seen and value is not None}
        varied = {key for key in seen if len({json.dumps(sample.raw.get(key)) for sample in self.samples}) > 1}
        fixed = {
            key: value
            for key, value in self.kind.defaults.items()
            if key in self.draws.keys
            and key not in varied | self.kind.names.keys()
            and not _changes_no_shape(value)
            and len({json.dumps(sample.raw.get(key)) for sample in self.samples}) < 2
        }
        found: dict[str, Any] = {"defaults": defaults}
        if fixed:
            found["fixed"] = fixed
            found["defaults"] |= {key: value for key, value in fixed.items() if value is not None}
        if derived:
            found["derived"] = {key: derived[key] for key in order}
        return found

    def _derived(self, key: str, keys: list[str]) -> str | None:
        """How a value follows from what is given; None where it is what was given, or its default."""
        raw = [sample.raw.get(key) for sample in self.configs]
        full = [sample.full.get(key) for sample in self.configs]
        if all(one == other for one, other in zip(raw, full, strict=True)):
            return None
        given = [at for at, (one, other) in enumerate(zip(raw, full, strict=True)) if one is not None and one == other]
        left = [at for at, one in enumerate(raw) if one in (None, "auto")]
        if len(given) + len(left) == len(raw):
            text = self._value(key, left, full, keys)
            if "auto" in raw:
                return f"({text}) if {key} in [None, 'auto'] else {key}"
            return f"({text}) if {key} is None else {key}"
        return self._value(key, list(range(len(raw))), full, keys)

    def _value(self, key: str, at: list[int], full: list[Any], keys: list[str]) -> str:
        # Where the key itself decides, it is what was given.
        configs = [{**self.configs[one].full, key: self.configs[one].raw.get(key)} for one in at]
        learner = Learner(configs, keys)
        values = [full[one] for one in at]
        samples: list[At] = [(one, ()) for one in range(len(at))]
        if all(value == values[0] for value in values) and len(values) > _FEW:
            return repr(values[0])
        if all(isinstance(value, list) for value in values):
            if (text := self._members(learner, values)) is not None:
                return text
            length = learner.size(samples, [len(value) for value in values], layered=False)
            inner: list[At] = [(one, (layer,)) for one, value in enumerate(values) for layer in range(len(value))]
            entries = [entry for value in values for entry in value]
            if not entries:
                return "[]"
            if all(type(entry) is int for entry in entries):
                each = learner.size(inner, entries, layered=True)
            else:
                each = learner.choice(inner, [repr(entry) for entry in entries], layered=True)
            return f"[({each}) for layer in range({length})]"
        if all(type(value) is int for value in values):
            return learner.size(samples, values, layered=False)
        numbers = [type(value) is int for value in values]
        if any(numbers):
            which = learner.choice(samples, [str(one) for one in numbers], layered=False)
            inside = [one for one, number in enumerate(numbers) if number]
            size = learner.size([(one, ()) for one in inside], [values[one] for one in inside], layered=False)
            rest = [one for one, number in enumerate(numbers) if not number]
            other = learner.choice([(one, ()) for one in rest], [repr(values[one]) for one in rest], layered=False)
            return f"({size}) if {which} else ({other})"
        return learner.choice(samples, [repr(value) for value in values], layered=False)

    def _members(self, learner: Learner, values: list[Any]) -> str | None:
        """A list of layers, by which layers are in it; None where the lists are no such."""
        count = next((key for key in self.draws.layer_keys if "." not in key), None)
        numbers = [value for held in values for value in held]
        if not numbers or count is None or any(type(number) is not int for number in numbers):
            return None
        if any(held != sorted(set(held)) for held in values):
            return None
        depths = [config[count] for config in learner.configs]
        if any(held and held[-1] >= depth for held, depth in zip(values, depths, strict=True)):
            return None
        inner: list[At] = [(one, (layer,)) for one, depth in enumerate(depths) for layer in range(depth)]
        try:
            which = learner.choice(inner, [str(layer in values[one]) for one, (layer,) in inner], layered=True)
        except UnlearnableError:
            return None
        return f"[layer for layer in range({count}) if ({which})]"


def disagreement(stored: dict[str, Any], given: dict[str, Any], built: Any, name: str) -> str | None:
    """What a table says otherwise than the model that was built; None where names, order and shapes are the same."""
    try:
        found = [(one.name, one.shape) for one in parameters(table_from(name, stored), nest(given))]
    except TableError as error:
        return str(error)
    if found == list(built):
        return None
    for one, other in zip(found, built, strict=False):
        if one != other:
            return f"the table says {one}, the model {other}"
    return f"the table says {len(found)} parameters, the model {len(built)}"


def _keys(samples: list[Sample]) -> list[str]:
    """Keys that a configuration has, without those that change no shape."""
    found = dict.fromkeys(key for sample in samples for key in sample.full)
    return [key for key in found if not INERT.search(key.rpartition(".")[2])]


def _places(counts: Counter[tuple[str, tuple[int, ...]]], row: str) -> list[tuple[int, ...]]:
    """Every tuple of indices under which a row may stand."""
    found: list[tuple[int, ...]] = [()]
    parts = row.split(".")
    for end, part in enumerate(parts):
        if part.startswith("{"):
            stack = ".".join(parts[: end + 1])
            found = [(*one, number) for one in found for number in range(counts[stack, one])]
    return found


def _of_plan(plan: dict[str, str], row: str) -> str | None:
    name = ".".join("*" if part.startswith("{") else part for part in row.split("."))
    for candidate in (name, name.rpartition(".")[0]):
        if candidate in plan:
            return plan[candidate]
    return None


def _ordered(derived: dict[str, str]) -> list[str]:
    """Derived keys, each behind those that it reads; where two read one another, as they come."""
    rest, order = list(derived), []
    while rest:
        ready = [key for key in rest if not (names_of(derived[key]) & set(rest)) - {key}]
        order.append(ready[0] if ready else rest[0])
        rest.remove(order[-1])
    return order


def _changes_no_shape(value: Any) -> bool:
    """Text that no code compares, and fractions: other values of them are taken as they come."""
    return isinstance(value, str | float) or (isinstance(value, list) and any(isinstance(one, float) for one in value))


def _plain(text: str) -> str:
    """An expression without parentheses that it does not need."""
    return ast.unparse(ast.parse(text, mode="eval"))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
