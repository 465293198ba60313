"""What a rank needs fits into its accelerator: what it holds, and at its peak."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from parcompile.cost.footprint import HOPELESS, Footprint, footprint, is_safe
from parcompile.cost.memory import static_memory
from parcompile.cost.offload import node_bytes
from parcompile.cost.workload import Workload
from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.layout.groups import Axis
from parcompile.layout.shards import SplitError
from parcompile.machines import accelerators
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.spec.resolve.reader import place_of
from parcompile.units import GIB, format_bytes, format_seconds

from . import ESTIMATE, PEAK_RULE, Finding, also, finds, model_path, rule
from .w_world import dense_grid

if TYPE_CHECKING:
    from parcompile.cost.changes import Change


# What a rank needs at its peak, activations included, fits into its accelerator: an estimate says how likely.

_ACCELERATOR = ("cluster", "accelerator")
_DP = ("parallelism", "dp")
_STEPS = ("training", "gradient_accumulation_steps")
_NO_SMALL_CHANGE = (
    "none of the changes of one to three values that were tried fits: `parcompile search` looks at every layout of a "
    "spec whose axes are left out, and says what would fit if none does"
)
_SMALL = 0.02
"""Parts below this share of a peak are added up in the equation."""


@rule(PEAK_RULE, targets=(ESTIMATE,))
def peak_fits(spec: Resolution) -> Iterator[Finding]:
    work = workload(spec)
    if exceeds_device(work):
        return
    memory = estimated(work)
    if is_safe(memory):
        return
    found = changes(spec, work)
    chance = memory.probability or 0.0
    yield Finding(
        equation(work, memory),
        _ACCELERATOR,
        help=None if found or not has_whole_batch(spec) else _NO_SMALL_CHANGE,
        fixes=tuple(as_fix(spec, one) for one in found),
        related=also(spec, *map(place_of, ("micro_batch_size", "tp", "pp", "activation_checkpointing"))),
        severity=Severity.ERROR if chance < HOPELESS else Severity.WARNING,
    )


def workload(spec: Resolution) -> Workload:
    """The step of a spec whose layout can be cut.

    Raises:
        Unavailable: another rule says why it cannot.
    """
    dense_grid(spec)
    known = spec.cluster.preset is not None or spec.cluster.accelerator in accelerators()
    if not known or spec.shape.num_attention_heads % spec.axis(Axis.TP):
        raise Unavailable("memory")
    try:
        with contextlib.suppress(Unavailable):
            return spec.work
        return _with_a_whole_batch(spec).work
    except ValueError:
        raise Unavailable("memory") from None


def _with_a_whole_batch(spec: Resolution) -> Resolution:
    """The spec with as many micro-batches as stages, where those that it asks for are not whole: memory is the same.

    Raises:
        Unavailable: its batch is not what is wrong.
    """
    training = spec.tree.get("training")
    if not spec.given("training", "global_batch_size") or spec.given(*_STEPS) or not isinstance(training, dict):
        raise Unavailable("memory")
    steps = {"global_batch_size": None, "gradient_accumulation_steps": spec.axis(Axis.PP)}
    kept = {name: value for name, value in {**training, **steps}.items() if value is not None}
    return Resolution({**spec.tree, "training": kept}, spec.invalid, spec.folder)


def has_whole_batch(spec: Resolution) -> bool:
    """Whether the batch divides, without which no change of the layout can be compared."""
    try:
        spec.spec()
    except Unavailable:
        return False
    return True


def exceeds_device(work: Workload) -> bool:
    """Whether what is held for the whole run is more than the device has, where that is exact.

    Raises:
        Unavailable: the layout cannot be cut.
    """
    if work.zero_stage > 1:
        return False
    try:
        return far_too_large(work)
    except (SplitError, ValueError):
        raise Unavailable("memory") from None


def far_too_large(work: Workload, held: int | None = None) -> bool:
    """Whether what is held for the whole run, which is exact (`held`, where it is known), is more than there is."""
    device = work.machine.memory_bytes
    if device is None or not work.names_machine:
        return False
    return (static_memory(work).total_bytes if held is None else held) > device


@functools.lru_cache(maxsize=4096)
def estimated(work: Workload) -> Footprint:
    """The estimate of a step, which a rule and the verdict of a check ask for.

    Raises:
        Unavailable: another rule says why there is none.
    """
    try:
        return footprint(work)
    except (SplitError, ValueError):
        raise Unavailable("memory") from None


def equation(work: Workload, memory: Footprint) -> str:
    """The parts of the fullest rank and their sum, beside what is usable."""
    peak, limit = memory.peak, memory.limit_bytes or 0.0
    low, high = (format_bytes(size, peak.total_bytes) for size in memory.interval_bytes)
    large = {name: size for name, size in peak.components.items() if size >= _SMALL * peak.total_bytes}
    rest = peak.total_bytes - sum(large.values())
    terms = [f"{name} {format_bytes(size, peak.total_bytes)}" for name, size in large.items()]
    terms += [f"others {format_bytes(rest, peak.total_bytes)}"] if rest >= 1 else []
    sign = ">" if peak.total_bytes > limit else "≤"
    chance = memory.probability or 0.0
    return (
        f"{' + '.join(terms)} = {format_bytes(peak.total_bytes)} on rank {peak.rank} (stage {peak.stage}) {sign} "
        f"{format_bytes(limit)} usable of {work.machine.name}; 90 % interval {low} to {high}: fits with probability "
        f"{chance:.0%}; the largest part is {peak.largest}"
    )


def changes(spec: Resolution, work: Workload) -> list[Change]:
    """The smallest changes that fit, of values that the spec may have otherwise; none in the trial of a fix."""
    if spec.is_trial or not has_whole_batch(spec):
        return []
    # Only here: most specs fit.
    from parcompile.cost.changes import NAMES, changes_that_fit

    names = set(NAMES)
    named = spec.get("parallelism", "cp_implementation") != "auto" or spec.given("parallelism", "hierarchical_cp_sizes")
    if named:
        names.discard("cp")
    split = spec.pipeline_split
    if split.first is not None or split.last is not None or split.embedding or split.loss:
        names.discard("pp")
    try:
        return changes_that_fit(work, names, chooses_context=not named)
    except ValueError:
        raise Unavailable("memory") from None


def as_fix(spec: Resolution, change: Change) -> Fix:
    """The edits of a change, with those that keep the world whole and the global batch as it is."""
    edits = [Edit(place_of(name), value) for name, value in change.settings.items()]
    if spec.given(*_DP) and spec.get(*_DP) != "auto" and spec.get(*_DP) != change.work.dp:
        edits.append(Edit(_DP, change.work.dp))
    if spec.given(*_STEPS) or not spec.given("training", "global_batch_size"):
        edits.append(Edit(_STEPS, change.work.micro_batches))
    names = ["zero.stage" if edit.path == place_of("stage") else edit.path[-1] for edit in edits]
    said = [f"{name} to {_written(edit, change)}" for name, edit in zip(names, edits, strict=True)]
    title = f"set {', '.join(said[:-1])}{' and ' if len(said) > 1 else ''}{said[-1]}"
    cost = "as long" if abs(change.cost) < 0.0005 else f"{change.cost:+.1%}".replace("%", " %").replace("-", "−")
    size, seconds = format_bytes(change.memory.peak.total_bytes), format_seconds(change.seconds)
    return Fix(f"{title}: peak {size}, step {seconds} ({cost})", Safety.CHANGES_COST, tuple(edits))


def _written(edit: Edit, change: Change) -> str:
    if isinstance(edit.value, list):
        return change.work.recompute_text
    return str(edit.value) if isinstance(edit.value, str) else json.dumps(edit.value)


# What a rank holds fits into its accelerator.


@rule("H001")
def static_memory_fits(spec: Resolution) -> Iterator[Finding]:
    work = workload(spec)
    if not exceeds_device(work):
        return
    memory, device = static_memory(work), work.machine.memory_bytes or 0
    parts = {
        "weights": memory.weight_bytes,
        "gradients": memory.gradient_bytes,
        "fp32 master weights": memory.master_bytes,
        "optimizer state": memory.optimizer_bytes,
        "reduce bucket": memory.bucket_bytes,
    }
    largest = max(parts, key=lambda name: parts[name])
    terms = " + ".join(f"{name} {format_bytes(size, memory.total_bytes)}" for name, size in parts.items())
    shards = spec.axis(Axis.DP) * spec.axis(Axis.CP)
    yield Finding(
        f"{terms} = {format_bytes(memory.total_bytes)} > {format_bytes(device)} of {work.machine.name}, without "
        f"activations; the largest part is {largest}",
        model_path(spec, "hidden_size"),
        help=f"raise tp (now {spec.axis(Axis.TP)}) or pp (now {spec.axis(Axis.PP)}): both shrink everything; at ZeRO "
        f"stage 1 a larger dp · cp (now {shards}) shrinks the fp32 master weights and the optimizer state",
        fixes=tuple(as_fix(spec, one) for one in changes(spec, work)),
        related=also(spec, *map(place_of, ("accelerator", "tp", "pp", "stage"))),
    )


_HOST_MEMORY = ("cluster", "host_memory_gib")
_TIGHT = 0.8
"""Beyond this share of a host's memory a warning is given: the processes and the file cache take some, too."""


