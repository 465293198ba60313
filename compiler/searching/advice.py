"""What a check of a spec says of other layouts: the choice of the search, beside small changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parcompile.cost.calibration import TIE
from parcompile.cost.changes import Change
from parcompile.cost.step import timing
from parcompile.diagnostics import Diagnostic, Fix, Severity
from parcompile.layout.groups import AXES, Axis
from parcompile.rules import EXPERTS_RULE
from parcompile.rules.h_memory import as_fix, workload
from parcompile.schema import NoDefaultError, default
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.spec.resolve.reader import SECTIONS
from parcompile.units import format_bytes

from .first import narrow_space, wider_space
from .ranking import Ranked, SearchResult, search
from .space import Space, open_space, written_word
from .variant import copied

_OPENED = (
    *(*AXES, "sequence_parallel", "micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing"),
    "stage",
)
"""What another layout may set otherwise; everything else stays as the spec has it."""
MOST_SETTINGS = 500
"""Of the axes, that a check looks at: one or two seconds. Of more, sizes that are no power of two are left out, then
the largest."""


def advised(one: Diagnostic, spec: Resolution) -> Diagnostic:
    """A finding, with what the search says of it; one of a spec with values that its schema refuses stays as it is."""
    if spec.invalid:
        return one
    try:
        return _of_experts(one, spec) if one.code == EXPERTS_RULE else _of_memory(one, spec)
    except (Unavailable, ValueError):
        return one


def _of_memory(one: Diagnostic, spec: Resolution) -> Diagnostic:
    """What is too large, with the layout that a search chooses too, or the statement that none of those tried fits."""
    result, every = _all_layouts(spec)
    if result.best is None:
        if not result.too_large or one.fixes:
            return one
        least = result.too_large[0]
        said = f"none of the {result.enumerated} layouts of these GPUs that were tried fits; {least.layout_name} "
        said += f"needs least, {format_bytes(least.peak_bytes)}"
        return replace(one, help=said + "".join(f"; with {remedy}" for remedy in result.remedies[:1]))
    fix = _as_fix(spec, result.best)
    source = "the choice of `parcompile search`" if every else f"the best of {result.enumerated} layouts"
    fix = replace(fix, title=f"{fix.title}: {source}")
    others = tuple(other for other in one.fixes if any(edit not in fix.edits for edit in other.edits))
    # A reader is offered three.
    return replace(one, help=one.help if one.fixes else None, fixes=(*others[:2], fix, *others[2:]))


def _as_fix(spec: Resolution, one: Ranked) -> Fix:
    """What another layout sets otherwise than the spec has it."""
    work = workload(spec)
    before = timing(work).step.seconds
    decided = {
        **{axis.value: work.size(axis) for axis in AXES},
        "micro_batch_size": work.micro_batch,
        "activation_checkpointing": written_word(work.recompute),
        "sequence_parallel": work.sequence_parallel,
        "stage": work.zero_stage,
    }
    settings: dict[str, Any] = {
        name: value
        for name, value in one.candidate.changes.items()
        if value != (decided[name] if name in decided else _asked(spec, SECTIONS[name], name))
    }
    return as_fix(spec, Change(settings, one.candidate.work, one.memory, one.seconds, before))


def _asked(spec: Resolution, *path: str) -> object:
    """What the spec says, or its schema: advice leaves no trace in the provenance of a plan."""
    if spec.given(*path):
        return spec.get(*path)
    try:
        return default("spec", path)
    except NoDefaultError:
        return None


def _all_layouts(spec: Resolution) -> tuple[SearchResult, bool]:
    """The layouts that the spec's GPUs may have, and whether these are all."""
    tree = copied(spec.tree)
    for name in _OPENED:
        tree.setdefault(SECTIONS[name], {}).pop(name, None)
    tree["training"]["global_batch_size"] = spec.spec().training.global_batch_size
    space = narrow_space(tree, spec.folder)
    few = _thinned(space)
    return search(few, wider=_thinned(wider_space(tree, few))), few is space


def _thinned(space: Space) -> Space:
    """As many settings of the axes as a check has time for."""
    if len(space.combinations) <= MOST_SETTINGS:
        return space
    axes = {
        axis: tuple(size for size in sizes if size & (size - 1) == 0) or sizes for axis, sizes in space.axes.items()
    }
    while len((few := replace(space, axes=axes)).combinations) > MOST_SETTINGS:
        longest = max(axes, key=lambda axis: len(axes[axis]))
        axes = {**axes, longest: axes[longest][:-1]}
    return few


def _of_experts(one: Diagnostic, spec: Resolution) -> Diagnostic:
    """Experts that are exchanged between nodes, with the ep that a search chooses; a remark if none is faster.

    ep and expert_tp are open, everything else is as the spec has it.
    """
    work = workload(spec)
    tree = copied(spec.tree)
    axes, training = tree.setdefault("parallelism", {}), tree.setdefault("training", {})
    axes |= {axis.value: work.size(axis) for axis in (Axis.TP, Axis.CP, Axis.PP)}
    axes["sequence_parallel"] = work.sequence_parallel
    for name in (Axis.DP, Axis.EP, "expert_tp"):
        axes.pop(name, None)
    training |= {"global_batch_size": work.global_batch, "micro_batch_size": work.micro_batch}
    training["activation_checkpointing"] = written_word(work.recompute)
    training.pop("gradient_accumulation_steps", None)
    tree["zero"] = {**tree.get("zero", {}), "stage": work.zero_stage}
    space = open_space(Resolution(tree, (), spec.folder), executable=True)
    best = search(replace(space, layers=None)).best
    seconds = timing(work).step.seconds
    if best is None or TIE * best.seconds >= seconds:
        return replace(one, severity=Severity.INFO, help="nothing to do: no other ep makes this layout faster")
    return replace(one, fixes=(_as_fix(spec, best),))
