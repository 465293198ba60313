"""The figures of a run, beside what its plan predicted, read from the files of the run."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parcompile.doctor.metrics import MAX_BYTES, METRICS, RUN, WINDOW, read_metrics, usual
from parcompile.show.pictures import Subject
from parcompile.user_files import parse_json, read_bytes, read_text

WARM_UP = 3
"""Steps of a process whose times do not count: memory is still being allocated, files are still being read."""
FORMAT = 1
_MOST = 1e300
"""Figures above it are none: sums of them are no floats."""
Row = Mapping[str, float]


class NoRunError(ValueError):
    """A run cannot be read; the message is meant for the user."""


class Run(NamedTuple):
    """The rows of a run.

    `plans` are (after which step, hash), where run.json says it, and `devices` what each ran on ("cpu", "cuda").
    `damaged` are lines that are no rows, with what they are instead.
    """

    file: Path
    rows: Sequence[Row]
    damaged: Sequence[tuple[int, str]]
    plans: Sequence[tuple[int, str]]
    devices: Mapping[str, str]

    def of_plan(self, plan_hash: str) -> list[Row]:
        """The rows that ran under a plan; all where run.json does not say it."""
        if not self.plans:
            return list(self.rows)
        ends = [*(after for after, _ in self.plans[1:]), math.inf]
        spans = [(after, end) for (after, name), end in zip(self.plans, ends, strict=True) if name == plan_hash]
        return [row for row in self.rows if any(after < row["step"] <= end for after, end in spans)]


def read_run(path: Path) -> Run:
    """The run of a folder, or of a metrics.jsonl.

    Raises:
        NoRunError: there is none, it cannot be read, or it has no step.
    """
    file = path / METRICS if path.is_dir() else path
    if not file.exists():
        where = f"{path} holds no {METRICS}" if path.is_dir() else f"there is no {path}"
        raise NoRunError(f"{where}: name the folder that a run wrote {METRICS} to (--output), or that file")
    try:
        rows, damaged = read_metrics(read_bytes(file, MAX_BYTES).decode("utf-8", "replace"))
    except OSError as error:
        raise NoRunError(f"{file} cannot be read: {error.strerror}") from None
    if not rows:
        lines = f": none of its lines ({len(damaged):,}) is a JSON object with a step" if damaged else " yet"
        raise NoRunError(f"{file} holds no step{lines}")
    named = _plans(file.with_name(RUN))
    plans, devices = [one[:2] for one in named], {name: device for _, name, device in named}
    return Run(file, sorted(rows, key=lambda row: row["step"]), damaged, plans, devices)


def _plans(file: Path) -> list[tuple[int, str, str]]:
    if not file.exists():
        return []
    try:
        said = parse_json(read_text(file))["plans"]
        return [(int(one["after_step"]), str(one["plan"]), str(one.get("device", ""))) for one in said]
    except (OSError, ValueError, TypeError, KeyError):
        raise NoRunError(f"{file} does not name the plans of a run: remove it") from None


def figures(run: Run, subject: Subject | None) -> dict[str, Any]:
    """How the run went, as JSON: what is not known is left out, and predictions stand beside what was measured.

    Args:
        run: its rows.
        subject: the plan that it is compared with; times and memory are those of its rows.
    """
    rows = run.rows if subject is None else run.of_plan(subject.plan.plan_hash)
    size = 1 if subject is None else subject.plan.world_size
    found: dict[str, Any] = {
        "format": FORMAT,
        "run": str(run.file),
        "plan": None if subject is None else subject.plan.plan_hash,
        "steps": {"count": len(run.rows), "first": run.rows[0]["step"], "last": run.rows[-1]["step"]},
        "damaged_lines": [number for number, _ in run.damaged],
    }
    timed = rows[WARM_UP:] if len(rows) > 2 * WARM_UP else rows
    if subject is not None and (training := subject.plan.spec.training).rampup_batch_size is not None:
        # What is predicted is a step with the whole batch.
        whole = training.global_batch_size * training.sequence_length
        timed = [row for row in timed if row.get("tokens", whole) >= whole]
    found |= _measured("step_seconds", known_values(timed, "seconds"))
    rates = [value / size for value in known_values(timed, "tokens_per_s")]
    found |= _measured("tokens_per_second" + "_per_gpu" * (subject is not None), rates)
    found |= _measured("mfu", known_values(timed, "mfu"))
    peaks = [row for row in rows if _known(row, "memory_peak_bytes")]
    if peaks:
        most = max(peaks, key=lambda row: row["memory_peak_bytes"])
        rank = most.get("memory_peak_rank")
        found["memory_peak_bytes"] = {
            "largest": most["memory_peak_bytes"],
            "rank": None if rank is None or not math.isfinite(rank) else int(rank),
        }
    if subject is not None:
        _predict(found, subject)
        found["other_machine"] = subject.plan.spec.other_machine(run.devices.get(subject.plan.plan_hash))
    for name in ("loss", "gradient_norm", "lr"):
        points = [(int(row["step"]), row[name]) for row in run.rows if _known(row, name)]
        if points:
            least, most_ = min(points, key=lambda one: one[1]), max(points, key=lambda one: one[1])
            found[name] = {"first": points[0][1], "last": points[-1][1]}
            found[name] |= {"lowest": least[1], "lowest_step": least[0], "highest": most_[1], "highest_step": most_[0]}
    found["spikes"] = [one for name in ("loss", "gradient_norm") for one in _spikes(run.rows, name)]
    finite = ("loss", "gradient_norm")
    wrong = [int(row["step"]) for row in run.rows if not all(math.isfinite(row.get(name, 0.0)) for name in finite)]
    skipped = known_values(run.rows, "skipped_steps")
    found["skipped_steps"] = int(skipped[-1]) if skipped else 0
    found["nonfinite_steps"] = wrong
    found |= _slowest(rows) | _loads(rows)
    if refused := known_values(rows, "refused_choices"):
        found["refused_choices"] = {"median": statistics.median(refused), "last": refused[-1]}
    evaluated = [row for row in run.rows if "eval_loss" in row]
    held_out = [{name: row[name] for name in row if name == "step" or name.startswith("eval_")} for row in evaluated]
    shown = [{name: one[name] if math.isfinite(one[name]) else None for name in one} for one in held_out]
    return found | {"evaluations": shown}


def _known(row: Row, name: str) -> bool:
    """Whether a row has a figure that can be computed with."""
    return abs(row.get(name, math.nan)) < _MOST


def known_values(rows: Sequence[Row], name: str) -> list[float]:
    """The values of a figure that can be computed with."""
    return [row[name] for row in rows if _known(row, name)]


def _measured(name: str, values: Sequence[float]) -> dict[str, Any]:
    """The median, and the interval that 90 % of them are in."""
    if not values:
        return {}
    ranked = sorted(values)
    outside = math.floor(0.05 * (len(ranked) - 1))
    return {name: {"median": statistics.median(ranked), "low": ranked[outside], "high": ranked[-1 - outside]}}


def _predict(found: dict[str, Any], subject: Subject) -> None:
    """Puts what the plan predicts beside what was measured."""
    time, memory = subject.estimate.time, subject.estimate.memory
    predicted: dict[str, tuple[float, tuple[float, float] | None]] = {
        "step_seconds": (time.step.seconds, time.interval_seconds),
        "tokens_per_second_per_gpu": (time.tokens_per_second_per_gpu, None),
        "mfu": (time.utilisation, None),
        "memory_peak_bytes": (memory.peak.total_bytes, memory.interval_bytes),
    }
    for name, (value, interval) in predicted.items():
        if name in found:
            found[name]["predicted"] = value
            if interval is not None:
                found[name] |= {"predicted_low": interval[0], "predicted_high": interval[1]}


def _spikes(rows: Sequence[Row], name: str) -> list[dict[str, Any]]:
    """Steps whose loss or norm leaves what the steps before it show."""
    points = [(int(row["step"]), row[name]) for row in rows if _known(row, name)]
    bounds = usual([value for _, value in points])
    return [
        {"figure": name, "step": step, "value": value, "usual": middle}
        for (step, value), (middle, bound) in zip(points[WINDOW:], bounds, strict=True)
        if value > bound
    ]


def _slowest(rows: Sequence[Row]) -> dict[str, Any]:
    """The rank that was slowest most often, and by how much."""
    names = ("slowest_rank", "slowest_seconds", "fastest_seconds")
    told = [row for row in rows if all(_known(row, name) for name in names)]
    if not told:
        return {}
    ((rank, times),) = Counter(int(row["slowest_rank"]) for row in told).most_common(1)
    own = [row for row in told if row["slowest_rank"] == rank]
    seconds = {name: statistics.median(known_values(own, f"{name}_seconds")) for name in ("slowest", "fastest")}
    return {"slowest_rank": {"rank": rank, "times": times, "of": len(told), **seconds}}


def _loads(rows: Sequence[Row]) -> dict[str, Any]:
    """The layer whose fullest expert gets most, by the median over the run, and that of all layers."""
    layers: dict[int, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            figure, _, layer = name.partition("/")
            if figure == "router_load" and layer.isdecimal() and _known(row, name):
                layers.setdefault(int(layer), []).append(value)
    if not layers:
        return {}
    medians = {layer: statistics.median(values) for layer, values in layers.items()}
    fullest = max(medians, key=lambda one: medians[one])
    median = statistics.median(medians.values())
    return {"router_load": {"layer": fullest, "largest": medians[fullest], "median": median}}
