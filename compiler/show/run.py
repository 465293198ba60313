"""How a run went, beside what its plan predicted: what `parcompile report` says, read from the files of the run."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parcompile.diagnostics.reporters.dispatch import Style, hanging
from parcompile.doctor.metrics import MAX_BYTES, METRICS, RUN, WINDOW, read_metrics, usual
from parcompile.show.pictures.curves import spark
from parcompile.show.pictures.shapes import Subject
from parcompile.units import format_bytes, format_seconds
from parcompile.user_files import parse_json, read_bytes, read_text

WARM_UP = 3
"""Steps of a process whose times do not count: memory is still being allocated, files are still being read."""
FORMAT = 1
_MOST = 1e300
"""Figures above it are none: sums of them are no floats."""
Row = Mapping[str, float]


class NoRunError(ValueError):
    """A run cannot be read; the message is meant for the user."""


@dataclass(frozen=True, slots=True)
class Run:
    """The rows of a run.

    `plans` are (after which step, hash), where run.json says it, and `devices` what each ran on ("cpu", "cuda").
    `damaged` are lines that are no rows, with their beginnings.
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
    found |= _measured("step_seconds", _values(timed, "seconds"))
    rates = [value / size for value in _values(timed, "tokens_per_s")]
    found |= _measured("tokens_per_second" + "_per_gpu" * (subject is not None), rates)
    found |= _measured("mfu", _values(timed, "mfu"))
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
    skipped = _values(run.rows, "skipped_steps")
    found["skipped_steps"] = int(skipped[-1]) if skipped else 0
    found["nonfinite_steps"] = wrong
    found |= _slowest(rows) | _loads(rows)
    held_out = [
        {
            name: value if math.isfinite(value) else None
            for name, value in row.items()
            if name == "step" or _is_held(name)
        }
        for row in run.rows
        if "eval_loss" in row
    ]
    return found | {"evaluations": held_out}


def _is_held(name: str) -> bool:
    return name.startswith("eval_")


def _known(row: Row, name: str) -> bool:
    """Whether a row has a figure that can be computed with."""
    return abs(row.get(name, math.nan)) < _MOST


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if _known(row, name)]


def _measured(name: str, values: Sequence[float]) -> dict[str, Any]:
    """The median, and the interval that 90 % of them are in."""
    if not values:
        return {}
    ranked = sorted(values)
    ends = (ranked[math.floor(share * (len(ranked) - 1))] for share in (0.05, 0.95))
    low, high = ends
    return {name: {"median": statistics.median(ranked), "low": low, "high": high}}


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
    seconds = {name: statistics.median(_values(own, f"{name}_seconds")) for name in ("slowest", "fastest")}
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
    return {
        "router_load": {"layer": fullest, "largest": medians[fullest], "median": statistics.median(medians.values())}
    }


def text(run: Run, subject: Subject | None, note: str, style: Style) -> str:
    """One screen for a terminal. `note` says why there is no plan, or what is not known of it."""
    tree = figures(run, subject)
    rows = [(name, said) for name, said in described(tree, note) if said]
    lines = [style.paint(verdict(tree), "1"), ""]
    for name, said in rows:
        lines.append(hanging(f"{name:<14}", said, style.width))
        if name == "loss":
            losses = _values(run.rows, "loss")
            scale = "" if style.unicode else " (9 the highest)"
            lines.append(f"{'':<14}{spark(losses, style.width - 32, unicode=style.unicode)}{scale}")
    return "\n".join(lines) + "\n"


def verdict(tree: Mapping[str, Any]) -> str:
    """One line: whether steps took what was predicted, and what came of the loss."""
    steps, loss = tree["steps"], tree.get("loss")
    parts = [f"{steps['count']:,} step{'s' * (steps['count'] > 1)}"]
    word = "NOT COMPARED WITH A PLAN"
    if (taken := tree.get("step_seconds")) is not None:
        parts.append(f"{format_seconds(taken['median'])}/step")
        if "predicted_low" in taken:
            slow, fast = taken["median"] > taken["predicted_high"], taken["median"] < taken["predicted_low"]
            word = "SLOWER THAN PREDICTED" if slow else "FASTER THAN PREDICTED" if fast else "AS FAST AS PREDICTED"
            word = "PREDICTED FOR ANOTHER MACHINE" if tree["other_machine"] else word
    if loss is not None:
        parts.append(f"loss {loss['first']:.3f} to {loss['last']:.3f}")
    return " · ".join([word, *parts])


