"""Puts the page together: one file, nothing of it from elsewhere."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any

from parcompile.diagnostics import Diagnostic
from parcompile.layout.groups import DENSE_AXES, Axis
from parcompile.searching.variant import CUT_KEYS
from parcompile.show.pictures import front
from parcompile.show.pictures.shapes import WIDE, Subject
from parcompile.show.pictures.svg import DARK, LIGHT, rules
from parcompile.version import __version__

from . import beside
from .data import page_data, remarks
from .data import section as search_section
from .sections import diagnostics, figures, joined, launching, script_json, section, summary_line, tag, tiles, values

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
    pictures, drawn = figures(subject)
    said = remarks(plan) if found is None else found
    more = [section("diagnostics", "Diagnostics", diagnostics(said, subject))]
    if search is not None:
        more.append(section("search", "Search", search_section(search, _layout(subject))))
        drawn += [front.draw(search, WIDE)] if search["fitting"] and "pareto_front" in search else []
    if other is not None:
        compared, shown = beside.section(subject, other)
        more.append(section("beside", "Beside another plan", compared))
        drawn += shown
    more.append(section("launch", "Launch", launching(subject)))
    more.append(section("values", "Values", values(subject)))
    links = [("ranks", "Ranks"), ("cuts", "Shards"), ("memory", "Memory"), ("traffic", "Traffic")]
    links += [("ring", "Ring")] if plan.spec.parallelism.cp > 1 else []
    links += [("step", "Step"), ("diagnostics", "Diagnostics")]
    links += [
        *([("search", "Search")] if search is not None else []),
        *([("beside", "Beside")] if other is not None else []),
    ]
    links += [("launch", "Launch"), ("values", "Values")]
    axes = [axis for axis in (*DENSE_AXES, Axis.EP) if plan.spec.parallelism.size(axis) > 1] or [Axis.TP]
    choices = joined(tag("option", axis, value=axis, selected=axis == subject.axes[0]) for axis in axes)
    fills, strokes = (set().union(*sets) for sets in zip(*((one.fills, one.strokes) for one in drawn), strict=True))
    colours = {
        scheme: variables + rules(fills, strokes, dark=scheme == "dark")
        for scheme, variables in (("light", _variables(LIGHT)), ("dark", _variables(DARK)))
    }
    dark = f"@media screen and (prefers-color-scheme:dark){{{colours['dark']}}}"
    return Template(_read("page.html")).substitute(
        title=joined([_title(subject)]),
        style=colours["light"] + dark + _read("page.css"),
        summary=joined([summary_line(subject)]),
        links=joined(tag("a", name, href=f"#{anchor}") for anchor, name in links),
        tiles=tiles(subject),
        axes=choices,
        last_rank=str(plan.world_size - 1),
        pictures=pictures,
        more=joined(more),
        version=joined([f"parcompile {__version__}, plan {plan.plan_hash}"]),
        data=script_json(page_data(plan)),
        script="\n".join(_read(name) for name in SCRIPTS),
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


def _variables(scheme: Mapping[str, str]) -> str:
    return ":root{" + "".join(f"--{role}:{value};" for role, value in scheme.items()) + "}"


def _read(name: str) -> str:
    return (importlib.resources.files("parcompile.show.page") / "assets" / name).read_text(encoding="utf-8")
