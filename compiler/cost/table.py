"""An estimate for people: a table, and bars of memory and time for each stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from parcompile.diagnostics.reporters import Style, hanging
from parcompile.layout.groups import Axis
from parcompile.units import GIB, format_bytes, format_seconds

from .flops import CONVENTION
from .footprint import HOPELESS, Footprint, is_safe
from .offload import host_text
from .step import Timing
from .workload import Workload

if TYPE_CHECKING:
    from .estimate import Estimate

_PLAIN = Style()
_COLOURS = {True: "1;32", False: "1;31", None: "1;33"}
MARKS = "█▓▒░#=+-"
PLAIN_MARKS = "#=*+-o.:"
BAR_WIDTH = 48
MOST_STAGES = 16
"""So many stages are drawn; of more, the first, the fullest and the last."""


def table(found: Estimate, style: Style = _PLAIN) -> str:
    """The whole estimate as text."""
    said = verdict(found.work, found.memory, found.time)
    lines = [style.paint(said, _COLOURS[found.memory.fits]), ""]
    lines += [hanging(f"{name:<14}", text, style.width) for name, text in _headlines(found, style)]
    for rows in (memory_rows(found.memory.peak.components), time_rows(found.time.step.parts, found.time.step.seconds)):
        lines += ["", *headed(rows, style)]
    if found.traffic:
        lines += ["", *headed(traffic_rows(found), style)]
    lines += ["", *memory_bars(found, unicode=style.unicode), *time_bars(found, unicode=style.unicode)]
    return "\n".join(lines) + "\n"


def headed(rows: list[str], style: Style) -> list[str]:
    """Rows of a table, the first of them emphasised."""
    return [style.strong(rows[0]), *rows[1:]]


def verdict(work: Workload, memory: Footprint, time: Timing) -> str:
    """One line: whether it fits, and how fast it is; or what takes the room."""
    size, limit, part = memory.peak.total_bytes, memory.limit_bytes, memory.peak.largest
    speed = f"{format_seconds(time.step.seconds)}/step · {time.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
    if limit is None or memory.probability is None:
        return (
            f"{format_bytes(size)} · {speed} · {_UNCHECKED if not work.names_machine else 'no limit of memory known'}"
        )
    close = abs(size - limit) < 0.02 * limit  # where the framework alone takes more than there is, it is 0
    needed, room, largest = (_gib(one, close=close) for one in (size, limit, memory.peak.components[part]))
    if is_safe(memory):
        return f"FITS · {needed} of {room} GiB · {speed}"
    if memory.probability < HOPELESS:
        word, chance = "DOES NOT FIT", ""
    else:
        word = "MAY NOT FIT" if memory.fits else "PROBABLY DOES NOT FIT"
        chance = f" · {memory.probability:.0%} likely to fit"
    return f"{word} · needs {needed} of {room} GiB{chance} · largest: {part} {largest}"


_UNCHECKED = "no accelerator named"


def _gib(size: float, *, close: bool) -> str:
    """Whole GiB, with as many digits more as a small or a close figure needs."""
    return f"{size / GIB:.1f}" if close or 1 * GIB <= size < 10 * GIB else f"{size / GIB:.{0 if size >= GIB else 3}f}"


def _headlines(found: Estimate, style: Style) -> Iterator[tuple[str, str]]:
    work, memory, time = found.work, found.memory, found.time
    sizes = " · ".join(f"{axis} {work.size(axis)}" for axis in (Axis.TP, Axis.CP, Axis.EP, Axis.PP, Axis.DP))
    yield (
        "layout",
        f"{sizes}, micro-batch {work.micro_batch} × {work.micro_batches}, recompute {work.recompute_text}"
        f"{', sequence parallel' if work.sequence_parallel else ''}",
    )
    if work.ep > 1:
        yield "experts", imbalance_text(work)
    if work.document_length is not None:
        yield (
            "documents",
            f"{work.document_length:,} tokens each, packed into sequences of {work.sequence_length:,}: "
            "a token attends within its document",
        )
    yield "parameters", f"{found.parameters.total:,} in all, {max(found.parameters.by_stage):,} on a rank"
    yield "memory", peak_text(memory)
    verdict = fit_text(work, memory)
    if verdict:
        yield "", style.paint(verdict, _COLOURS[memory.fits])
    if (host := host_text(work)) is not None:
        yield "host", host
    step, (fast, slow) = time.step, map(format_seconds, time.interval_seconds)
    yield "step", f"{format_seconds(step.seconds)}, 90 % interval {fast} to {slow}; {work.tokens_per_step:,} tokens"
    yield "throughput", f"{time.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, MFU {time.utilisation:.1%}"
    yield "", f"MFU by {CONVENTION}"
    if work.names_machine:
        yield "error", error_text(found)
    if found.budget is not None:
        price = "" if found.budget.cost is None else f", cost {found.budget.cost:,.0f}"
        yield (
            "budget",
            f"{found.budget.tokens:,.0f} tokens: {found.budget.steps:,} steps, {found.budget.days:.2f} days{price}",
        )


def error_text(found: Estimate) -> str:
    """What is uncertain, by whose framework it is, and how far the model is from those that were fitted."""
    own = found.work.framework == "deepspeed"
    what = "of time only: `parcompile preflight` counts memory" if own else "of memory and time"
    return f"{what}. {_distance(found)} (docs/accuracy.md)"


def _distance(found: Estimate) -> str:
    total, sizes = found.parameters.total, found.time.fitted_sizes
    if sizes is None:
        return "Which models the coefficients were fitted to is not known"
    small, large = sizes
    within = f"Errors grow with the distance from the models that were fitted, {small / 1e9:.1f}B to {large / 1e9:.1f}B"
    if small <= total <= large:
        return f"{within}: this one is between them"
    ratio, way = (total / large, "larger") if total > large else (small / total, "smaller")
    return f"{within}: this one is {ratio:.1f} times {way}"


def imbalance_text(work: Workload) -> str:
    """How unevenly experts are chosen in memory and time, and whether that was said or assumed."""
    if work.capacity_rows is not None:
        return f"each expert has {work.capacity_rows:,} rows of each rank: {work.imbalance:g} times balanced ones"
    if work.expert_imbalance is None:
        return "assumes balanced experts; `estimate --expert-imbalance` takes another share of the busiest ep rank"
    return f"the busiest ep rank computes {work.imbalance:g} times the mean of all rows (given)"


def peak_text(memory: Footprint) -> str:
    """The fullest rank, its interval and its largest part."""
    peak = memory.peak
    low, high = (format_bytes(size, peak.total_bytes) for size in memory.interval_bytes)
    return (
        f"{format_bytes(peak.total_bytes)} on rank {peak.rank} (stage {peak.stage}), 90 % interval {low} to {high}; "
        f"the largest part is {peak.largest}"
    )


def fit_text(work: Workload, memory: Footprint) -> str:
    """Whether it fits into what is usable, and how likely; nothing where the host's memory decides."""
    if not work.names_machine:
        return "no accelerator is named: whether it fits is not checked"
    if memory.limit_bytes is None or memory.probability is None:
        return ""
    limit = format_bytes(memory.limit_bytes)
    if memory.fits:
        return f"fits into {limit} usable of {work.machine.name} with probability {memory.probability:.0%}"
    return f"does not fit into {limit} usable of {work.machine.name}: probability {memory.probability:.0%}"


