"""Markdown whose cells say what they were given, and the comment that a team wants under a change to a spec."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape

from parcompile.cost.estimate import Estimate, estimate
from parcompile.layout.groups import DENSE_AXES, Axis
from parcompile.plan import Plan
from parcompile.plan.diff import TITLES, ChangeKind, Difference, Resume, Resumption
from parcompile.plan.sections import topology
from parcompile.spec.values import workload_of
from parcompile.units import format_bytes, format_seconds

# Markdown whose cells say what they were given, whatever characters it holds.

_MARKUP = re.compile(r"([\\`*{}\[\]#|~@<>&]|\b_|_\b)")


def plain(text: object) -> str:
    """Text that means itself: nothing in it is markup, a mention, a link or a new line."""
    one_line = " ".join(str(text).split())
    # As entities: GitHub makes a mention of a backslashed @name all the same. A _ inside a word is no markup.
    return _MARKUP.sub(lambda found: f"&#{ord(found[1])};", one_line)


def table(rows: Sequence[Sequence[object]]) -> str:
    """A table; the first row is its head, and columns after the first are set to the right."""
    head, *rest = ([plain(cell) for cell in row] for row in rows)
    rule = ["---", *("---:" for _ in head[1:])]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rest))


def fenced(text: str) -> str:
    """Text as it stands, in a fence that it does not close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}\n"


def folded(title: str, body: str) -> str:
    """A part that opens on a click."""
    return f"<details>\n<summary>{escape(title)}</summary>\n\n{body.rstrip()}\n\n</details>\n"


# The comment that a team wants under a change to a spec, in Markdown.

_VERDICTS = {
    ChangeKind.NUMERICS: "**Another training**: the numbers of a step change.",
    ChangeKind.ROUNDING: "**The same training**: the same sums in another order.",
    ChangeKind.LAYOUT: "**The same numbers** in another layout.",
    ChangeKind.COST: "**The same numbers** at another cost.",
}
_RESUMES = {
    Resume.SAME_FILES: "goes on from the files as they are",
    Resume.CUT_ANEW: "goes on; the checkpoint is resharded while it is loaded",
    Resume.UNIVERSAL: "needs a universal conversion",
    Resume.NO: "cannot go on",
}


def as_markdown(before: Plan, after: Plan, found: Difference) -> str:
    """What moves, what it costs, and whether a checkpoint goes over."""
    title = plain(after.spec.name)
    if before.spec.name != after.spec.name:
        title = f"{plain(before.spec.name)} → {title}"
    if found.same:
        return f"### Plan: {title}\n\nNothing changes: the plans are the same.\n"
    first = next(kind for kind in _VERDICTS if found.of(kind))
    moves = f" {found.moved_ranks:,} ranks change position." if found.moved_ranks else ""
    moves = " The ranks are other ones." if found.moved_ranks is None else moves
    parts = [f"### Plan: {title}\n", f"{_VERDICTS[first]}{moves}\n", _costs(before, after)]
    parts.append("**Checkpoints of the old plan in a run of the new one**\n")
    parts.append(_resumption("parcompile's runtime", found.runtime) + _resumption("DeepSpeed alone", found.deepspeed))
    for kind, name in TITLES.items():
        changes = found.of(kind)
        if changes:
            rows = [(change.what, *change.texts, change.share) for change in changes]
            parts.append(folded(f"{name} ({len(changes)})", table([("", "before", "after", ""), *rows])))
    return "\n".join(parts)


def _costs(before: Plan, after: Plan) -> str:
    """The figures that a reader looks for, before and after."""
    old, new = (estimate(workload_of(plan.spec)) for plan in (before, after))
    rows: list[tuple[str, ...]] = [("", "before", "after", "change")]
    rows.append(("layout", _layout(before), _layout(after), ""))

    def row(name: str, of: Callable[[Estimate], float], unit: Callable[[float], str]) -> None:
        first, second = of(old), of(new)
        share = f"{(second - first) / first:+.1%}" if first and round(first, 6) != round(second, 6) else ""
        rows.append((name, unit(first), unit(second), share))

    row("ranks", lambda one: one.work.world_size, "{:,.0f}".format)
    row("step, estimated", lambda one: one.time.step.seconds, format_seconds)
    times = (_interval(one.time.interval_seconds, format_seconds) for one in (old, new))
    rows.append(("its 90 % interval", *times, ""))
    row("tokens/s of all GPUs", lambda one: one.time.tokens_per_second_per_gpu * one.work.world_size, "{:,.0f}".format)
    row("tokens/s per GPU", lambda one: one.time.tokens_per_second_per_gpu, "{:,.0f}".format)
    # A share of a percentage would be read as a difference of percentages.
    rows.append(("MFU", *(f"{one.time.utilisation:.1%}" for one in (old, new)), ""))
    row("peak memory of a rank, estimated", lambda one: one.memory.peak.total_bytes, format_bytes)
    sizes = (_interval(one.memory.interval_bytes, format_bytes) for one in (old, new))
    rows.append(("its 90 % interval", *sizes, ""))
    chances = (one.memory.probability for one in (old, new))
    rows.append(("fits with probability", *("-" if one is None else f"{one:.0%}" for one in chances), ""))
    row("static memory of a rank, exact", lambda one: one.memory.static_bytes, format_bytes)
    first, second = (topology(plan)["bytes_leaving_node"] for plan in (before, after))
    share = f"{(second - first) / first:+.1%}" if first and first != second else ""
    rows.append(("sent between nodes by a rank in a step", format_bytes(first), format_bytes(second), share))
    return table(rows)


def _layout(plan: Plan) -> str:
    parallelism, training = plan.spec.parallelism, plan.spec.training
    axes = " × ".join(f"{axis} {size}" for axis in (*DENSE_AXES, Axis.EP) if (size := parallelism.size(axis)) > 1)
    return f"{axes or 'one rank'}, micro {training.micro_batch_size} × {training.gradient_accumulation_steps}"


def _interval(pair: tuple[float, float], unit: Callable[[float], str]) -> str:
    return f"{unit(pair[0])} to {unit(pair[1])}"


def _resumption(who: str, found: Resumption) -> str:
    reasons = "".join(f"\n  - {plain(reason)}" for reason in found.reasons)
    return f"- {who}: {_RESUMES[found.resume]}{reasons}\n"
