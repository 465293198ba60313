"""The parts of the page that need no script: headline, figures, pictures, diagnostics, values.

HTML escapes everything that it is given, except HTML.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from parcompile.cost.footprint import HOPELESS, is_safe
from parcompile.cost.table import error_text, fit_text, imbalance_text
from parcompile.diagnostics import Diagnostic, Safety, Severity, format_path
from parcompile.layout.groups import DENSE_AXES
from parcompile.rules import all_rules
from parcompile.show.pictures import NARROW, WIDE, Picture, Subject
from parcompile.show.pictures.front import KINDS, picture
from parcompile.show.pictures.svg import inline
from parcompile.units import format_bytes, format_seconds


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | Html


def tag(name: str, *content: Content, **attributes: object) -> Html:
    """An element; attributes that are None or False are left out, `class_` is class, `aria_label` is aria-label."""
    head = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        head += f" {label}" if value is True else f' {label}="{escape(str(value))}"'
    return Html(f"<{head}>{joined(content)}</{name}>")


def joined(content: Iterable[Content]) -> Html:
    """Pieces one after the other, escaped unless they are HTML."""
    return Html("".join(one if isinstance(one, Html) else escape(one, quote=False) for one in content))


def with_code(text: str) -> list[Content]:
    """Text of messages: what stands between backticks is code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return [text]
    return [tag("code", part) if index % 2 else part for index, part in enumerate(parts)]


def table(rows: Sequence[Sequence[Content]], *, caption: str, **attributes: object) -> Html:
    """A table whose first row is its head, in a frame that scrolls when it is too wide.

    Roles are spelled out: a table that is stacked on a phone stays a table for who hears it.
    """
    head = tag("tr", *(tag("th", cell, scope="col", role="columnheader") for cell in rows[0]), role="row")
    body = joined(tag("tr", *(tag("td", cell, role="cell") for cell in row), role="row") for row in rows[1:])
    parts = (tag("caption", caption), tag("thead", head, role="rowgroup"), tag("tbody", body, role="rowgroup"))
    inner = tag("table", *parts, role="table", **attributes)
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def folded(title: str, *content: Content) -> Html:
    """A part that opens on a click."""
    return tag("details", tag("summary", title), *content)


def script_json(tree: object) -> Html:
    """JSON that can stand inside a script element: nothing in it ends the element or starts a comment."""
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


_PEAK = "Peak memory"


def tiles(subject: Subject) -> Html:
    """The figures that a reader looks for first."""
    plan, found = subject.plan, subject.estimate
    low, high = map(format_seconds, found.time.interval_seconds)
    memory, parameters = found.memory, max(found.parameters.by_stage)
    chance = fit_text(found.work, memory)
    mesh = " × ".join(f"{axis} {plan.spec.parallelism.size(axis)}" for axis in DENSE_AXES)
    entries = [
        ("Ranks", f"{plan.world_size:,}", mesh),
        (_PEAK, format_bytes(memory.peak.total_bytes), chance),
        ("Static memory, exact", format_bytes(memory.static_bytes), f"{parameters:,} parameters on a rank"),
        ("Step", format_seconds(found.time.step.seconds), f"90 % interval {low} to {high}"),
        ("Throughput", f"{found.time.tokens_per_second_per_gpu:,.0f}", "tokens/s per GPU"),
        ("MFU", f"{found.time.utilisation:.1%}", "of peak FLOP/s"),
    ]
    if found.work.ep > 1:
        says = found.work.imbalance != 1 or found.work.expert_capacity is not None
        balance = imbalance_text(found.work) if says else "assumes balanced experts"
        entries.append(("Experts", f"ep {found.work.ep}", balance))
    # The tile of memory is as severe as the rule that speaks of it.
    hopeless = "bad" if (memory.probability or 0.0) < HOPELESS else "warn"
    severities = {} if is_safe(memory) else {_PEAK: hopeless}
    shown = []
    for name, value, note in entries:
        said = tag("dd", tag("b", value), tag("span", note))
        shown.append(tag("div", tag("dt", name), said, class_=severities.get(name)))
    return tag("dl", *shown, class_="tiles")


_ANCHORS = {"schedule": "ring", "timeline": "step"}
"""Of pictures whose sections are not called as they are."""


def figures(subject: Subject) -> tuple[Html, list[Picture]]:
    """The pictures as sections, each wide and narrow, with its table; and the pictures, for their colours."""
    drawn, parts = [], []
    for name in ("splits", "memory", "traffic", "schedule", "timeline", "rates"):
        if name == "schedule" and subject.plan.spec.parallelism.cp == 1:
            continue
        if name == "rates" and subject.plan.spec.training.lr_scheduler is None:
            continue
        pair = [picture(name, subject, width=width) for width in (WIDE, NARROW)]
        drawn += pair
        wide = pair[0]
        body = [tag("p", wide.subtitle, class_="note")]
        if name == "timeline" and subject.estimate.work.names_machine:
            body.append(tag("p", *with_code(f"Error {error_text(subject.estimate)}."), class_="note"))
        body += both_widths(pair)
        if rows := KINDS[name].rows:
            body.append(folded("As a table", table(rows(subject), caption=wide.title)))
        parts.append(section(_ANCHORS.get(name, name), wide.title, *body))
    return joined(parts), drawn


