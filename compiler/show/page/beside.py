"""Another plan beside the plan of the page: figures, what changes, and pictures of both."""

from __future__ import annotations

from parcompile.layout.groups import DENSE_AXES, Axis
from parcompile.plan.diff import TITLES, difference
from parcompile.show.pictures.front import picture
from parcompile.show.pictures.shapes import NARROW, Picture, Subject
from parcompile.show.pictures.svg import inline
from parcompile.units import format_bytes, format_seconds

from .sections import Html, joined, table, tag

_PICTURES = ("memory", "timeline")


def section(subject: Subject, other: Subject) -> tuple[Html, list[Picture]]:
    """The comparison, and its pictures, for their colours."""
    names = _names(subject, other)
    figures = [("", *names), *((row[0], *row[1:]) for row in _figures(subject, other))]
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


def _names(subject: Subject, other: Subject) -> tuple[str, str]:
    first, second = subject.plan.spec.name, other.plan.spec.name
    return (first, second) if first != second else (f"{first} (this)", f"{second} (other)")


def _figures(*subjects: Subject) -> list[tuple[str, ...]]:
    """The figures that a reader looks for first, of each plan."""
    columns = [_column(one) for one in subjects]
    return [(name, *(column[name] for column in columns)) for name in columns[0]]


def _column(subject: Subject) -> dict[str, str]:
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
