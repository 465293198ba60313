"""What `parcompile report` and `doctor` say of a run: words for a terminal, pages with its curves and its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parcompile.diagnostics.reporters import Style, hanging
from parcompile.doctor import Verdict
from parcompile.doctor.reading import KINDS, Evidence
from parcompile.show.page.render import framed
from parcompile.show.page.sections import both_widths, joined, section, table, tag, with_code
from parcompile.show.pictures import NARROW, WIDE, Picture, Subject
from parcompile.show.pictures.curves import Points, draw, spark
from parcompile.show.run import Run, figures, known_values
from parcompile.units import format_bytes, format_seconds


def text(run: Run, subject: Subject | None, note: str, style: Style) -> str:
    """One screen for a terminal. `note` says why there is no plan, or what is not known of it."""
    tree = figures(run, subject)
    rows = [(name, said) for name, said in described(tree, note) if said]
    lines = [style.paint(verdict(tree), "1"), ""]
    for name, said in rows:
        lines.append(hanging(f"{name:<14}", said, style.width))
        if name == "loss":
            losses = known_values(run.rows, "loss")
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
    for name, whose in (("tokens_per_second_per_gpu", "per GPU"), ("tokens_per_second", "of all GPUs")):
        if name in tree:
            rows.append(("throughput", f"tokens/s {whose}: {_beside(tree[name], '{:,.0f}'.format)}"))
    rows.append(("MFU", _beside(tree.get("mfu"), "{:.1%}".format)))
    if (peak := tree.get("memory_peak_bytes")) is not None:
        rank = "" if peak["rank"] is None else f" on rank {peak['rank']}"
        rows.append(("memory peak", f"{format_bytes(peak['largest'])}{rank}{_predicted(peak, format_bytes)}"))
    if (loss := tree.get("loss")) is not None:
        lowest = f"lowest {loss['lowest']:.4f} at step {loss['lowest_step']:,}"
        rows.append(("loss", f"{loss['first']:.4f} at first, {loss['last']:.4f} at last, {lowest}"))
    for name, said, most in (("gradient_norm", "norm", "largest"), ("lr", "learning rate", "highest")):
        if (one := tree.get(name)) is not None:
            top = f"{most} {one['highest']:.3g} at step {one['highest_step']:,}"
            rows.append((said, f"{one['first']:.3g} at first, {one['last']:.3g} at last, {top}"))
    named = [(one, "loss" if one["figure"] == "loss" else "norm") for one in tree["spikes"][:3]]
    spikes = [f"step {one['step']:,}: {it} {one['value']:.3g}, usual {one['usual']:.3g}" for one, it in named]
    more = f"; {len(tree['spikes']) - 3:,} more" if len(tree["spikes"]) > 3 else ""
    rows.append(("spikes", "; ".join(spikes) + more or "none"))
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
    if (refused := tree.get("refused_choices")) is not None:
        said = f"{refused['median']:.1%} of the choices of experts in the median, {refused['last']:.1%} at last"
        rows.append(("refused", said))
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


_ROLES = ("tp", "cp", "dp", "pp", "ep")
_CURVES: dict[str, tuple[str, tuple[str, ...], Callable[[float], str]]] = {
    "loss": ("Loss", ("loss", "eval_loss"), "{:.3f}".format),
    "gradient_norm": ("Gradient norm, before clipping", ("gradient_norm",), "{:.3g}".format),
    "lr": ("Learning rate", ("lr",), "{:.2g}".format),
    "step_seconds": ("Time of a step", ("seconds",), format_seconds),
    "mfu": ("MFU", ("mfu",), "{:.1%}".format),
    "memory_peak_bytes": ("Memory of the fullest rank", ("memory_peak_bytes",), format_bytes),
    "slowest_rank": ("Ranks by themselves", ("slowest_seconds", "fastest_seconds"), format_seconds),
    "router_load": ("Fullest expert over the mean", ("router_load",), "{:.2f}".format),
}
"""Pictures by anchor: the title, the figures, each with those behind its slash, and how a value is written."""


def run_page(run: Run, subject: Subject | None, note: str) -> str:
    """The report of a run as HTML.

    Args:
        run: its rows.
        subject: the plan that it is compared with.
        note: why there is none, or what is not known of it.
    """
    tree = figures(run, subject)
    drawn: list[Picture] = []
    parts, links = [], [("figures", "Figures")]
    rows = [("figure", "value"), *((name, said) for name, said in described(tree, note) if said)]
    parts.append(section("figures", "Figures", table(rows, caption="How the run went", class_="stacked")))
    for anchor, (title, names, unit) in _CURVES.items():
        lines = _lines(run, names)
        if not lines:
            continue
        known = tree.get(anchor)
        band = None
        if isinstance(known, dict) and "predicted_low" in known:
            band = ("predicted, 90 % interval", float(known["predicted_low"]), float(known["predicted_high"]))
        pair = [draw(title, lines, width, band=band, unit=unit) for width in (WIDE, NARROW)]
        drawn += pair
        note_of = tag("p", f"{pair[0].description}.", class_="note")
        parts.append(section(anchor, title, note_of, *both_widths(pair)))
        links.append((anchor, title.partition(",")[0]))
    name = "unnamed" if subject is None else subject.plan.spec.name  # the default
    where = f"The run in {Path(run.file).parent.resolve().name}"
    return framed(
        title=where if name == "unnamed" else f"A run of {name}",
        kind="run",
        summary=verdict(tree),
        links=links,
        main=joined(parts),
        drawn=drawn or [Picture("", "", "", WIDE, 1, ())],
        version="no plan" if subject is None else f"plan {subject.plan.plan_hash}",
    )


def _lines(run: Run, names: tuple[str, ...]) -> dict[str, tuple[str, Points]]:
    """The lines of a picture; of layers and domains as many as there are colours, those that end largest."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in run.rows:
        for name, value in row.items():
            if name.partition("/")[0] in names:
                found.setdefault(name, []).append((row["step"], value))
    kept = {name: points for name, points in found.items() if any(math.isfinite(value) for _, value in points)}
    order = sorted(kept, key=lambda name: ("/" in name, -kept[name][-1][1] if "/" in name else 0))[: len(_ROLES)]
    return {name.replace("_", " "): (role, kept[name]) for role, name in zip(_ROLES, order, strict=False)}


