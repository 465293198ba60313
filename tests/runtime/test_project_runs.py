"""Projects that `parcompile new` writes train, save, resume, export and generate, with the commands of their pages."""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import free_port
from test_training_files import write_model

from parcompile.runtime.run_log import read_rows

pytestmark = pytest.mark.ranks

GUIDE = Path(__file__).parents[2] / "docs" / "finetune.md"
TINY = {
    "--nodes 2 --gpus-per-node 8": "--gpus-per-node 1 --accelerator cpu",
    "--sequence-length 8192": "--sequence-length 64",
    "--lr 1e-5 --batch 64": "--lr 3e-2 --batch 2",
}
"""One process of a CPU, and fewer tokens: what several ranks compute together is proved elsewhere."""
Shell = Callable[[str, Path], str]


@pytest.fixture
def shell() -> Shell:
    pytest.importorskip("deepspeed", reason="the project trains: it needs the extra [runtime]")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

    def run(line: str, folder: Path) -> str:
        settings = {**environment, "MASTER_PORT": str(free_port())}
        done = subprocess.run(
            line, shell=True, cwd=folder, env=settings, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    return run


def losses(output: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)]


def test_a_new_project_trains(tmp_path: Path, shell: Shell) -> None:
    shell("parcompile new project", tmp_path)
    project = tmp_path / "project"
    spec = json.loads((project / "spec.json").read_text(encoding="utf-8"))
    spec["cluster"]["gpus_per_node"], spec["parallelism"] = 1, {}
    (project / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    shown = re.findall(r"^\$ (.*)$", (project / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert shown[:2] == ["parcompile check spec.json", "./run.sh --steps 20"]
    shell(shown[0], project)
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"held out {name} " * 50, encoding="utf-8")
    more = f"--eval-data {tmp_path}/one.txt --eval-data {tmp_path}/two.txt --eval-every 8 --prometheus output/run.prom"
    more += " --prompt 'def main' --new-tokens 8"
    found = losses(shell(f"{shown[1]} {more}", project))
    assert [step for step, _ in found] == list(range(1, 21))
    assert found[-1][1] < 0.8 * found[0][1]
    rows = read_rows(project / "output" / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval_perplexity/two" in row] == [8, 16, 20]
    assert rows[-1]["eval_loss"] < rows[7]["eval_loss"]
    texts = (project / "output" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [(row["step"], row["prompt"]) for row in map(json.loads, texts)] == [
        (step, "def main") for step in (8, 16, 20)
    ]
    assert "parcompile_lr " in (project / "output" / "run.prom").read_text(encoding="utf-8")
    assert (project / "output" / "run.json").is_file()


def test_the_guide_fine_tunes_from_weights_to_generation(tmp_path: Path, shell: Shell) -> None:
    page = GUIDE.read_text(encoding="utf-8")
    write_model(tmp_path / "Llama-3.1-8B-Instruct")
    files = dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', page, re.DOTALL))
    (tmp_path / "chats.jsonl").write_text(files["chats.jsonl"], encoding="utf-8")
    folder, output = tmp_path, ""
    for line in re.findall(r"^\$ (.*)$", page, re.MULTILINE):
        if line.startswith("cd "):
            folder = folder / line[3:]
            (folder / "generate.py").write_text(files["generate.py"], encoding="utf-8")
            continue
        for real, tiny in TINY.items():
            line = line.replace(real, tiny)
        output += shell(line, folder)
    found = losses(output)
    assert [step for step, _ in found] == list(range(1, 41))
    # The second run begins where the first one ended, not with new weights.
    assert found[20][1] < 0.9 * found[0][1]
    assert "2 conversations or documents" in output
    assert len((folder / "output" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 40
    assert '<line class="s-tp"' in (folder / "output" / "loss.svg").read_text(encoding="utf-8")
    assert (folder / "tuned" / "model.safetensors").read_bytes() == (
        folder / "exported" / "model.safetensors"
    ).read_bytes()
    assert (folder / "tuned" / "tokenizer.json").is_file()
    assert output.splitlines()[-1].startswith("2")  # the answer that it was taught


def test_what_would_end_a_run_late_is_refused_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="the project trains: it needs the extra [runtime]")
    template = (importlib.resources.files("parcompile.project") / "templates" / "train.py.txt").read_text("utf-8")
    script: dict[str, Any] = {"__name__": "train"}
    exec(compile(template, "train.py", "exec"), script)
    for name in ("checkpoints/latest", "tuned/config.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for line, said in (
        ([], "checkpoints holds checkpoints of an earlier run: continue it with --resume"),
        (["--resume", "--export", "tuned"], "--export tuned is not empty: name a new folder"),
        (["--resume", "--weights", "none"], "there is no folder none with weights"),
        (["--resume", "--eval-data", "a/x.txt", "--eval-data", "b/x.txt"], "--eval-data a/x.txt b/x.txt: figures"),
    ):
        monkeypatch.setattr(sys, "argv", ["train.py", *line])
        with pytest.raises(script["RunError"], match=said):
            script["check_folders"](script["arguments"]())
    monkeypatch.setattr(sys, "argv", ["train.py", "--checkpoint-every", "0"])
    with pytest.raises(SystemExit):
        script["arguments"]()
