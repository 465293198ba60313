"""No file makes the checker fail or run away: odd values in other tools' files, and specs with very many mistakes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parcompile.backends.kinds import DEEPSPEED, GPT_NEOX, MEGATRON
from parcompile.backends.megatron.file import from_shell
from parcompile.lint.registry import file_rules
from parcompile.pipeline import check_any, check_read
from parcompile.rules import check, example_spec, rule_targets
from parcompile.spec.resolve import Resolution
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
    source = SourceText("a.sh", text)
    checked = check_read(Result(source, from_shell(source)), Path(), kind=MEGATRON)
    assert all(one.position is not None for one in checked.diagnostics)


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "mixtral-8x7b", "nemotron-3-nano-30b-a3b"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_fewer_tokens_than_ranks_are_one_error(preset: str, length: int) -> None:
    """Ranks without a token have no time and no memory to predict."""
    sections = {
        "model": {"preset": preset},
        "cluster": {"nodes": 2, "accelerator": "h100-sxm"},
        "parallelism": {"cp": 4, "tp": 2},
        "training": {"sequence_length": length, "global_batch_size": 2, "micro_batch_size": 1},
    }
    found = check(Resolution(example_spec(sections)), rule_targets(()))
    assert "C001" in {one.code for one in found if one.is_error}


def test_very_many_mistakes_do_not_run_away(tmp_path: Path) -> None:
    spec = example_spec({"parallelism": {f"tp{index}": 1 for index in range(100)}})
    spec["deepspeed"] = {f"steps_per_prin{index}": index for index in range(100)}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec, indent=1), encoding="utf-8")
    start = time.process_time()
    checked = check_any(file)
    assert sum(one.is_error for one in checked.diagnostics) == 200
    assert time.process_time() - start < 60  # a bound against quadratic work, not a measurement


class TestHostileInput:
    """What is no regular file is not read; what would speak to a terminal does not reach it."""

    def run(self, *arguments: str, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "parcompile", *arguments]
        return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=600, check=False)

    def test_pipes_and_devices_are_refused_before_they_are_read(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.json")
        for name in (str(tmp_path / "pipe.json"), "/dev/zero"):
            done = self.run("check", name)
            assert (done.returncode, done.stdout) == (2, "")
            assert "is no regular file" in done.stderr

    def test_escapes_in_names_do_not_reach_the_terminal(self, tmp_path: Path) -> None:
        file = tmp_path / "spec\x1b[31m.json"
        tree = {"version": 1, "name": "\x1b]0;title\x07", "model": {"preset": "\x1b[2J"}, "cluster": {}, "training": {}}
        file.write_text(json.dumps(tree), encoding="utf-8")
        for form in ("text", "concise"):
            done = self.run("check", str(file), "--format", form)
            assert "\x1b" not in done.stdout + done.stderr
            assert "K006" in done.stdout
        assert "\x1b" not in self.run("check", str(tmp_path / "\x1b[31mnone.json")).stderr

    def test_a_full_disk_behind_standard_output_is_an_error(self, tmp_path: Path) -> None:
        file = tmp_path / "spec.json"
        file.write_text("{}", encoding="utf-8")
        with Path("/dev/full").open("w") as full:
            done = self.run("check", str(file), "--kind", "spec", "--format", "json", stdout=full)
        assert done.returncode == 2
        assert done.stderr == "Error: standard output cannot be written: No space left on device\n"

    def test_completion_of_a_shell_ends_well(self) -> None:
        command = [sys.executable, "-m", "parcompile"]
        environment = {**os.environ, "_PARCOMPILE_COMPLETE": "bash_source"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert (done.returncode, "complete" in done.stdout) == (0, True)

    @pytest.mark.parametrize(
        "arguments", [("models",), ("check", "nothing.json"), ("accelerators", "--format", "json")]
    )
    def test_a_reader_that_has_left_ends_the_command_as_sigpipe_would(self, arguments: tuple[str, ...]) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "parcompile", *arguments]
        for errors in (subprocess.PIPE, writing):
            done = subprocess.run(command, stdout=writing, stderr=errors, text=True, timeout=600, check=False)
            said = arguments[0] == "check" and errors == subprocess.PIPE  # all is on standard error
            assert done.returncode == (2 if said else 141)
            assert not done.stderr or said
        os.close(writing)
