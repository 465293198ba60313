"""`parcompile SPEC -o DIR`, as a user meets it: exit codes, messages, and nothing half-written."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parcompile import cli
from parcompile.cli import main

SPEC: dict[str, Any] = {
    "version": 1,
    "name": "tiny",
    "model": {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 61,
        "max_position_embeddings": 64,
    },
    "cluster": {"gpus_per_node": 4, "accelerator": "cpu"},
    "parallelism": {"tp": 2, "cp": 2},
    "training": {"sequence_length": 16, "global_batch_size": 4},
}

ARTEFACTS = ["ds_config.json", "plan.json", "process_groups.json"]


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs the command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["parcompile", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return Outcome(int(stopped.value.code or 0), captured.out, captured.err)

    return call


def changed(*path: str, value: object) -> str:
    tree = json.loads(json.dumps(SPEC))
    node = tree
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return json.dumps(tree, indent=1)


def test_a_good_spec_becomes_its_artefacts(run: Any) -> None:
    Path("spec.json").write_text(json.dumps(SPEC), encoding="utf-8")
    done = run("spec.json", "-o", "plan")
    assert done.code == 0
    assert "tp 2 × cp 2 × pp 1 × dp 1" in done.out
    assert set(ARTEFACTS) <= {file.name for file in Path("plan").iterdir()}
    assert not [file for file in Path("plan").iterdir() if file.name.startswith(".")]


def test_a_hugging_face_config_beside_the_spec_is_read(run: Any, tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "config.json").write_text(json.dumps(SPEC["model"]), encoding="utf-8")
    (tmp_path / "specs" / "spec.json").write_text(
        changed("model", value={"hf_config": "config.json"}), encoding="utf-8"
    )
    assert run("specs/spec.json", "-o", "plan").code == 0
    plan = json.loads(Path("plan/plan.json").read_text(encoding="utf-8"))
    assert plan["model"]["hf_config"] == SPEC["model"]


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ('{"version": 1,}', "J", "spec.json:1:"),
        (changed("cluster", "gpu_per_node", value=4), "K001", "gpu_per_node"),
        (changed("training", "sequence_length", value="16"), "K003", "sequence_length"),
        (changed("parallelism", "tp", value=3), "T001", "num_attention_heads 4 on tp 3"),
        (changed("parallelism", "cp", value=3), "W001", "does not divide the world"),
        (changed("training", "sequence_length", value=18), "C001", "nearest: 16, 20"),
        (changed("model", value={"preset": "lama-3-8b"}), "S003", "did you mean llama-3-8b"),
        (changed("model", value={"hf_config": "none.json"}), "S003", "none.json cannot be read"),
        (changed("model", value={"hf_config": "none.json"}), "S003", "starts in the folder of the spec"),
        (changed("model", value={"hf_config": "/"}), "S003", "help: name a file"),
        (changed("zero", value={"stage": 4}), "K004", "4 is not allowed"),
        (changed("training", "precision", value="fp8"), "K004", '"fp8" is not allowed'),
        (changed("training", "global_batch_size", value=0), "K005", "global_batch_size"),
        (changed("deepspeed", value={"train_batch_size": 4}), "D003", "training.global_batch_size"),
    ],
    ids=lambda value: value if len(value) < 40 else "",
)
def test_a_mistake_is_named_and_nothing_is_written(run: Any, text: str, code: str, place: str) -> None:
    Path("spec.json").write_text(text, encoding="utf-8")
    done = run("spec.json", "-o", "plan")
    assert done.code == 1
    assert f"error[{code}" in done.err
    assert place in " ".join(done.err.split())
    assert done.out == ""
    assert not Path("plan").exists()


@pytest.mark.parametrize("command", [(), ("check",)])
def test_broken_syntax_is_shown_in_its_line(run: Any, command: tuple[str, ...]) -> None:
    Path("spec.json").write_text('{\n  "version": 1,\n  "model" {}\n}\n', encoding="utf-8")
    done = run(*command, "spec.json")
    assert done.code == 1
    assert ' 3 |   "model" {}' in done.out + done.err


def test_all_mistakes_are_reported_in_one_pass(run: Any) -> None:
    tree = json.loads(json.dumps(SPEC))
    tree["parallelism"] = {"tp": 3, "cp": 2, "dp": 4}
    tree["training"] = {"sequence_length": 18, "global_batch_size": 5, "precision": "fp23"}
    Path("spec.json").write_text(json.dumps(tree, indent=1), encoding="utf-8")
    done = run("spec.json", "-o", "plan")
    assert {code for code in ("W001", "T001", "B001", "C001", "K004") if f"error[{code}]" in done.err} == {
        "W001",
        "T001",
        "B001",
        "C001",
        "K004",
    }


def test_an_earlier_plan_stays_when_the_spec_breaks(run: Any) -> None:
    Path("spec.json").write_text(json.dumps(SPEC), encoding="utf-8")
    run("spec.json", "-o", "plan")
    before = {file: file.read_bytes() for file in Path("plan").rglob("*") if file.is_file()}
    Path("spec.json").write_text(changed("parallelism", "tp", value=3), encoding="utf-8")
    assert run("spec.json", "-o", "plan").code == 1
    assert {file: file.read_bytes() for file in Path("plan").rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read_is_exit_code_2(run: Any, name: str) -> None:
    done = run(name, "-o", "plan")
    assert done.code == 2
    assert name in done.err
    assert "Traceback" not in done.err


def test_an_output_that_cannot_be_written_is_exit_code_2(run: Any) -> None:
    Path("spec.json").write_text(json.dumps(SPEC), encoding="utf-8")
    Path("taken").write_text("a file", encoding="utf-8")
    done = run("spec.json", "-o", "taken/plan")
    assert done.code == 2
    assert "cannot be written" in done.err


DEEPSPEED = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}
MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}


@pytest.mark.parametrize("command", ["compile FILE -o plan", "estimate FILE", "diff spec.json FILE", "search FILE"])
@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (DEEPSPEED, "is of kind ds_config, not a spec: `parcompile import other.json`"),
        (MODEL, "is the configuration of a model, not a spec: `parcompile init other.json`"),
    ],
)
def test_the_file_of_another_tool_is_one_sentence(run: Any, command: str, tree: dict[str, Any], said: str) -> None:
    Path("spec.json").write_text(json.dumps(SPEC), encoding="utf-8")
    Path("other.json").write_text(json.dumps(tree), encoding="utf-8")
    done = run(*command.replace("FILE", "other.json").split())
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert f"Error: other.json {said}" in done.err


@pytest.mark.parametrize("arguments", [["--no-such-option"], ["groups"], ["spec.json", "--nonsense"]])
def test_wrong_usage_is_exit_code_2(run: Any, arguments: list[str]) -> None:
    assert run(*arguments).code == 2


def test_the_module_runs_and_imports_no_torch() -> None:
    code = (
        "import sys, parcompile, parcompile.cli, parcompile.pipeline, parcompile.plan; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    done = subprocess.run([sys.executable, "-m", "parcompile", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("parcompile ")


@pytest.mark.parametrize("name", ["plan.json", "ds_config.json", "launch/slurm.sbatch"])
def test_a_file_that_no_compilation_wrote_is_kept(run: Any, name: str) -> None:
    Path("spec.json").write_text(json.dumps(SPEC), encoding="utf-8")
    mine = Path("out", name)
    mine.parent.mkdir(parents=True)
    mine.write_text("mine", encoding="utf-8")
    done = run("spec.json", "-o", "out")
    assert done.code == 2
    why = "parcompile.lock.json of its folder does not list it, and it would be lost: move it"
    assert f"{name} cannot be written: {why}" in done.err
    assert [one for one in Path("out").rglob("*") if one.is_file()] == [mine]
    assert mine.read_text(encoding="utf-8") == "mine"
    mine.unlink()
    assert run("spec.json", "-o", "out").code == 0
    mine.write_text("edited", encoding="utf-8")  # what an earlier compilation wrote is written anew
    assert run("spec.json", "-o", "out").code == 0
    assert mine.read_text(encoding="utf-8") != "edited"


def test_what_runs_models_looks_for_garbage_as_python_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "run", lambda: gc.get_threshold()[0])
    monkeypatch.setattr(cli, "end", int)
    usual, before = cli._USUAL, gc.get_threshold()
    assert usual[0] < 100_000
    gc.set_threshold(*usual)
    try:
        cli.main()
        assert gc.get_threshold()[0] > usual[0]
        with cli.needing("runtime"):
            pass
        assert gc.get_threshold() == usual
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("seconds", ["1e99", "1e7", "0", "nan", "soon"])
@pytest.mark.parametrize(
    "command",
    [
        ["local", "spec.json", "--timeout"],
        ["prove", "--engine", "none.py", "--timeout"],
        ["preflight", "spec.json", "--live", "--wait"],
    ],
)
def test_seconds_that_no_operating_system_waits_are_a_mistake_of_usage(
    run: Any, command: list[str], seconds: str
) -> None:
    done = run(*command, seconds)
    assert (done.code, f"Invalid value for '{command[-1]}': " in done.err) == (2, True), done.err


def test_an_interruption_while_the_command_is_loaded_is_one_line(tmp_path: Path) -> None:
    # What a shell runs in the background ignores the signal.
    listens = "import os, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (tmp_path / "click.py").write_text(f"{listens}os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    way = "import sys; sys.path.insert(0, sys.argv.pop()); from parcompile.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", way, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "parcompile: interrupted\n")