MOST_RANKS = 256
"""Shown, those of the verdict first."""


def doctor_page(verdict: Verdict, found: Evidence) -> str:
    """The verdict as HTML."""
    parts = [section("verdict", "Verdict", table([("place", "value"), *verdict.places().items()], caption="Where"))]
    for name, title, lines in (("evidence", "Evidence", verdict.evidence), ("todo", "What to do", verdict.advice)):
        parts.append(section(name, title, tag("ul", *(tag("li", *with_code(one)) for one in lines))))
    ranks = sorted(found.ranks.values(), key=lambda one: (one.rank not in verdict.ranks, one.rank))[:MOST_RANKS]
    rows = [("rank", "last message", "step", "state", "its end")]
    for one in ranks:
        last = one.messages[-1] if one.messages else None
        place = ("none", "", "")
        if last is not None:
            place = (str(last), "" if last.step is None else str(last.step), last.state)
        rows.append((str(one.rank), *place, "; ".join(one.events)[:300]))
    parts.append(section("ranks", "Ranks", table(rows, caption="What each rank did last", class_="stacked")))
    unread = verdict.read.get("unreadable", {})
    said = [tag("p", f"{verdict.read.get('files', 0)} files: {verdict.read.get('said', '')}")]
    said += [table([("not read", "why"), *unread.items()], caption="Files that were not read")] if unread else []
    parts.append(section("read", "What was read", *said))
    return framed(
        title=KINDS[verdict.kind],
        kind="run",
        summary=verdict.summary,
        links=[("verdict", "Verdict"), ("evidence", "Evidence"), ("todo", "What to do"), ("ranks", "Ranks")],
        main=joined(parts),
        drawn=(),
        version="doctor",
    )