def memory_rows(components: Mapping[str, float]) -> list[str]:
    """The components of a rank's memory with their shares."""
    total = sum(components.values())
    rows = [(name, format_bytes(size, total), f"{size / total:.0%}") for name, size in components.items() if size]
    return columns([("memory of that rank", "", ""), *rows])


def time_rows(parts: Mapping[str, float], total: float) -> list[str]:
    """The parts of a step with their shares."""
    rows = [(name, format_seconds(seconds), f"{seconds / total:.0%}") for name, seconds in parts.items() if seconds]
    return columns([("time of a step", "", ""), *rows])


def traffic_rows(found: Estimate) -> list[str]:
    """What a rank sends in a step, by group."""
    from .estimate import GRADIENTS

    rows = [("group", "operation", "messages", "sent", "link", "exposed")]
    for one in found.traffic:
        first, *more = one.operation.split(" + ")
        rows.append(
            (
                one.group,
                first,
                "buckets" if one.group in GRADIENTS else f"{one.messages:,}",
                format_bytes(one.wire_bytes),
                f"{one.link.name} ({'network' if one.leaves_node else 'node'})",
                format_seconds(found.exposed_seconds(one.group)),
            )
        )
        # A line for each operation keeps the table within 80 columns.
        rows += [("", operation, "", "", "", "") for operation in more]
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with aligned columns."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def memory_bars(found: Estimate, *, unicode: bool = True) -> list[str]:
    """For each stage a bar of its memory by component."""
    marks = MARKS if unicode else PLAIN_MARKS
    stages = found.memory.stages
    names = [name for name in stages[0].components if any(stage.components[name] for stage in stages)]
    groups = _grouped(names)
    scale = max([stage.total_bytes for stage in stages] + [found.memory.limit_bytes or 0])
    legend = ", ".join(f"{mark} {name}" for mark, name in zip(marks, groups, strict=False))
    lines = [hanging(f"memory by stage, {format_bytes(scale)} wide: ", legend, 80)]
    for index in _shown(len(stages), found.memory.peak.stage):
        stage = stages[index]
        bar = ""
        for mark, members in zip(marks, groups.values(), strict=False):
            bar += mark * round(BAR_WIDTH * sum(stage.components[name] for name in members) / scale)
        lines.append(f"{index:>5} |{bar[:BAR_WIDTH].ljust(BAR_WIDTH)}| {format_bytes(stage.total_bytes)}")
    return lines


def time_bars(found: Estimate, *, unicode: bool = True) -> list[str]:
    """For each stage a bar of its busy time for one micro-batch."""
    mark = (MARKS if unicode else PLAIN_MARKS)[0]
    times = found.time.step.stages
    longest = max(times) or 1.0
    lines = [f"time by stage and micro-batch, {format_seconds(longest)} wide"]
    for index in _shown(len(times), found.memory.peak.stage):
        bar = mark * round(BAR_WIDTH * times[index] / longest)
        lines.append(f"{index:>5} |{bar.ljust(BAR_WIDTH)}| {format_seconds(times[index])}")
    return lines


def _grouped(names: Sequence[str]) -> dict[str, list[str]]:
    """Components that a bar draws as one."""
    groups = {
        "weights": ["weights", "gathered weights"],
        "gradients": ["gradients", "reduce bucket"],
        "optimizer": ["master weights", "optimizer state", "optimizer step"],
        "activations": ["activations", "pipeline buffers"],
        "logits": ["logits"],
        "framework": ["framework"],
    }
    kept = {name: [one for one in members if one in names] for name, members in groups.items()}
    return {name: members for name, members in kept.items() if members}


def _shown(count: int, fullest: int) -> list[int]:
    if count <= MOST_STAGES:
        return list(range(count))
    return sorted({0, 1, fullest, count - 2, count - 1})
