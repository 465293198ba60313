"""`examples/train.py`: its ranks are forked, since importing torch and DeepSpeed takes longer than what they do.

`test_readme.py` and `test_examples.py` start it as users do, with the deepspeed launcher.
"""

from __future__ import annotations

import json
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from launched import Ranks, run_forked, run_script
from transformers import AutoModelForCausalLM

from parcompile.backends.registry import render
from parcompile.backends.writing import write
from parcompile.pipeline import compile_file
from parcompile.runtime.checkpoint import export

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def train(folder: Path, *arguments: str) -> str:
    """What four ranks of the example say that end well."""
    codes, said = run_forked(folder, 4, EXAMPLES / "train.py", *arguments)
    assert codes == [0] * 4, said
    return said


def compiled(folder: Path, spec: str = "byte_llama.json") -> Path:
    """The example's plan."""
    plan, _ = compile_file(EXAMPLES / spec)
    assert plan is not None
    write(render(plan), folder)
    return folder


def metrics(folder: Path) -> list[dict[str, float]]:
    """Its whole lines; none where there is no file yet."""
    file = folder / "metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def stopped_after(step: int, folder: Path, *arguments: str) -> str:
    """What four ranks say of which rank 2 gets SIGUSR1 as soon as that step is in the metrics."""
    job = Ranks(folder, 4, run_script, str(EXAMPLES / "train.py"), *arguments)
    try:
        end = time.monotonic() + 600
        while len(metrics(folder)) < step:
            assert time.monotonic() < end, [job.text(rank) for rank in range(4)]
            time.sleep(0.02)
        job.signal(2, signal.SIGUSR1)
        assert job.end(within=600) == [75] * 4
        return "".join(map(job.text, range(4)))
    finally:
        job.kill()


def test_a_run_that_was_stopped_and_resumed_has_the_losses_of_the_uninterrupted_one(tmp_path: Path) -> None:
    plan = compiled(tmp_path / "plan")
    common = ("--plan", str(plan), "--checkpoint-every", "0", "--steps", "10", "--resume", "auto")
    parts = (*common, "--output", str(tmp_path / "parts"))
    train(tmp_path / "whole", *common, "--output", str(tmp_path / "whole"))
    said = stopped_after(2, tmp_path / "parts", *parts)
    assert said.count("parcompile: stopped by SIGUSR1: step ") == 1
    assert "Traceback" not in said
    done = len(metrics(tmp_path / "parts"))
    assert 2 <= done < 10
    train(tmp_path / "second", *parts)

    uninterrupted, resumed = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [row["step"] for row in resumed] == list(range(1, 11))
    for name in ("loss", "gradient_norm"):
        assert [row[name] for row in resumed] == [row[name] for row in uninterrupted]
    assert uninterrupted[-1]["loss"] < uninterrupted[0]["loss"] - 1
    assert (tmp_path / "whole" / "loss.svg").read_text(encoding="utf-8").startswith("<svg")


def test_the_same_script_trains_in_pipeline_stages(tmp_path: Path) -> None:
    plan = compiled(tmp_path / "plan", "byte_llama_stages.json")
    train(tmp_path / "ranks", "--plan", str(plan), "--steps", "6", "--output", str(tmp_path / "run"))
    losses = [row["loss"] for row in metrics(tmp_path / "run")]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5


def test_the_same_script_trains_experts_over_ranks_and_transformers_reads_them(tmp_path: Path) -> None:
    plan = compiled(tmp_path / "plan", "byte_mixtral.json")
    train(tmp_path / "ranks", "--plan", str(plan), "--steps", "6", "--output", str(tmp_path / "run"))
    losses = [row["loss"] for row in metrics(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.5
    export(tmp_path / "run" / "checkpoints", tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    ids = torch.tensor([list(b"experts over several ranks, each with an equal run of them")])
    with torch.no_grad():
        assert float(model(input_ids=ids, labels=ids).loss) < losses[0]


def test_a_wrong_number_of_ranks_is_one_clear_message(tmp_path: Path) -> None:
    plan = compiled(tmp_path / "plan")
    codes, said = run_forked(tmp_path, 2, EXAMPLES / "train.py", "--plan", str(plan), "--steps", "1")
    assert 0 not in codes
    assert said.count("parcompile: error: plan 'byte-llama' is for 4 ranks, this job has 2") == 1
    assert "Traceback" not in said


@pytest.mark.parametrize(("option", "value"), [("--steps", "-1"), ("--steps", "0"), ("--checkpoint-every", "-1")])
def test_an_odd_number_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["train.py", "--plan", "none", option, value])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / "train.py"))["arguments"]()
    assert stopped.value.code == 2
    assert f"{option} {value}: expected " in capsys.readouterr().err


def test_a_run_does_not_begin_anew_over_the_checkpoints_of_another(tmp_path: Path) -> None:
    plan = compiled(tmp_path / "plan")
    begun = ("--plan", str(plan), "--output", str(tmp_path / "run"), "--steps")
    train(tmp_path / "first", *begun, "2")
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    codes, said = run_forked(tmp_path, 4, EXAMPLES / "train.py", *begun, "1")
    assert 0 not in codes
    assert said.count(f"{tmp_path / 'run' / 'checkpoints'} holds checkpoints of an earlier run") == 1
    assert "go on with --resume, or name another --output" in said
    assert "Traceback" not in said
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before


def test_a_missing_checkpoint_is_one_clear_message(tmp_path: Path) -> None:
    plan = compiled(tmp_path / "plan")
    codes, said = run_forked(tmp_path, 4, EXAMPLES / "train.py", "--plan", str(plan), "--steps", "1", "--resume")
    assert 0 not in codes
    assert said.count("there is no checkpoint in") == 1
    assert "Traceback" not in said
