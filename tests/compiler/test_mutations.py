"""Every positive spec with one thing changed is valid, or is told what is wrong and where; never an exception."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_cases import Case, cases

from parcompile.diagnostics import Diagnostic
from parcompile.pipeline import Checked, check_read, compile_file
from parcompile.plan import plan_tree
from parcompile.rules import CONCERNED
from parcompile.searching import advice
from parcompile.text import parse

MARK = "\x00again"
AXES = ("tp", "cp", "pp", "dp")
OWN_NAMES = (("model", "parameters"), ("model", "injection"))
"""Sections whose keys are names of the user's own."""
SPECS = [case for case in cases("positive") if case.file.suffix == ".json"]


@dataclass(frozen=True)
class Mutant:
    """A text, what was done to it, and the path at which it was done."""

    text: str
    kind: str
    path: tuple[Any, ...]


def entries(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*path, key), value
        yield from entries(value, (*path, key))


def rebuilt(tree: Any, path: tuple[Any, ...], change: Any) -> str:
    """The tree as text after `change(parent, key)`."""
    copy = json.loads(json.dumps(tree))
    parent = copy
    for step in path[:-1]:
        parent = parent[step]
    change(parent, path[-1])
    return json.dumps(copy, indent=1)


def retyped(value: Any) -> list[Any]:
    others: list[Any] = [None, [value], {"value": value}]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return [*others, 3]
    return [*others, f"{value} or so", True]


def perturbed(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 3, value - 1, -value, 0, value + 0.5, 10**18]
    if isinstance(value, float):
        return [value * 2, -value, 0.0]
    if isinstance(value, str):
        return [f"{value}x", value[:-1], "", "auto", value.upper()]
    return [type(value)()]


def misspelt(key: str) -> str:
    return key[: len(key) // 2] + "q" + key[len(key) // 2 :]


def renamed(parent: dict[str, Any], key: str) -> None:
    old = dict(parent)
    parent.clear()
    parent.update({misspelt(name) if name == key else name: value for name, value in old.items()})


def mutants(text: str) -> Iterator[Mutant]:
    tree = json.loads(text)
    for path, value in entries(tree):
        yield Mutant(rebuilt(tree, path, lambda parent, key: parent.pop(key)), "deleted", path)
        for other in retyped(value):
            changed = rebuilt(tree, path, lambda parent, key, other=other: parent.__setitem__(key, other))
            yield Mutant(changed, "retyped", path)
        for other in perturbed(value):
            changed = rebuilt(tree, path, lambda parent, key, other=other: parent.__setitem__(key, other))
            yield Mutant(changed, "perturbed", path)
        if isinstance(path[-1], str):
            if path[:2] not in OWN_NAMES or len(path) != 3:
                yield Mutant(rebuilt(tree, path, renamed), "misspelt", path)
            doubled = rebuilt(tree, path, lambda parent, key, value=value: parent.__setitem__(MARK, value))
            yield Mutant(doubled.replace(json.dumps(MARK), json.dumps(path[-1])), "duplicated", path)


def check(text: str, folder: Path) -> Checked:
    """What is too large is advised by a search of a second or two: an eighth of the mutants has it."""
    advised = zlib.crc32(text.encode()) // 3 % 8 == 0
    with nullcontext() if advised else mock.patch.object(advice, "advised", lambda one, _: one):
        return check_read(parse(text, "spec.json", "json"), folder, CONCERNED)


def is_placed(one: Diagnostic, checked: Checked, text: str) -> bool:
    lines = text.split("\n")
    if one.position is None or not 1 <= one.position.line <= len(lines):
        return False
    if not 1 <= one.position.column <= len(lines[one.position.line - 1]) + 1:
        return False
    if checked.document is None or one.code[0] == "J":
        return True
    document = checked.document
    return one.position in (document.position(one.path), document.position(one.path, key=True))


def assert_sound(mutant: Mutant, folder: Path) -> None:
    checked = check(mutant.text, folder)
    for one in checked.diagnostics:
        assert is_placed(one, checked, mutant.text), (mutant, one)
        assert all(related.position is not None for related in one.related), (mutant, one)
    errors = [one for one in checked.diagnostics if one.is_error]
    if mutant.kind == "misspelt":
        path = (*mutant.path[:-1], misspelt(mutant.path[-1]))
        assert checked.document is not None
        place = checked.document.position(path, key=True)
        inside = [one for one in errors if one.code in ("K001", "K008") and one.position == place]
        assert inside, (mutant, errors)
    elif mutant.kind == "duplicated":
        assert any(one.code == "J009" for one in checked.diagnostics), mutant  # a warning, with the same value
    elif mutant.kind == "retyped" and mutant.path[0] != "deepspeed" and mutant.path[-1] not in AXES:
        # An axis may be "auto" or a number, and DeepSpeed takes null for some keys.
        assert errors, mutant
        assert any(one.path[: len(mutant.path)] == mutant.path for one in errors), (mutant, errors)
    if not errors and checked.resolution is not None:
        checked.resolution.spec()


@pytest.mark.parametrize("case", SPECS, ids=lambda case: case.id)
def test_mutants_are_valid_or_told_what_is_wrong(case: Case) -> None:
    text = case.file.read_text(encoding="utf-8")
    seen: set[str] = set()
    for mutant in mutants(text):
        # The specs share much: a third of their mutants, always the same, are thousands still.
        if mutant.text not in seen and zlib.crc32(mutant.text.encode()) % 3 == 0:
            seen.add(mutant.text)
            assert_sound(mutant, case.file.parent)
    assert len(seen) > 30


# Sections of several specs in one: what no single change of one of them reaches.
SECTIONS = [json.loads(case.file.read_text(encoding="utf-8")) for case in SPECS]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(data=st.data())
def test_any_mixture_of_specs_is_sound(data: st.DataObject, tmp_path: Path) -> None:
    tree = {
        key: data.draw(st.sampled_from([one[key] for one in SECTIONS if key in one]), label=key)
        for key in ("version", "model", "cluster", "parallelism", "training", "zero", "deepspeed")
    }
    text = json.dumps(tree, indent=1)
    checked = check(text, tmp_path)
    assert all(is_placed(one, checked, text) for one in checked.diagnostics)
    if checked.valid:
        file = tmp_path / "spec.json"
        file.write_text(text, encoding="utf-8")
        plan, _ = compile_file(file)
        assert plan is not None
        assert plan_tree(plan)["cluster"]["world_size"] == plan.world_size
