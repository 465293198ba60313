"""`parcompile init` and `parcompile new`: first specs that compile, and projects whose files fit together."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import parcompile
from parcompile.cli.main import cli

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
}
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, **options: CliRunner().invoke(cli, arguments, **options)


@pytest.mark.parametrize("named", ["models/config.json", "models"])
def test_init_takes_a_configuration_by_its_file_or_folder(run: Run, named: str) -> None:
    Path("models").mkdir()
    Path("models/config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    Path("specs").mkdir()
    done = run("init", "--hf-config", named, "-o", "specs/spec.json")
    assert run("init", "--model", named).stdout == run("init", named).stdout == run("init", "--hf-config", named).stdout
    assert done.exit_code == 0, done.output
    assert "tp 1 and pp 1: the peak of a rank is estimated as" in done.output
    spec = json.loads(Path("specs/spec.json").read_text(encoding="utf-8"))
    assert spec["model"] == {"hf_config": "../models/config.json"}
    assert spec["training"]["sequence_length"] == 4096
    assert parcompile.compile("specs/spec.json").world_size == 8


def test_init_names_the_smallest_layout_and_what_it_takes(run: Run) -> None:
    done = run("init", "--model", "llama-3-70b", "--nodes", "4", "-o", "spec.json")
    assert ", the smallest sizes that fit and pass every rule" in " ".join(done.output.split())
    assert max(map(len, done.output.splitlines())) <= 80
    sizes = json.loads(Path("spec.json").read_text(encoding="utf-8"))["parallelism"]
    assert f"tp {sizes['tp']} and pp {sizes['pp']}" in done.output
    smaller = {**json.loads(Path("spec.json").read_text(encoding="utf-8"))}
    smaller["parallelism"] = {**sizes, "tp": sizes["tp"] // 2}
    assert not parcompile.check(smaller).valid


def test_init_asks_for_a_model_only_in_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "name the model, as in parcompile init llama-3-8b" in run("init").output
    terminal = {"stdin": type("", (), {"isatty": lambda: True}), "stderr": sys.stderr}
    monkeypatch.setattr("parcompile.cli.init.sys", type("Terminal", (), terminal))
    answers = "llama-3.2-1b\n2\n4\nh200\n"
    done = run("init", "-o", "spec.json", input=answers)
    assert done.exit_code == 0, done.output
    spec = json.loads(Path("spec.json").read_text(encoding="utf-8"))
    assert spec["cluster"] == {"nodes": 2, "gpus_per_node": 4, "accelerator": "h200"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "lama-3-8b"), "did you mean llama-3-8b?"),
        (("--model", "someone/their-model"), "download its config.json and name that file"),
        (("--model", "llama-3-8b", "--hf-config", "x.json"), "give one of --model and --hf-config"),
        (("--hf-config", "x.json"), "x.json cannot be read"),
        (("--model", "llama-3.1-405b"), "no tp and pp fit llama-3.1-405b"),
    ],
)
def test_what_init_cannot_use_is_said(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run("init", *arguments)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize("options", [(), ("--model", "llama-3-8b"), ("--hf-config", "config.json", "--nodes", "2")])
def test_a_new_project_checks_and_compiles(run: Run, options: tuple[str, ...]) -> None:
    Path("config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    done = run("new", "project", *options)
    assert done.exit_code == 0, done.output
    Path("config.json").unlink()
    project = Path("project")
    assert parcompile.check(project / "spec.json").valid
    assert parcompile.compile(project / "spec.json", project / "plan").world_size >= 2
    texts = {file.name: file.read_text(encoding="utf-8") for file in project.rglob("*") if file.is_file()}
    assert "@NAME@" not in "".join(texts.values())
    assert "# project" in texts["README.md"]
    compile(texts["train.py"], "train.py", "exec")
    for name in ("run.sh", "submit.sh"):
        assert os.access(project / name, os.X_OK)
        assert (project / name).stat().st_mode & stat.S_IXUSR
    for file in ("plan/launch/deepspeed.sh", "plan/launch/slurm.sbatch"):
        assert file in texts["run.sh"] + texts["submit.sh"]
        assert (project / file).is_file()


def test_the_workflow_of_a_new_project_runs_commands_that_pass(run: Run) -> None:
    import yaml

    assert run("new", "project").exit_code == 0
    tree = yaml.safe_load(Path("project/.github/workflows/check.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for step in tree["jobs"]["check"]["steps"] if step.get("run", "").startswith("parcompile ")]
    assert len(commands) == 2
    os.chdir("project")
    for line in commands:
        assert run(*line.split()[1:]).exit_code == 0, line


def test_a_folder_that_holds_something_is_left_alone(run: Run) -> None:
    Path("project").mkdir()
    Path("project/mine.txt").write_text("mine", encoding="utf-8")
    done = run("new", "project")
    assert done.exit_code == 1
    assert "is not an empty folder" in done.output
    assert [file.name for file in Path("project").iterdir()] == ["mine.txt"]


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_nothing_is_left_of_a_project_that_cannot_be_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    done = run("new", "project")
    assert done.exit_code == 1
    assert "No space left on device" in done.output
    assert not Path("project").exists()
