"""Each rule's own page holds: its wrong example breaks it, its right one does not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from parcompile import lint, schema
from parcompile import rules as rules_room
from parcompile.backends.kinds import DEEPSPEED, GPT_NEOX, MEGATRON
from parcompile.backends.statements import EXPRESSION, rows_of
from parcompile.diagnostics import Severity
from parcompile.layout.groups import divisors
from parcompile.lint.advisories import advisories
from parcompile.lint.registry import file_rules
from parcompile.model.tables.expression import compiled, names
from parcompile.rules import (
    BASE,
    BROKEN_PLUGIN,
    CONCERNED,
    DEFAULT_TARGETS,
    INEXPRESSIBLE,
    Rule,
    all_rules,
    check,
    example_spec,
    nearest_divisors,
    nearest_multiples,
)
from parcompile.rules.table import value_of
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.user_files import shipped

RULES = all_rules()


def codes(tree: object, targets: tuple[str, ...] = CONCERNED) -> list[str]:
    validation = schema.validate(tree, "spec")
    assert validation.valid, validation.diagnostics
    return [one.code for one in check(Resolution(tree, validation.invalid_paths), targets)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_wrong_example_breaks_the_rule_and_right_one_does_not(rule: Rule) -> None:
    assert rule.code in codes(example_spec(rule.wrong))
    assert rule.code not in codes(example_spec(rule.right))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_right_example_compiles(rule: Rule) -> None:
    tree = example_spec(rule.right)
    targets = DEFAULT_TARGETS if "all" in rule.targets else (*DEFAULT_TARGETS, *rule.targets)
    assert [one.message for one in check(Resolution(tree), targets) if one.is_error] == []


def test_the_base_of_the_examples_breaks_no_rule() -> None:
    remarks = {rule.code for rule in RULES if rule.severity is Severity.INFO}
    assert set(codes(dict(BASE))) <= remarks


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_page_is_complete(rule: Rule) -> None:
    assert re.fullmatch(r"[A-Z][0-9]{3}", rule.code)
    assert rule.title
    assert not rule.title.endswith(".")
    assert rule.explanation.endswith(".")
    assert len(rule.explanation) > len(rule.title)
    assert set(rule.targets) <= {"all", *CONCERNED}
    if rule.severity is Severity.ERROR:
        assert rule.sources or "all" in rule.targets


@pytest.mark.parametrize(
    ("package", "codes"),
    [
        (rules_room, {rule.code for rule in RULES} | {BROKEN_PLUGIN, INEXPRESSIBLE}),
        (lint, {rule.code for rule in file_rules() if rule.code not in {one.id for one in advisories()}}),
    ],
    ids=["rules", "lint"],
)
def test_each_page_is_that_of_a_code_and_has_the_types_of_one(package: ModuleType, codes: set[str]) -> None:
    stored = shipped(package.__name__, "pages.json")
    assert set(stored) == codes
    types = {"title": str, "explanation": str, "wrong": dict, "right": dict, "sources": list}
    for code, page in stored.items():
        assert {name: type(value) for name, value in page.items()}.items() <= types.items(), code
        assert all(type(source) is str for source in page.get("sources", ())), code


def test_megatron_rules_are_quiet_unless_asked_for() -> None:
    tree = example_spec({"parallelism": {"tp": 2, "cp": 2, "order": "cp-tp-dp-pp"}})
    assert "W007" not in codes(tree, DEFAULT_TARGETS)
    assert "W007" in codes(tree, ("megatron",))


def test_a_rule_is_quiet_when_its_inputs_are_wrong() -> None:
    tree = example_spec({"parallelism": {"tp": "two", "sequence_parallel": True, "cp": 3, "order": "tp"}})
    validation = schema.validate(tree, "spec")
    found = check(Resolution(tree, validation.invalid_paths))
    assert [one.code for one in validation.diagnostics] == ["K004"]
    assert {one.code for one in found} <= {"B005", "C001", "T005", "W004"}


def test_an_axis_that_stands_twice_in_the_order_is_told() -> None:
    tree = example_spec({"model": {"preset": "mixtral-8x7b"}})
    tree["parallelism"] = {"tp": 2, "ep": 2, "order": "tp-cp-tp-dp-pp"}
    assert "W004" in codes(tree)


def test_missing_dimensions_are_reported_once() -> None:
    tree = example_spec({"model": {"model_type": "llama", "hidden_size": 64}})
    validation = schema.validate(tree, "spec")
    assert {one.code for one in validation.diagnostics} == {"K002"}
    assert [one for one in check(Resolution(tree, validation.invalid_paths)) if one.is_error] == []


def test_every_rule_module_is_registered() -> None:
    """The first letter of a module is that of its codes, so that its name tells where a rule stands."""
    found = {rule.check.__module__.rpartition(".")[2]: rule.code for rule in all_rules()}
    assert found.pop("table")
    modules = {file.stem for file in Path(rules_room.__file__).parent.glob("[a-z]_*.py")}
    assert modules == set(found)
    assert all(module[0].upper() == code[0] for module, code in found.items())


def test_rules_of_files_stand_in_the_room_of_their_tool() -> None:
    rooms = {rule.check.__module__.split(".")[2]: rule.kind for rule in file_rules() if rule.code[0] == "F"}
    assert rooms == {"deepspeed": DEEPSPEED, "megatron": MEGATRON, "gpt_neox": GPT_NEOX}


@pytest.mark.parametrize("room", ["rules", "lint.deepspeed", "lint.megatron", "lint.gpt_neox"])
def test_every_expression_of_a_stored_rule_can_be_read(room: str) -> None:
    """Of each row, also of those that no example breaks; no word that stands for another is left."""
    for code, stored in shipped(f"parcompile.{room}", "rules.json").items():
        rows = rows_of([*stored["finds"], {"when": stored.get("when", "True")}], stored.get("words", {}))
        for row in rows:
            assert "$" not in str(row), code
            over = row.get("over", {})
            texts = [row.get("when", "True"), *over.values()]
            texts += [text for said in _texts(row) for text, _ in EXPRESSION.findall(said)]
            assert all(compiled(text) for text in texts), code
            if room == "rules":
                for name in {name for text in texts for name in names(text) if name.partition(".")[0] not in over}:
                    with suppress(Unavailable):  # a key of DeepSpeed has no default
                        value_of(Resolution(example_spec({"model": {"preset": "mixtral-8x7b"}})), name)


def test_no_table_says_a_name_twice() -> None:
    """JSON takes the last of two entries: a tree of `files.json` would stand for another of its name."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert len(dict(pairs)) == len(pairs), pairs
        return dict(pairs)

    for file in Path(rules_room.__file__).parents[1].rglob("*.json"):
        if "tables" not in file.parts:
            json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=once)


def _texts(node: object) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    for inner in [*node, *node.values()] if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _texts(inner)


@pytest.mark.parametrize(
    ("value", "divisor", "nearest"), [(100, 16, (96, 112)), (3, 8, (8,)), (110, 16, (112, 96)), (8, 8, (8, 16))]
)
def test_nearest_multiples(value: int, divisor: int, nearest: tuple[int, ...]) -> None:
    assert nearest_multiples(value, divisor) == nearest


def test_divisors_are_complete() -> None:
    for total in range(1, 200):
        assert divisors(total) == tuple(number for number in range(1, total + 1) if total % number == 0)
    assert nearest_divisors(16, 126) == (14, 18)
    assert nearest_divisors(8, 25) == (5, 1)