def described(tree: Mapping[str, Any], note: str = "") -> list[tuple[str, str]]:
    """Name and words of each figure that is known."""
    steps, plan = tree["steps"], tree["plan"]
    compared = f"; compared with plan {short(plan)}" if plan else ""
    rows = [("run", f"{tree['run']}: steps {steps['first']:,} to {steps['last']:,}{compared}")]
    rows += [("plan", note)] if note else []
    rows += [("machine", tree["other_machine"])] if tree.get("other_machine") else []
    rows.append(("step", _beside(tree.get("step_seconds"), format_seconds)))
    for name, unit in (
        ("tokens_per_second_per_gpu", "tokens/s per GPU"),
        ("tokens_per_second", "tokens/s of all GPUs"),
    ):
        if name in tree:
            rows.append(("throughput", f"{unit}: {_beside(tree[name], '{:,.0f}'.format)}"))
    rows.append(("MFU", _beside(tree.get("mfu"), "{:.1%}".format)))
    if (peak := tree.get("memory_peak_bytes")) is not None:
        rank = "" if peak["rank"] is None else f" on rank {peak['rank']}"
        rows.append(("memory peak", f"{format_bytes(peak['largest'])}{rank}{_predicted(peak, format_bytes)}"))
    if (loss := tree.get("loss")) is not None:
        lowest = f"lowest {loss['lowest']:.4f} at step {loss['lowest_step']:,}"
        rows.append(("loss", f"{loss['first']:.4f} at first, {loss['last']:.4f} at last, {lowest}"))
    if (norm := tree.get("gradient_norm")) is not None:
        largest = f"largest {norm['highest']:.3g} at step {norm['highest_step']:,}"
        rows.append(("norm", f"{norm['first']:.3g} at first, {norm['last']:.3g} at last, {largest}"))
    if (rate := tree.get("lr")) is not None:
        highest = f"highest {rate['highest']:.3g} at step {rate['highest_step']:,}"
        rows.append(("learning rate", f"{rate['first']:.3g} at first, {rate['last']:.3g} at last, {highest}"))
    rows.append(("spikes", _spikes_in_words(tree["spikes"])))
    wrong = tree["nonfinite_steps"]
    said = f"{tree['skipped_steps']:,} by the loss scale of fp16" if tree["skipped_steps"] else "none"
    said += f"; no finite loss or norm in {len(wrong):,}, first step {wrong[0]:,}" if wrong else ""
    rows.append(("skipped steps", said))
    if (slow := tree.get("slowest_rank")) is not None:
        own = f"{format_seconds(slow['slowest'])} of own work, the fastest {format_seconds(slow['fastest'])}"
        rows.append(("slowest rank", f"rank {slow['rank']}: {own}; slowest {slow['times']:,} of {slow['of']:,} times"))
    if (load := tree.get("router_load")) is not None:
        largest = f"fullest expert {load['largest']:.2f} × the mean in layer {load['layer']}"
        rows.append(("router load", f"{largest}, {load['median']:.2f} × in the middle of all layers"))
    return [*rows, *_evaluated(tree["evaluations"])]


def short(plan_hash: str) -> str:
    """As much of a plan's hash as tells it apart."""
    return plan_hash.removeprefix("sha256:")[:12]


def _beside(one: Mapping[str, float] | None, unit: Callable[[float], str]) -> str:
    if one is None:
        return ""
    return f"{unit(one['median'])} median, 90 % in {unit(one['low'])} to {unit(one['high'])}{_predicted(one, unit)}"


def _predicted(one: Mapping[str, float], unit: Callable[[float], str]) -> str:
    if "predicted" not in one:
        return ""
    ends = f", {unit(one['predicted_low'])} to {unit(one['predicted_high'])}" if "predicted_low" in one else ""
    return f"; predicted {unit(one['predicted'])}{ends}"


def _spikes_in_words(spikes: Sequence[Mapping[str, Any]]) -> str:
    names = {"loss": "loss", "gradient_norm": "norm"}
    shown = [
        f"step {one['step']:,}: {names[one['figure']]} {one['value']:.3g}, usual {one['usual']:.3g}"
        for one in spikes[:3]
    ]
    more = f"; {len(spikes) - 3:,} more" if len(spikes) > 3 else ""
    return "; ".join(shown) + more if shown else "none"


def _evaluated(evaluations: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The last evaluation, the lowest loss, and the last of each domain."""
    finite = [one for one in evaluations if one["eval_loss"] is not None]
    if not finite:
        return []
    last, lowest = finite[-1], min(finite, key=lambda one: one["eval_loss"])
    perplexity = f", perplexity {last['eval_perplexity']:,.4g}" if last.get("eval_perplexity") is not None else ""
    said = f"loss {last['eval_loss']:.4f}{perplexity} at step {last['step']:,}"
    rows = [("evaluation", f"{said}; lowest {lowest['eval_loss']:.4f} at step {lowest['step']:,}")]
    domains = [f"{name[10:]} {value:.4f}" for name, value in last.items() if name.startswith("eval_loss/") and value]
    return [*rows, ("", "; ".join(domains))] if domains else rows