def both_widths(pair: Sequence[Picture]) -> list[Html]:
    """A picture for a page, and the same for a phone: each is shown where it fits."""
    widths = zip(("wide", "narrow"), pair, strict=True)
    return [tag("div", Html(inline(one)), class_=f"picture {width}") for width, one in widths]


def section(anchor: str, title: str, *content: Html) -> Html:
    """A part of the page with a heading that can be linked."""
    heading = tag("h2", title, id=f"{anchor}-title")
    return tag("section", heading, *content, id=anchor, aria_labelledby=f"{anchor}-title")


def diagnostics(found: Sequence[Diagnostic], subject: Subject) -> Html:
    """Every finding with its code, what to do, and the rule's explanation."""
    if not found:
        return tag("p", "The rules have nothing to say.")
    pages = {rule.code: rule for rule in all_rules()}
    found = sorted(found, key=lambda one: list(Severity).index(one.severity))
    entries = []
    for one in found:
        place = format_path(one.path)
        if one.position is not None:
            place = f"{one.file}:{one.position.line}:{one.position.column} {place}"
        body = [tag("b", one.code), " ", tag("span", one.severity.value, class_=f"severity {one.severity.value}")]
        body += [" ", tag("code", place)] if place else []
        body.append(tag("p", *with_code(one.message)))
        if one.help:
            body.append(tag("p", *with_code(f"Help: {one.help}"), class_="note"))
        for fix in one.fixes:
            safety = "" if fix.safety is Safety.SAFE else f" ({fix.safety.value})"
            body.append(tag("p", *with_code(f"Fix: {fix.title}{safety}"), class_="note"))
        if one.code in pages:
            rule = pages[one.code]
            body.append(folded(rule.title, tag("p", *with_code(rule.explanation))))
        entries.append(tag("li", *body))
    counts = Counter(one.severity.value for one in found)
    runs = "The runtime executes this plan." if not subject.plan.refusals else "The runtime refuses this plan."
    names = {"info": "remark"}
    words = ", ".join(f"{count} {names.get(name, name)}{'s' * (count > 1)}" for name, count in counts.items())
    return joined([tag("p", f"{words}. {runs}"), tag("ul", *entries, class_="findings")])


def launching(subject: Subject) -> Html:
    """The commands that start the plan, from the folder that holds train.py and the plan as `plan`."""
    cluster = subject.plan.spec.cluster
    script, first, each, named = "train.py --plan plan", "on the node", "on the node", ""
    if cluster.nodes > 1:
        first = "on the first node; write your host names into plan/launch/hostfile"
        each = f"on each of the {cluster.nodes:,} nodes: NODE_RANK counts them, MASTER_ADDR is the address of node 0"
        named = "NODE_RANK=… MASTER_ADDR=… "
    check = "as the job itself: it compares the ranks, measures the links and runs two steps"
    commands = [
        ("DeepSpeed", f"plan/launch/deepspeed.sh {script}", first),
        ("torchrun", f"{named}plan/launch/torchrun.sh {script}", each),
        ("Slurm", f"sbatch plan/launch/slurm.sbatch {script}", "on a login node"),
        ("a check first", "plan/launch/torchrun.sh -m parcompile preflight plan --live", check),
    ]
    rows = [("with", "command", "where"), *((name, tag("code", command), where) for name, command, where in commands)]
    written = "`parcompile SPEC -o plan` writes these files; `--target` adds those of Kubernetes and SkyPilot."
    note = tag("p", *with_code(written), class_="note")
    return joined([note, table(rows, caption="Commands that start the plan", class_="stacked")])


def values(subject: Subject) -> Html:
    """Every resolved value with where it comes from."""
    rows: list[tuple[str, ...]] = [("value of", "is", "from", "how")]
    for path, found in subject.plan.spec.provenance.items():
        rows.append((path, json.dumps(found.value, ensure_ascii=False), found.origin.value, found.detail))
    options = joined(tag("option", name) for name in ("all", *sorted({row[2] for row in rows[1:]})))
    controls = tag(
        "div",
        tag("label", "Search ", tag("input", type="search", id="value-text", autocomplete="off")),
        tag("label", "From ", tag("select", options, id="value-origin")),
        tag("output", f"{len(rows) - 1} values", id="value-count", aria_live="polite"),
        class_="controls",
    )
    caption = "Every value and where it comes from"
    return joined([controls, table(rows, caption=caption, id="values-table", class_="stacked")])


def summary_line(subject: Subject) -> str:
    """The plan in a sentence, for the headline."""
    spec = subject.plan.spec
    machine = subject.estimate.work.machine.title
    source = spec.model.source
    if source == "dimensions":
        source = spec.model.hf_config.get("model_type", "A model")
    model = "" if source == spec.name else f"{source} on "
    return (
        f"{model}{spec.cluster.nodes:,} × {spec.cluster.gpus_per_node} {machine}, "
        f"{spec.training.global_batch_size:,} sequences of {spec.training.sequence_length:,} tokens, "
        f"{spec.training.precision.value}, ZeRO-{spec.zero_stage}."
    )
