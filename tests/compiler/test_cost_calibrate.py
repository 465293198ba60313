"""`parcompile calibrate`, on runs that are made up from known coefficients."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from layout_cases import spec_tree
from published_runs import balanced_stages, nanotron_models

from parcompile.cli import main
from parcompile.cost.calibration import fit_time, quantiles, usable
from parcompile.cost.coefficients import KEEPING, MEMORY, TIME, coefficient_sets, time_bounds
from parcompile.cost.footprint import peak_bytes
from parcompile.cost.measurements import Measurement, crashed_of_memory, read_plain
from parcompile.cost.memory import static_terms
from parcompile.cost.memory_terms import memory_terms
from parcompile.cost.step import step_seconds, step_terms
from parcompile.cost.workload import Workload
from parcompile.machines import Measured, find_accelerator

Run = Callable[..., tuple[int, str, str]]
COLUMNS = [
    *("model", "nodes", "gpus_per_node", "accelerator", "sequence_length", "micro_batch", "micro_batches"),
    *("tp", "dp", "sequence_parallel", "framework", "peak_bytes", "step_seconds"),
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["parcompile", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return call


def write(path: Path, factor: float = 1.0) -> None:
    """Runs as the stored coefficients of nanotron predict them, times a factor."""
    stored = coefficient_sets()["nanotron-h100"]
    assert stored.memory is not None
    assert stored.time is not None
    rows = []
    for model in ("llama-3-8b", "llama-2-13b"):
        for tp in (1, 2, 4, 8):
            for micro in (1, 2, 4):
                sizes = [model, 2, 8, "h100-sxm", 4096, micro, 32 // micro, tp, 16 // tp, tp > 1, "nanotron"]
                rows.append(dict(zip(COLUMNS, [*sizes, "", ""], strict=True)))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    for row, one in zip(rows, read_plain(path), strict=True):
        row["peak_bytes"] = factor * peak_bytes(one.work, memory_terms(one.work), stored.memory.values, keeps=True)
        row["step_seconds"] = factor * step_seconds(step_terms(one.work), stored.time.values)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def test_runs_of_one_model_predict_those_of_another(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "runs.csv")
    code, out, _ = run(
        "calibrate", "runs.csv", "--fit-model", "llama-3-8b", "--judge-model", "llama-2-13b", "-o", "own.json"
    )
    assert code == 0
    assert "on rows that were not fitted" in out
    stored = json.loads(Path("own.json").read_text(encoding="utf-8"))["sets"]["own"]
    assert stored["provenance"] == "runs.csv, llama-3-8b"
    assert stored["memory"]["mean_absolute_error"] < 0.02
    assert stored["time"]["mean_absolute_error"] < 0.05
    for part, table in (("memory", {**MEMORY, **KEEPING}), ("time", TIME)):
        for name, value in stored[part]["values"].items():
            assert table[name].low - 1e-9 <= value <= table[name].high + 1e-9


def test_the_result_is_used_by_estimate(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "runs.csv", factor=1.2)
    assert run("calibrate", "runs.csv", "-o", "own.json")[0] == 0
    training = {"sequence_length": 4096, "global_batch_size": 64}
    spec = {"version": 1, "model": {"preset": "llama-3-8b"}, "cluster": {"gpus_per_node": 8}, "training": training}
    Path("spec.json").write_text(json.dumps(spec), encoding="utf-8")
    plain, own = (
        json.loads(run("estimate", "spec.json", "--format", "json", *more)[1])["time"]["step_seconds"]
        for more in ((), ("--coefficients", "own.json"))
    )
    assert own == pytest.approx(1.2 * plain, rel=0.1)


def test_what_is_fitted_is_not_judged(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "runs.csv")
    code, _, err = run("calibrate", "runs.csv", "--fit-model", "llama-3-8b", "--judge-model", "llama-3-8b")
    assert code == 2
    assert "fitted and judged" in err


def test_what_a_command_reads_is_not_replaced_by_what_it_writes(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "runs.csv")
    (tmp_path / "spec.json").write_text(json.dumps(spec_tree()), encoding="utf-8")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1}}', encoding="utf-8")
    run("compile", "spec.json", "-o", "plan")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for line in (
        "calibrate runs.csv -o ./runs.csv",
        "view plan --format html -o plan/plan.json",
        "view spec.json --format md -o spec.json",
        "import ds.json -o ds.json",
    ):
        code, _, err = run(*line.split())
        assert (code, "is what this command reads, and would be lost: name another file" in err) == (2, True), line
    assert "spec.json does not end in .svg" in run("estimate", "spec.json", "--plot", "spec.json")[2]
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_file_that_cannot_be_used_is_refused_with_the_reason(run: Run, tmp_path: Path) -> None:
    (tmp_path / "wrong.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    code, _, err = run("calibrate", "wrong.csv")
    assert code == 2
    assert "columns model, nodes" in err
    write(tmp_path / "runs.csv")
    good = (tmp_path / "runs.csv").read_text(encoding="utf-8")
    for old, new, why in (("h100-sxm", "h101", "no accelerator 'h101'"), (",8,", ",8.5,", "a whole number")):
        (tmp_path / "wrong.csv").write_text(good.replace(old, new, 1), encoding="utf-8")
        code, _, err = run("calibrate", "wrong.csv")
        assert code == 2
        assert "wrong.csv: line 2: " in err
        assert why in err
    header, first, *_ = good.splitlines()
    row = dict(zip(header.split(","), first.split(","), strict=True), tp="62")
    (tmp_path / "wrong.csv").write_text(f"{header}\n{','.join(row.values())}\n", encoding="utf-8")
    assert "wrong.csv: line 2: 32 units on tp 62" in run("calibrate", "wrong.csv")[2]
    for name, value, why in (
        ("recompute", "slective", "line 2: recompute is 'slective'"),
        ("step_seconds", "1e-320", "wrong.csv cannot be fitted: "),
    ):
        rows = list(csv.DictReader(io.StringIO(good)))
        with (tmp_path / "wrong.csv").open("w", encoding="utf-8", newline="") as stream:
            table = csv.DictWriter(stream, {**rows[0], name: value})
            table.writeheader()
            table.writerows([{**rows[0], name: value}, *rows[1:]])
        _, _, err = run("calibrate", "wrong.csv")
        assert why in err
        assert "Warning" not in err
    (tmp_path / "own.json").write_text("{}", encoding="utf-8")
    (tmp_path / "spec.json").write_text("{}", encoding="utf-8")
    assert "was not written by parcompile calibrate" in run("estimate", "spec.json", "--coefficients", "own.json")[2]


def test_stages_are_cut_where_their_share_of_the_cost_is_passed() -> None:
    shape = nanotron_models()["1B"]
    counts = {pp: [len(stage.layers) for stage in balanced_stages(shape, pp)] for pp in (2, 4, 8)}
    assert counts == {2: [11, 5], 4: [6, 5, 5, 0], 8: [3, 3, 2, 3, 2, 3, 0, 0]}
    assert [stage.has_head for stage in balanced_stages(shape, 8)].index(True) == 6


RUN = Workload(nanotron_models()["1B"], 1, 8, "h100-sxm", 4096, 1, 8, dp=8, framework="nanotron")


def test_a_stage_that_nanotron_leaves_without_layers_takes_no_states() -> None:
    split = replace(RUN, pp=8, dp=1, stage_layers=balanced_stages(RUN.shape, 8))
    assert static_terms(split, split.stages[-1], split.stage_parameters(split.stages[-1])) == (0, 0, 0, 0)
    assert memory_terms(split)


def measured(micro: int, *, seconds: float | None) -> Measurement:
    return Measurement("1B", replace(RUN, micro_batch=micro), None if seconds is None else 1.0, seconds)


def test_a_crash_below_a_micro_batch_that_ran_is_not_of_memory() -> None:
    rows = [measured(1, seconds=None), measured(2, seconds=1.0), measured(4, seconds=None)]
    assert [one.work.micro_batch for one in crashed_of_memory(rows)] == [4]


def test_only_layouts_that_somebody_would_use_are_judged_for_time() -> None:
    # Of steps with 2 and 4 times as many tokens, one takes 1.9 times as long for each token, one 2.1 times.
    rows = [measured(1, seconds=1.0), measured(2, seconds=3.8), measured(4, seconds=8.4)]
    assert [one.step_seconds for one in usable(rows)] == [1.0, 3.8]


def test_quantiles_enclose_the_middle() -> None:
    low, middle, high = quantiles([index / 100 for index in range(101)])
    assert middle == 0.5
    assert low <= 0.05
    assert high >= 0.95


def test_without_scipy_what_to_install_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "runs.csv")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run("calibrate", "runs.csv")
    assert code == 2
    assert "pip install " in err and "[calibrate]" in err


def test_a_measured_machine_is_fitted_near_its_own_rates() -> None:
    known = find_accelerator("h100-sxm")
    machine = replace(known, measured=Measured(attention_flops_per_s=0.4 * known.flops_per_s, layer_seconds=5e-3))
    here = [replace(RUN, preset=machine, micro_batch=micro) for micro in (1, 2, 4, 8, 16)]
    # Its products run at all of the measured rate: more than a share of a peak is allowed to be.
    truth = {name: one.start for name, one in time_bounds(here[0]).items()}
    rows = [Measurement("1B", work, 1.0, step_seconds(step_terms(work), truth)) for work in here]
    found = fit_time(rows)
    assert truth["matmul"] > TIME["matmul"].high
    assert found.values["matmul"] == pytest.approx(1.0, rel=0.02)
    assert found.values["launch_seconds"] == pytest.approx(5e-3, rel=0.02)
    assert found.mean_absolute_error < 1e-3