def usual_host_bytes(work: Workload) -> float | None:
    """What a node of the accelerators that a spec names usually has; None where nothing is known of it."""
    share = work.machine.host_memory_bytes if work.names_machine else None
    return None if share is None else float(share * work.gpus_per_node)


@rule("H006")
def the_host_holds_the_optimizer(spec: Resolution) -> Iterator[Finding]:
    moved = [part for part in ("optimizer", "param") if spec.offload_of(part) is not None]
    kept = spec.activation_offloading
    if not moved and not kept:
        if spec.given(*_HOST_MEMORY):
            yield Finding(
                "host_memory_gib has no effect without zero.offload_optimizer, zero.offload_param or "
                "training.activation_offloading",
                _HOST_MEMORY,
                severity=Severity.INFO,
            )
        return
    if finds("Z006", spec):
        return
    work = workload(spec)
    try:
        needed = node_bytes(work)
    except (SplitError, ValueError):
        raise Unavailable("memory") from None
    if not needed:
        return  # R004 says that nothing is kept
    ranks = f"{work.gpus_per_node} rank{'s' * (work.gpus_per_node > 1)}"
    parts = [{"optimizer": "the optimizer", "param": "weights"}[part] for part in moved] + ["activations"] * kept
    one = parts == ["the optimizer"]
    said = f"{' and '.join(parts)} of {ranks} take{'s' * one} {format_bytes(needed)} of each node's memory"
    places = [("zero", f"offload_{part}") for part in moved] + [place_of("activation_offloading")] * kept
    place, is_given, source = places[0], spec.given(*_HOST_MEMORY), ""
    room = float(spec.get(*_HOST_MEMORY)) * GIB if is_given else usual_host_bytes(work)
    if not is_given:
        source = ": cluster.host_memory_gib is not given, "
        source += "whether it fits is not checked" if room is None else f"{format_bytes(room)} are assumed"
    if room is None or (needed <= _TIGHT * room and not is_given):
        yield Finding(said + source, place, help="say it, as host_memory_gib 2048", severity=Severity.INFO)
    elif needed > _TIGHT * room:
        sign = ">" if needed > room else "of"
        yield Finding(
            f"{said} {sign} {format_bytes(room)}, beside the processes themselves{source}",
            place,
            help=f"use more nodes, or leave {' or '.join(parts)} on the accelerators"
            + ("" if is_given else "; where a node has more, say it, as host_memory_gib 4096"),
            fixes=tuple(Fix.removing(one, Safety.CHANGES_COST) for one in places),
            related=also(spec, _HOST_MEMORY),
            severity=Severity.ERROR if needed > room else Severity.WARNING,
        )
