"""Puts the page together: one file, nothing of it from elsewhere."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any

from parcompile.diagnostics import Diagnostic
from parcompile.layout.groups import DENSE_AXES, Axis
from parcompile.plan.diff import TITLES, difference
from parcompile.show.page import page_data, remarks, sections
from parcompile.show.page import section as search_section
from parcompile.show.page.sections import Html, joined, script_json, section, table, tag
from parcompile.show.pictures import NARROW, WIDE, Picture, Subject, front
from parcompile.show.pictures.front import picture
from parcompile.show.pictures.svg import DARK, LIGHT, inline, rules
from parcompile.spec.resolve.reader import CUT_KEYS
from parcompile.units import format_bytes, format_seconds
from parcompile.version import __version__

SCRIPTS = ("ranks.js", "grid.js", "panel.js", "values.js")
"""Parts of the page's script, in their order."""


def page(
    subject: Subject,
    found: Sequence[Diagnostic] | None = None,
    search: Mapping[str, Any] | None = None,
    other: Subject | None = None,
) -> str:
    """The report as HTML.

    Args:
        subject: the plan.
        found: the spec's diagnostics; without, those that the plan's values tell.
        search: what `parcompile search --format json` printed.
        other: a plan to show beside it.
    """
    plan = subject.plan
    pictures, drawn = sections.figures(subject)
    said = remarks(plan) if found is None else found
    more = [("diagnostics", "Diagnostics", sections.diagnostics(said, subject))]
    if search is not None:
        more.append(("search", "Search", search_section(search, _layout(subject))))
        drawn += [front.draw(search, WIDE)] if search["fitting"] and "pareto_front" in search else []
    if other is not None:
        compared, shown = comparison(subject, other)
        more.append(("beside", "Beside another plan", compared))
        drawn += shown
    more += [("launch", "Launch", sections.launching(subject)), ("values", "Values", sections.values(subject))]
    links = [("ranks", "Ranks"), ("splits", "Shards"), ("memory", "Memory"), ("traffic", "Traffic")]
    links += [("ring", "Ring")] if plan.spec.parallelism.cp > 1 else []
    links += [("step", "Step"), *((anchor, title.split()[0]) for anchor, title, _ in more)]
    axes = [axis for axis in (*DENSE_AXES, Axis.EP) if plan.spec.parallelism.size(axis) > 1] or [Axis.TP]
    choices = joined(tag("option", axis, value=axis, selected=axis == subject.axes[0]) for axis in axes)
    main = Template(_read("page.html")).substitute(
        tiles=sections.tiles(subject),
        axes=choices,
        last_rank=str(plan.world_size - 1),
        pictures=pictures,
        more=joined(section(*one) for one in more),
        data=script_json(page_data(plan)),
        script="\n".join(_read(name) for name in SCRIPTS),
    )
    return framed(
        title=_title(subject),
        kind="plan",
        summary=sections.summary_line(subject),
        links=links,
        main=Html(main),
        drawn=drawn,
        version=f"plan {plan.plan_hash}",
    )


def framed(
    *,
    title: str,
    kind: str,
    summary: str,
    links: Sequence[tuple[str, str]],
    main: Html,
    drawn: Sequence[Picture],
    version: str,
) -> str:
    """A whole page around its main part.

    Args:
        title: the headline.
        kind: what the page is of, for the window's title.
        summary: the sentence below the headline.
        links: anchors of parts with their names.
        main: the parts.
        drawn: the pictures in them, for their colours.
        version: what stands behind the version of this package.
    """
    fills, strokes = set().union(*(one.fills for one in drawn)), set().union(*(one.strokes for one in drawn))
    light, dark = (
        ":root{"
        + "".join(f"--{role}:{value};" for role, value in scheme.items())
        + "}"
        + rules(fills, strokes, dark=on)
        for scheme, on in ((LIGHT, False), (DARK, True))
    )
    return Template(_read("frame.html")).substitute(
        title=joined([title]),
        kind=kind,
        style=f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}{_read('page.css')}",
        summary=joined([summary]),
        links=joined(tag("a", name, href=f"#{anchor}") for anchor, name in links),
        main=main,
        version=joined([f"parcompile {__version__}, {version}"]),
    )


