"""`parcompile report`: how a run went beside its plan, from files that are whole, damaged or empty."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page, find_browser
from layout_cases import compile_tree, spec_tree

from parcompile.backends.artefacts import to_text
from parcompile.cli import main
from parcompile.cost.estimate import estimate
from parcompile.doctor.metrics import usual
from parcompile.plan import Plan, plan_tree
from parcompile.show.page.run_page import run_page
from parcompile.show.pictures import Line, Subject
from parcompile.show.pictures.curves import draw, spark
from parcompile.show.run import figures, read_run
from parcompile.spec.values import workload_of

STEPS, SPIKE_STEP = 40, 30
Report = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return compile_tree(spec_tree(parallelism={"tp": 2}), tmp_path)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Report:
    def run(*line: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["parcompile", "report", *map(str, line)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def row(step: int, predicted: float) -> dict[str, Any]:
    """Of a run whose steps take 1.01 to 1.40 times what was predicted."""
    seconds = predicted * (1 + 0.01 * (step if step > 3 else 500))
    found: dict[str, Any] = {"step": step, "loss": 8.0 - step / 10, "gradient_norm": 1.0, "lr": 1e-3 * step / STEPS}
    found |= {"seconds": seconds, "tokens_per_s": 8000 / seconds, "mfu": 0.5 / (1 + 0.01 * step), "skipped_steps": 2}
    if step == SPIKE_STEP:
        found["gradient_norm"] = 7.5
    if step == 35:
        found["gradient_norm"] = None
    if step in (3, 11, 21, 31):
        found |= {"memory_peak_bytes": 2**30 + step, "memory_peak_rank": 5, "slowest_rank": 6 if step > 3 else 1}
        found |= {"slowest_seconds": 0.5, "fastest_seconds": 0.25, "router_load/1": 1.5, "router_load/3": 2.25}
        found |= {"refused_choices": 0.125}
    if step in (20, 40):
        found |= {"eval_loss": 7.0, "eval_perplexity": math.exp(7.0) + step, "eval_loss/news": 6.5 + step / 100}
    return found


def write_run(folder: Path, plan: Plan, *, names: list[dict[str, Any]] | None = None) -> None:
    folder.mkdir()
    predicted = estimate(workload_of(plan.spec)).time.step.seconds
    lines = [json.dumps(row(step, predicted)) + "\n" for step in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    plans = [{"after_step": 0, "plan": plan.plan_hash, "world_size": 8}] if names is None else names
    (folder / "run.json").write_text(json.dumps({"format": 1, "plans": plans}), encoding="utf-8")


def test_figures_stand_beside_those_of_the_estimate(tmp_path: Path, plan: Plan, report: Report) -> None:
    write_run(tmp_path / "run", plan)
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "plan.json").write_text(to_text(plan_tree(plan)), encoding="utf-8")
    code, said, _ = report(tmp_path / "run", "--format", "json")
    found, expected = json.loads(said), estimate(workload_of(plan.spec))
    assert code == 0
    rows = [row(step, expected.time.step.seconds) for step in range(4, STEPS + 1)]
    seconds = found["step_seconds"]
    # The first three steps, which took six times as long, do not count.
    assert seconds["median"] == pytest.approx(statistics.median(one["seconds"] for one in rows))
    assert (seconds["low"], seconds["high"]) == (pytest.approx(rows[1]["seconds"]), pytest.approx(rows[35]["seconds"]))
    low, high = expected.time.interval_seconds
    assert [seconds[f"predicted{end}"] for end in ("", "_low", "_high")] == [expected.time.step.seconds, low, high]
    rates = statistics.median(one["tokens_per_s"] / plan.world_size for one in rows)
    assert found["tokens_per_second_per_gpu"]["median"] == pytest.approx(rates)
    assert found["tokens_per_second_per_gpu"]["predicted"] == expected.time.tokens_per_second_per_gpu
    assert found["mfu"]["predicted"] == expected.time.utilisation
    assert found["memory_peak_bytes"]["largest"] == 2**30 + 31
    assert found["memory_peak_bytes"]["predicted"] == expected.memory.peak.total_bytes
    assert found["spikes"] == [{"figure": "gradient_norm", "step": SPIKE_STEP, "value": 7.5, "usual": 1.0}]
    assert (found["skipped_steps"], found["nonfinite_steps"]) == (2, [35])
    assert found["slowest_rank"] == {"rank": 6, "times": 3, "of": 4, "slowest": 0.5, "fastest": 0.25}
    assert found["router_load"] == {"layer": 3, "largest": 2.25, "median": 1.875}
    assert found["refused_choices"] == {"median": 0.125, "last": 0.125}
    assert [one["step"] for one in found["evaluations"]] == [20, 40]
    assert found["loss"] == {
        "first": 7.9,
        "last": 4.0,
        "lowest": 4.0,
        "lowest_step": 40,
        "highest": 7.9,
        "highest_step": 1,
    }


def test_steps_of_a_batch_that_still_grows_are_not_compared(tmp_path: Path, plan: Plan, report: Report) -> None:
    ramp = {"start": 8, "increment": 8, "samples": 100}
    plan = compile_tree(spec_tree(training={"global_batch_size": 16, "rampup_batch_size": ramp}), tmp_path)
    write_run(tmp_path / "run", plan)
    file, whole = tmp_path / "run" / "metrics.jsonl", plan.spec.training
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    for one in rows:
        batch = 8 if one["step"] <= 20 else whole.global_batch_size
        one |= {"tokens": batch * whole.sequence_length, "seconds": one["seconds"] if batch > 8 else 1e-3}
    file.write_text("".join(json.dumps(one) + "\n" for one in rows), "utf-8")
    seconds = figures(read_run(tmp_path / "run"), Subject.of(plan))["step_seconds"]
    assert seconds["low"] >= rows[20]["seconds"]


def test_one_screen_of_80_columns_says_how_the_run_went(tmp_path: Path, plan: Plan, report: Report) -> None:
    write_run(tmp_path / "r", plan)
    (tmp_path / "plan.json").write_text(to_text(plan_tree(plan)), encoding="utf-8")
    code, said, err = report(tmp_path / "r", "--plan", tmp_path / "plan.json")
    lines = said.replace(str(tmp_path), "").splitlines()
    assert (code, err) == (0, "")
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("AS FAST AS PREDICTED")
    for text in (
        "1.00 GiB on rank 5; predicted",
        "7.9000 at first, 4.0000 at last",
        "step 30: norm 7.5, usual 1",
        "2 by the loss scale of fp16; no finite loss or norm in 1, first step 35",
        "rank 6: 500 ms of own work, the fastest 250 ms; slowest 3 of 4 times",
        "fullest expert 2.25",
        "loss 7.0000, perplexity 1,137 at step 40; lowest 7.0000 at step 20",
        "news 6.9000",
    ):
        assert text in " ".join(" ".join(lines).split()), text


def test_the_verdict_says_when_steps_are_outside_of_the_interval(tmp_path: Path, plan: Plan, report: Report) -> None:
    (tmp_path / "plan.json").write_text(to_text(plan_tree(plan)), encoding="utf-8")
    low, high = estimate(workload_of(plan.spec)).time.interval_seconds
    file = tmp_path / "metrics.jsonl"
    for seconds, word in ((1.1 * high, "SLOWER THAN"), (0.9 * low, "FASTER THAN"), (0.9 * high, "AS FAST AS")):
        file.write_text(json.dumps({"step": 1, "seconds": seconds}) + "\n", encoding="utf-8")
        assert report(file, "--plan", tmp_path / "plan.json")[1].startswith(f"{word} PREDICTED"), word


@pytest.mark.parametrize(
    ("accelerator", "device", "said"),
    [
        ("cpu", "cpu", "predictions are of the preset cpu, which is not this machine"),
        ("h100-sxm", "cpu", "the run was on CPUs, and predictions are of h100-sxm"),
        (None, "cuda", "the spec names no accelerator, and predictions are of h100-sxm"),
        ("h100-sxm", "cuda", None),
        ("h100-sxm", None, None),
    ],
)
def test_a_run_on_another_machine_than_the_predicted_one_is_not_called_slow(
    tmp_path: Path, report: Report, accelerator: str | None, device: str | None, said: str | None
) -> None:
    tree = spec_tree(cluster={"accelerator": accelerator})
    if accelerator is None:
        del tree["cluster"]["accelerator"]
    plan = compile_tree(tree, tmp_path)
    write_run(
        tmp_path / "run",
        plan,
        names=[{"after_step": 0, "plan": plan.plan_hash, **({"device": device} if device else {})}],
    )
    (tmp_path / "plan.json").write_text(to_text(plan_tree(plan)), encoding="utf-8")
    shown = report(tmp_path / "run")[1]
    assert shown.startswith("PREDICTED FOR ANOTHER MACHINE · 40 steps" if said else "AS FAST AS PREDICTED")
    other = json.loads(report(tmp_path / "run", "--format", "json")[1])["other_machine"]
    assert other is None if said is None else other.startswith(said) and other in " ".join(shown.split())


def test_of_a_run_in_two_layouts_each_is_compared_with_its_own_steps(
    tmp_path: Path, plan: Plan, report: Report
) -> None:
    other = compile_tree(spec_tree(parallelism={"tp": 4}), tmp_path)
    names = [{"after_step": 0, "plan": other.plan_hash}, {"after_step": 30, "plan": plan.plan_hash}]
    write_run(tmp_path / "run", plan, names=names)
    file, medians = tmp_path / "plan.json", []
    for one in (plan, other):
        file.write_text(to_text(plan_tree(one)), encoding="utf-8")
        medians.append(
            json.loads(report(tmp_path / "run", "--plan", file, "--format", "json")[1])["step_seconds"]["median"]
        )
    predicted = estimate(workload_of(plan.spec)).time.step.seconds
    assert medians[0] == pytest.approx(predicted * 1.37)  # steps 34 to 40
    assert medians[1] == pytest.approx(predicted * 1.17)  # steps 4 to 30


def test_a_damaged_line_is_named_and_the_rest_is_used(tmp_path: Path, plan: Plan, report: Report) -> None:
    write_run(tmp_path / "run", plan)
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    lines[6] = lines[6][:40]
    lines[8] = '["step"]'
    file.write_text("\n".join(lines) + '\n{"step": 41, "lo', encoding="utf-8")
    code, said, err = report(tmp_path / "run", "--format", "json")
    assert code == 0
    assert [line.partition(": '")[0] for line in err.splitlines()] == [
        f"{file}:{number} is no row of metrics, whose step is a whole number from 0 on" for number in (7, 9)
    ]
    assert json.loads(said)["damaged_lines"] == [7, 9]
    assert json.loads(said)["steps"] == {"count": 38, "first": 1, "last": 40}


def test_a_step_is_a_whole_number_from_0_on(tmp_path: Path, report: Report) -> None:
    (tmp_path / "run").mkdir()
    rows = "".join(
        f'{{"step": {one}, "loss": 1}}\n' for one in ("-3", "1.5", "true", '"2"', "null", "3.0", "1e999", "4")
    )
    (tmp_path / "run" / "metrics.jsonl").write_text(rows, encoding="utf-8")
    code, said, err = report(tmp_path / "run", "--format", "json")
    assert (code, len(err.splitlines())) == (0, 6)
    assert json.loads(said)["damaged_lines"] == [1, 2, 3, 4, 5, 7]
    assert json.loads(said)["steps"] == {"count": 2, "first": 3, "last": 4}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no metrics.jsonl: name the folder that a run wrote metrics.jsonl to (--output), or that file"),
        ("", "metrics.jsonl holds no step yet"),
        ("nothing\n", "metrics.jsonl holds no step: none of its lines (1) is a JSON object with a step"),
    ],
)
def test_a_run_that_cannot_be_read_is_refused_in_a_sentence(
    tmp_path: Path, report: Report, content: str | None, said: str
) -> None:
    (tmp_path / "run").mkdir()
    if content is not None:
        (tmp_path / "run" / "metrics.jsonl").write_text(content, encoding="utf-8")
    code, out, err = report(tmp_path / "run")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].endswith(said)
    assert "Traceback" not in err


def test_no_folder_another_plan_and_a_plan_that_is_missing_are_said(tmp_path: Path, plan: Plan, report: Report) -> None:
    code, _, err = report(tmp_path / "none")
    assert (code, err.startswith(f"Error: there is no {tmp_path / 'none'}: name the folder")) == (2, True)
    write_run(tmp_path / "run", plan)
    other = compile_tree(spec_tree(parallelism={"tp": 4}), tmp_path)
    (tmp_path / "plan.json").write_text(to_text(plan_tree(other)), encoding="utf-8")
    code, out, err = report(tmp_path / "run", "--plan", tmp_path / "plan.json")
    assert (code, out) == (2, "")
    names = [one.plan_hash.removeprefix("sha256:")[:12] for one in (other, plan)]
    assert f"plan.json is plan {names[0]}, and " in err
    assert f"metrics.jsonl is of plan {names[1]}: name that one" in err
    # The plan that lies beside the run is another one now: the rest is said without it.
    code, out, _ = report(tmp_path / "run")
    assert code == 0
    assert out.startswith("NOT COMPARED WITH A PLAN")
    assert f"plan {names[1]} does not lie beside the run" in " ".join(out.split())
    assert "predicted" not in out
    (tmp_path / "run" / "run.json").unlink()
    assert "there is no run.json; name the plan with --plan" in " ".join(report(tmp_path / "run")[1].split())
    said = " ".join(report(tmp_path / "run", "--plan", tmp_path / "plan.json")[1].split())
    assert "that this is the plan of the run is not known" in said
    (tmp_path / "run" / "run.json").write_text("[]", encoding="utf-8")
    code, _, err = report(tmp_path / "run")
    assert (code, "run.json does not name the plans of a run: remove it" in err) == (2, True)


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path, plan: Plan, report: Report) -> None:
    write_run(tmp_path / "run", plan)
    code, out, err = report(tmp_path / "run", "--page", tmp_path / "none" / "page.html")
    assert (code, out) == (2, "")
    assert "page.html cannot be written" in err


def test_a_page_takes_no_file_of_the_run(tmp_path: Path, plan: Plan, report: Report) -> None:
    write_run(tmp_path / "run", plan)
    metrics = tmp_path / "run" / "metrics.jsonl"
    before = metrics.read_text(encoding="utf-8")
    code, _, err = report(tmp_path / "run", "--page", metrics)
    assert (code, f"metrics.jsonl does not end in .html: write {metrics.with_suffix('.html')}" in err) == (2, True)
    assert "is a folder: name a file in it" in report(tmp_path / "run", "--page", tmp_path)[2]
    assert metrics.read_text(encoding="utf-8") == before


def test_the_interval_of_few_steps_holds_their_median(tmp_path: Path, plan: Plan) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 8, "seconds": 0.5}\n{"step": 9, "seconds": 0.4}\n')
    found = figures(read_run(tmp_path), None)["step_seconds"]
    assert (found["low"], found["median"], found["high"]) == (0.4, 0.45, 0.5)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_draws_every_figure_and_fits_its_window(
    tmp_path: Path, plan: Plan, report: Report, width: int
) -> None:
    write_run(tmp_path / "run", plan)
    (tmp_path / "plan.json").write_text(to_text(plan_tree(plan)), encoding="utf-8")
    file = tmp_path / "page.html"
    assert report(tmp_path / "run", "--page", file)[1].splitlines()[-1] == f"wrote {file}"
    text = file.read_text(encoding="utf-8")
    anchors = ("figures", "loss", "gradient_norm", "lr", "step_seconds", "mfu", "memory_peak_bytes", "slowest_rank")
    for anchor in (*anchors, "router_load"):
        assert f'<section id="{anchor}"' in text
        assert f'href="#{anchor}"' in text
    assert "eval loss/news" in text
    assert text.count("predicted, 90 % interval") == 4  # of time and memory, wide and narrow
    path = find_browser()
    if path is None:
        pytest.skip("no browser: the page was not opened")
    browser = Browser(path, tmp_path / "profile")
    try:
        shown = Page(browser, file, width=width)
        assert shown.value("document.documentElement.scrollWidth") <= width
        assert shown.complaints == []
    finally:
        browser.close()


def test_a_page_of_a_run_without_figures_still_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n', encoding="utf-8")
    text = run_page(read_run(tmp_path), None, "not known")
    assert "NOT COMPARED WITH A PLAN · 1 step" in text
    assert 'id="loss"' not in text


def test_a_curve_is_broken_where_it_is_not_finite_and_keeps_its_peaks() -> None:
    points = [(float(step), 9.0 if step == 777 else 1.0 + step % 2) for step in range(2000)]
    drawn = [
        one for one in draw("x", {"a": ("tp", points)}, 920).shapes if isinstance(one, Line) and one.stroke == "tp"
    ]
    assert len(drawn) < 600
    highest = min(min(one.y1, one.y2) for one in drawn)
    assert sum(min(one.y1, one.y2) == highest for one in drawn) == 2  # up to the peak, and down from it
    broken = [(0.0, 1.0), (1.0, math.nan), (2.0, 2.0), (3.0, 1.0)]
    lines = [
        one for one in draw("x", {"a": ("tp", broken)}, 920).shapes if isinstance(one, Line) and one.stroke == "tp"
    ]
    assert len(lines) == 1
    assert spark([1.0, math.nan, 3.0, 2.0], 10, unicode=False) == "094"
    assert spark([], 10, unicode=True) == ""


def test_a_value_is_unusual_by_what_stands_before_it() -> None:
    values = [1.0, 2.0] * 8 + [5.0, 7.0]
    assert [value > bound for value, (_, bound) in zip(values[16:], usual(values), strict=True)] == [False, True]


NAMES = ("loss", "lr", "seconds", "tokens_per_s", "mfu", "memory_peak_bytes", "memory_peak_rank", "slowest_rank")
OTHERS = (
    "slowest_seconds",
    "fastest_seconds",
    "router_load/1",
    "router_load/x",
    "eval_loss",
    "eval_loss/a",
    "skipped_steps",
)


@pytest.mark.parametrize("value", ["null", "Infinity", "-1e308", "1e308", "0", "true", "[]", '"x"'])
def test_odd_values_end_in_figures_or_in_nothing(tmp_path: Path, plan: Plan, report: Report, value: str) -> None:
    (tmp_path / "plan.json").write_text(to_text(plan_tree(plan)), encoding="utf-8")
    rows = [
        f'{{"step": {step}, ' + ", ".join(f'"{name}": {value}' for name in (*NAMES, *OTHERS)) + "}\n"
        for step in range(9)
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(rows), encoding="utf-8")
    code, said, err = report(file, "--plan", tmp_path / "plan.json", "--page", tmp_path / "page.html")
    assert (code, err) == (0, "")
    assert "9 steps" in said
    code, said, _ = report(file, "--format", "json")
    json.loads(said, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert code == 0
