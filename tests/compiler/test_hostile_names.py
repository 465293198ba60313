"""Names and values that would speak to a terminal, or are no text, in every format."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parcompile.diagnostics.reporters import FORMATS

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3-8b-16-gpus" / "plan.json"


def run(*words: str | bytes, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    return _run("-m", "parcompile", *words, cwd=cwd)


def drive(lines: list[list[str]], cwd: Path) -> subprocess.CompletedProcess[bytes]:
    """Several command lines in one process."""
    return _run("-c", DRIVER, json.dumps(lines), cwd=cwd)


def _run(*words: str | bytes, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert b"Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("format_", FORMATS)
def test_no_control_character_reaches_the_terminal(tmp_path: Path, format_: str) -> None:
    key = "\x1b]0;owned\x07\x9b\u202e\r::error::"
    (tmp_path / "a\x1b[31m.json").write_text(json.dumps({"version": 1, key: key, "model": {"preset": key}}))
    done = run("check", "--kind", "spec", "--format", format_, "a\x1b[31m.json", cwd=tmp_path)
    assert done.returncode == 1
    shown = (done.stdout + done.stderr).decode()
    assert not {one for one in shown if not one.isprintable()} - {"\n"}


DRIVER = """
import json, sys
from parcompile.cli import main

for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as error:
        print("\\x00", error.code)
"""


def test_no_command_lets_a_value_speak_to_the_terminal(tmp_path: Path) -> None:
    rude = "\x1b]0;owned\x07\x9b\u202e\U000e0001\r"
    spec = {
        "version": 1,
        "model": {"preset": "llama-3-8b"},
        "cluster": {"gpus_per_node": 8, "accelerator": "machine\x9b.json"},
        "training": {"sequence_length": 4096, "global_batch_size": 8},
    }
    machine = {"version": 1, "name": f"x{rude}", "title": f"x{rude}", "source": f"x{rude}", "memory_gib": 800}
    (tmp_path / "machine\x9b.json").write_text(json.dumps({**machine, "bf16_tflops": 900}))
    name = "a\x9b.json"
    (tmp_path / name).write_text(json.dumps(spec))
    (tmp_path / "other.json").write_text(json.dumps({**spec, "training": {**spec["training"], "seed": 7}}))
    (tmp_path / "ds\x9b.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, rude: rude}))
    json_commands = [["check", "--format", one, name] for one in ("json", "sarif")]
    json_commands += [["estimate", "--format", "json", name], ["groups", name, "--format", "json"]]
    others = [["view", name], ["diff", name, "other.json"], ["import", "--kind", "ds_config", "ds\x9b.json"]]
    others += [
        ["check", "--show-values", name],
        [name, "-o", "p\x9b"],
        ["view", "p\x9b", "-o", "v\x9b.html"],
        ["p\x9b"],
    ]
    others += [["checkpoint", "verify", "p\x9b"], ["init", "--hf-config", name], ["models", "--config", name]]
    done = drive([*json_commands, *others], tmp_path)
    parts = re.split(r"\x00 \d\n", done.stdout.decode())
    assert len(parts) == len(json_commands) + len(others) + 1
    shown = "".join(parts) + done.stderr.decode()
    assert {one for one in shown if not one.isprintable()} == {"\n"}
    for text in parts[: len(json_commands)]:
        json.loads(text)


@pytest.mark.parametrize("command", [["view"], ["check"], ["compile"], ["estimate"], ["view", "-o", "page.html"]])
def test_a_name_that_is_not_utf_8_ends_no_command_with_a_traceback(tmp_path: Path, command: list[str]) -> None:
    name = b"plan-\xff.json"
    (tmp_path / os.fsdecode(name)).write_bytes(GOLDEN.read_bytes())
    first, *rest = command
    assert run(first, name, *rest, cwd=tmp_path).returncode in (0, 1)


def test_a_path_that_no_project_can_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    rude = os.fsdecode(b"x\xff")
    (tmp_path / rude).write_text("x")
    words = [["new", "loop"], ["new", "d\n"], ["new", "d", "--data", rude], ["new", f"d{rude}"]]
    words += [["plan", "gpt2-xl", "8xH100", "-o", one] for one in ("", "..", "/")]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(words)], cwd=tmp_path, capture_output=True, timeout=120, check=False
    )
    assert b"Traceback" not in done.stderr, done.stderr
    assert done.stdout == b"\0 2\n" * len(words)
    assert done.stderr.count(b"rename it") == 3
    assert sorted(one.name for one in tmp_path.iterdir()) == ["loop", rude]


def test_every_format_writes_a_name_that_is_no_text_or_moves_the_cursor(tmp_path: Path) -> None:
    names = [os.fsdecode(b"spec-\xff.json"), "spec\r\x1b[31m.json"]
    for name in names:
        (tmp_path / name).write_text('{"version": 1}')
    words = [["check", "--kind", "spec", "--format", one, name] for one in FORMATS for name in names]
    done = drive(words, tmp_path)
    parts = re.split(r"\x00 1\n", done.stdout.decode())
    assert len(parts) == len(words) + 1
    assert {one for one in "".join(parts) + done.stderr.decode() if not one.isprintable()} == {"\n"}


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "large.json"])
def test_a_configuration_that_never_ends_is_refused(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large.json").open("wb") as stream:
        stream.truncate(1 << 40)
    spec = {
        "version": 1,
        "model": {"hf_config": path},
        "cluster": {"gpus_per_node": 8, "accelerator": "h200"},
        "training": {"sequence_length": 4096, "global_batch_size": 8},
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    done = run("check", "spec.json", cwd=tmp_path)
    assert done.returncode == 1
    assert b"cannot be read: " in done.stdout
