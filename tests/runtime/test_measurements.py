"""What a run writes beside its plan, and that `parcompile calibrate` takes it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from training_runs import initial_model, make_plan, samples

from parcompile.backends.artefacts import to_text
from parcompile.backends.writing import write
from parcompile.cost.footprint import footprint
from parcompile.cost.measurements import read_plain
from parcompile.plan import load_plan, plan_tree
from parcompile.runtime.profiling.recorder import FIRST_WRITE, Recorder, peak_bytes, put_row
from parcompile.spec.values import workload_of

RUNS = 5
TRAINING = {"global_batch_size": 4, "micro_batch_size": 1}


def train_often(rank: int, folder: str) -> list[str]:
    """Several runs of one plan; the warnings that they gave."""
    from parcompile.runtime import initialize

    plan = load_plan(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(RUNS):
            engine, _, loader, _ = initialize(plan=folder, model=initial_model(plan), training_data=samples(plan))
            batches = iter(loader)
            for _ in range(FIRST_WRITE):
                engine.train_batch(batches)
        return [str(one.message) for one in caught if "measurements" in str(one.message)]


@pytest.mark.ranks
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_runs_leave_rows_that_calibrate_takes(axis: str, tmp_path: Path) -> None:
    plan = make_plan(2, {axis: 2}, training=TRAINING)
    folder = tmp_path / "plan"
    write({"plan.json": to_text(plan_tree(plan))}, folder)
    assert run_ranks(2, train_often, str(folder)) == [[], []]
    assert sorted(one.name for one in folder.iterdir()) == ["measurements.csv", "plan.json", "records"]

    rows = read_plain(folder / "measurements.csv")
    assert len(rows) == RUNS
    assert {replace(one.work, stage_layers=one.work.stages) for one in rows} == {workload_of(plan.spec)}
    assert all((one.step_seconds or 0) > 0 for one in rows)
    # A process with torch in it, and a tiny model.
    assert all(50 * 2**20 < (one.peak_bytes or 0) < 8 * 2**30 for one in rows)

    command = [sys.executable, "-m", "parcompile", "calibrate", "plan/measurements.csv", "-o", "own.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"memory: {RUNS} runs" in done.stdout
    assert f"time: {RUNS} runs" in done.stdout
    from parcompile.cli.profile import read_set

    fitted = read_set(tmp_path / "own.json").memory
    measured = sorted(one.peak_bytes or 0 for one in rows)[RUNS // 2]
    assert footprint(rows[0].work, fitted).peak.total_bytes == pytest.approx(measured, rel=0.1)


class Allocator:
    """A CUDA allocator: bytes that it has reserved, the most of them, and what of them is in use."""

    def __init__(self) -> None:
        self.used = self.reserved = self.peak = 0

    def take(self, size: int) -> None:
        self.used += size
        self.reserved = max(self.reserved, self.used)
        self.peak = max(self.peak, self.reserved)

    def empty_cache(self) -> None:
        self.reserved = self.used

    def reset_peak_memory_stats(self, _: torch.device) -> None:
        self.peak = self.reserved

    def max_memory_reserved(self, _: torch.device) -> int:
        return self.peak


def test_the_peak_on_a_gpu_is_that_of_training_not_of_building(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator()
    for name in ("empty_cache", "reset_peak_memory_stats", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, getattr(allocator, name))
    mesh: Any = SimpleNamespace(device=torch.device("cuda"))
    allocator.take(70)  # the model is built
    allocator.take(-60)
    Recorder(SimpleNamespace(step=None), mesh, Path("unused"))
    allocator.take(20)  # and trained
    assert peak_bytes(mesh.device) == 30


def test_steps_of_a_batch_that_still_grows_are_not_measured() -> None:
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), plan=make_plan(1, {}, training=TRAINING))
    engine = SimpleNamespace(step=lambda: None, batch=2, is_gradient_accumulation_boundary=lambda: True)
    engine.train_batch_size = lambda: engine.batch
    recorder = Recorder(engine, mesh, Path("unused"))
    for engine.batch in (2, 2, 2, 2, 2, 4, 4):
        engine.step()
    assert len(recorder._seconds) == 2


def row(run: str, **more: str) -> dict[str, str]:
    sizes = dict.fromkeys(("nodes", "gpus_per_node", "sequence_length", "micro_batch", "micro_batches"), "1")
    return {"model": "gpt2-xl", "accelerator": "cpu", **sizes, "run": run, **more}


def test_a_run_has_one_row_and_leaves_the_others_alone(tmp_path: Path) -> None:
    file = tmp_path / "measurements.csv"
    put_row(file, row("a", step_seconds="2"))
    put_row(file, row("b", step_seconds="3"))
    put_row(file, row("a", step_seconds="1", peak_bytes="5"))
    with file.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(one["run"], one["step_seconds"], one["peak_bytes"]) for one in rows] == [("b", "3", ""), ("a", "1", "5")]
    assert [one.name for one in tmp_path.iterdir()] == ["measurements.csv"]


def test_a_file_of_something_else_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "measurements.csv"
    file.write_text("date,rain\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no columns"):
        put_row(file, row("a"))
    assert file.read_text(encoding="utf-8") == "date,rain\n1,2\n"


def test_a_wrong_row_is_named_by_its_line(tmp_path: Path) -> None:
    from parcompile.cost.measurements import MeasurementError

    file = tmp_path / "runs.csv"
    put_row(file, row("a", hf_config=json.dumps({"model_type": "llama"})))
    with pytest.raises(MeasurementError, match=r"runs.csv: line 2: .*hidden_size"):
        read_plain(file)
