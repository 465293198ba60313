"""`examples/train.py`, started as users start it, with the deepspeed launcher, where that has a part in what is tested.

Elsewhere its ranks are forked: importing torch and DeepSpeed five times takes longer than what they do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from launched import run_forked
from ranks import free_port
from transformers import AutoModelForCausalLM

from parcompile.backends.artefacts import to_text
from parcompile.backends.writing import artefacts, write
from parcompile.pipeline import compile_file
from parcompile.runtime.checkpoint import export

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHER = Path(sys.executable).with_name("deepspeed")


def launch(
    ranks: int, *arguments: str, timeout: float = 600, meanwhile: Callable[[int], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the example in a session of its own, so that no rank outlives the test; `meanwhile` gets its process."""
    command = [str(LAUNCHER), "--num_gpus", str(ranks), "--master_port", str(free_port()), str(EXAMPLES / "train.py")]
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{LAUNCHER.parent}:{os.environ['PATH']}",
    }
    process = subprocess.Popen(
        [*command, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        if meanwhile is not None:
            meanwhile(process.pid)
        output, _ = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def train(folder: Path, *arguments: str) -> str:
    """What four ranks of the example say that end well."""
    codes, said = run_forked(folder, 4, EXAMPLES / "train.py", *arguments)
    assert codes == [0] * 4, said
    return said


def compiled(folder: Path, spec: str = "byte_llama.json") -> Path:
    """The example's plan."""
    plan, _ = compile_file(EXAMPLES / spec)
    assert plan is not None
    write({name: to_text(tree) for name, tree in artefacts(plan).items()}, folder)
    return folder


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def rank_of(launcher: int, rank: int) -> psutil.Process | None:
    """The process of a rank, once it runs."""
    for process in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if f"--local_rank={rank}" in process.cmdline():
                return process
    return None


def stop_after(step: int, folder: Path) -> Callable[[int], None]:
    """Sends SIGUSR1 to rank 2 as soon as that step is in the metrics."""

    def stop(launcher: int) -> None:
        end = time.monotonic() + 600
        while time.monotonic() < end:
            with contextlib.suppress(OSError, ValueError):
                if len(metrics(folder)) >= step:
                    process = rank_of(launcher, 2)
                    assert process is not None
                    return process.send_signal(signal.SIGUSR1)
            time.sleep(0.02)
        raise AssertionError("the run does not begin")

    return stop


def test_a_run_that_was_stopped_and_resumed_has_the_losses_of_the_uninterrupted_one(tmp_path: Path) -> None:
    plan = compiled(tmp_path / "plan")
    common = ("--plan", str(plan), "--checkpoint-every", "0", "--steps", "12", "--resume", "auto")
    parts = (*common, "--output", str(tmp_path / "parts"))
    train(tmp_path / "whole", *common, "--output", str(tmp_path / "whole"))
    first = launch(4, *parts, meanwhile=stop_after(2, tmp_path / "parts"))
    assert first.returncode == 75, first.stdout
    assert first.stdout.count("parcompile: stopped by SIGUSR1: step ") == 1
    assert "Traceback" not in first.stdout
    done = len(metrics(tmp_path / "parts"))
    assert 2 <= done < 12
    train(tmp_path / "second", *parts)

    uninterrupted, resumed = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [row["step"] for row in resumed] == list(range(1, 13))
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
    done = launch(2, "--plan", str(compiled(tmp_path)), "--steps", "1")
    assert done.returncode != 0
    assert done.stdout.count("parcompile: error: plan 'byte-llama' is for 4 ranks, this job has 2") == 1
    assert "Traceback" not in done.stdout


def test_a_missing_checkpoint_is_one_clear_message(tmp_path: Path) -> None:
    plan = compiled(tmp_path / "plan")
    codes, said = run_forked(tmp_path, 4, EXAMPLES / "train.py", "--plan", str(plan), "--steps", "1", "--resume")
    assert 0 not in codes
    assert said.count("there is no checkpoint to resume in") == 1
    assert "Traceback" not in said
