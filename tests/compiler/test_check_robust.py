"""No file makes the checker fail or run away: odd values in other tools' files, and specs with very many mistakes."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parcompile.backends.kinds import DEEPSPEED, GPT_NEOX, MEGATRON
from parcompile.backends.megatron.file import from_shell
from parcompile.pipeline import check_any, check_read
from parcompile.rules.examples import example_spec
from parcompile.rules.file_registry import file_rules
from parcompile.text import Result, SourceText, parse

ODD: list[Any] = [None, True, -1, 0, 1.5, 10**20, "", "auto", "text", [], [1, "auto"], {}, {"enabled": True}]


def places(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def changed(tree: Any, path: tuple[str, ...], value: Any) -> Any:
    tree = copy.deepcopy(dict(tree))
    node = tree
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return tree


@pytest.mark.parametrize("rule", file_rules(), ids=lambda rule: rule.code)
def test_odd_values_give_placed_findings(rule: Any) -> None:
    assert rule.kind in (DEEPSPEED, MEGATRON, GPT_NEOX)
    for path in places(rule.wrong):
        for value in ODD:
            text = json.dumps(changed(rule.wrong, path, value), indent=1)
            read = parse(text, "file.json", "json")
            checked = check_read(read, Path(), kind=rule.kind)
            assert all(one.position is not None for one in checked.diagnostics)


@pytest.mark.parametrize(
    "text",
    [
        "--tensor-model-parallel-size --num-layers=\n--pipeline-model-parallel-size",
        "--num-layers $A\nA=$A\n--hidden-size ${B:-3}",
        '--num-layers \'x\n--seq-length "4096" --micro-batch-size=\\\n',
        "-- --- --- num-layers --num-layers \x00 --seq-length 10e400",
    ],
)
def test_odd_scripts_are_read(text: str) -> None:
    document = from_shell(SourceText("a.sh", text))
    checked = check_read(Result(document.source, document), Path(), kind=MEGATRON)
    assert all(one.position is not None for one in checked.diagnostics)


def test_very_many_mistakes_do_not_run_away(tmp_path: Path) -> None:
    spec = example_spec({"parallelism": {f"tp{index}": 1 for index in range(100)}})
    spec["deepspeed"] = {f"steps_per_prin{index}": index for index in range(100)}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec, indent=1), encoding="utf-8")
    start = time.monotonic()
    checked = check_any(file)
    assert sum(one.is_error for one in checked.diagnostics) == 200
    assert time.monotonic() - start < 60  # a bound against quadratic work, not a measurement