def _title(subject: Subject) -> str:
    """The name of the run; of one without a name, its model and its axes."""
    spec = subject.plan.spec
    ep = (Axis.EP,) if spec.parallelism.ep > 1 else ()
    mesh = " · ".join(f"{axis} {spec.parallelism.size(axis)}" for axis in (*subject.axes, *ep))
    if spec.name != "unnamed":  # the default
        return spec.name
    return f"{spec.model.hf_config.get('model_type', 'model')}, {mesh}"


def _layout(subject: Subject) -> dict[str, object]:
    """What a search may set, as this plan has it."""
    spec = subject.plan.spec
    axes = {axis.value: spec.parallelism.size(axis) for axis in (*DENSE_AXES, Axis.EP)}
    sizes = spec.parallelism.hierarchical_cp_sizes
    return {
        **axes,
        **{key: getattr(spec.parallelism, key) for key in CUT_KEYS},
        "sequence_parallel": spec.parallelism.sequence_parallel,
        "order": "-".join(spec.parallelism.order),
        "cp_implementation": spec.parallelism.cp_implementation.value,
        "hierarchical_cp_sizes": sizes and list(sizes),
        "micro_batch_size": spec.training.micro_batch_size,
        "activation_checkpointing": spec.training.activation_checkpointing,
        "gradient_accumulation_dtype": spec.training.gradient_accumulation_dtype.value,
        "zero_stage": spec.zero_stage,
    }


def _read(name: str) -> str:
    return (importlib.resources.files("parcompile.show.page") / "assets" / name).read_text(encoding="utf-8")


# Another plan beside the plan of the page: figures, what changes, and pictures of both.

_PICTURES = ("memory", "timeline")


def comparison(subject: Subject, other: Subject) -> tuple[Html, list[Picture]]:
    """The comparison, and its pictures, for their colours."""
    first, second = subject.plan.spec.name, other.plan.spec.name
    names = (first, second) if first != second else (f"{first} (this)", f"{second} (other)")
    mine, theirs = _figures(subject), _figures(other)
    figures = [("", *names), *((name, value, theirs[name]) for name, value in mine.items())]
    found = difference(subject.plan, other.plan)
    changes = [("what", *names, "which means")]
    for kind, title in TITLES.items():
        changes += [(one.what, *one.texts, one.note or title) for one in found.of(kind)]
    pictures: list[Picture] = []
    rows = []
    for name in _PICTURES:
        pair = [picture(name, one, width=NARROW) for one in (subject, other)]
        pictures += pair
        cells = [
            tag("figure", tag("figcaption", f"{title}: {one.title}"), Html(inline(one)))
            for title, one in zip(names, pair, strict=True)
        ]
        rows.append(tag("div", *cells, class_="beside"))
    parts = [table(figures, caption="Both plans")]
    parts += [table(changes, caption="What changes")] if not found.same else [tag("p", "The plans are the same.")]
    return joined([*parts, *rows]), pictures


def _figures(subject: Subject) -> dict[str, str]:
    """The figures of a plan that a reader looks for first."""
    plan, found = subject.plan, subject.estimate
    axes = (*DENSE_AXES, *((Axis.EP,) if plan.groups.ep > 1 else ()))
    training = plan.spec.training
    return {
        "Ranks": f"{plan.world_size:,}",
        "Layout": " · ".join(f"{axis} {plan.spec.parallelism.size(axis)}" for axis in axes),
        "Micro-batches": f"{training.micro_batch_size} × {training.gradient_accumulation_steps}",
        "Peak memory": format_bytes(found.memory.peak.total_bytes),
        "Static memory, exact": format_bytes(found.memory.static_bytes),
        "Step": format_seconds(found.time.step.seconds),
        "Tokens/s per GPU": f"{found.time.tokens_per_second_per_gpu:,.0f}",
        "MFU": f"{found.time.utilisation:.1%}",
    }
