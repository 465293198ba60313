"""A first spec: the smallest layout of a model on a cluster that fits and passes every rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parcompile import schema
from parcompile.cost.footprint import Footprint, footprint, is_safe
from parcompile.cost.memory import static_memory
from parcompile.cost.recomputation import fewest_stages
from parcompile.cost.step import timing
from parcompile.cost.workload import Workload
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.text_part import text_part
from parcompile.rules.arithmetic import divisors
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.units import format_bytes

from .cuts import cut
from .variant import variant

LONGEST = 8192
"""Tokens of a first spec's sequences, where the model does not have fewer positions."""
_UNKNOWN = 1024
_MICRO_BATCHES = 8
_DEEPEST = 128
"""Stages that are tried at most."""
_WIDEST = 64
"""Ranks over which experts are dealt at most, where nothing fits with all experts on every rank."""


_MORE_NODES = (2, 4, 8, 16, 32, 64)
"""Times as many nodes that are tried when nothing fits."""
_SHORTEST = 512
"""Tokens of the shortest sequences that are tried then."""


@dataclass(frozen=True, slots=True)
class FirstSpec:
    """A spec, and why its layout was chosen; without a spec, what stands against it and what would fit."""

    spec: dict[str, Any] | None
    reason: str = ""
    remedies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Layout:
    """A layout that every rule allows."""

    spec: dict[str, Any]
    work: Workload
    memory: Footprint | None
    """Left out where nobody asked for an estimate."""

    @property
    def fits(self) -> bool:
        """Whether it is safe; without an estimate, whether what is exact fits."""
        if self.memory is not None:
            return is_safe(self.memory)
        device = self.work.machine.memory_bytes
        return device is None or static_memory(self.work).total_bytes <= device

    @property
    def name(self) -> str:
        """In few words."""
        again = {"none": "", "full": " with full recomputation"}.get(
            self.work.recompute_text, f" with recomputation ({self.work.recompute_text})"
        )
        if self.work.ep > 1:
            return f"tp {self.work.tp}, pp {self.work.pp} and ep {self.work.ep}{again}"
        return f"tp {self.work.tp} and pp {self.work.pp}{again}"


def sequence_length_of(config: Mapping[str, Any]) -> int:
    """Tokens of a sequence that a model's configuration leads to: its positions, as those of its text part."""
    try:
        known = shape_from_config(text_part(config)).max_position_embeddings or _UNKNOWN
    except ModelConfigError:
        known = _UNKNOWN  # whoever reads the model next says what is wrong with it
    return min(known, LONGEST)


def first_spec(
    name: str,
    model: Mapping[str, Any],
    cluster: Mapping[str, Any],
    length: int,
    folder: Path,
    precision: str = "bf16",
    *,
    estimate: bool = True,
) -> FirstSpec:
    """The smallest pp, then the smallest tp, that fit and that every rule allows; recomputed where that is faster.

    Args:
        name: of the run.
        model: the section of the spec.
        cluster: the section of the spec.
        length: tokens of a sequence.
        folder: the folder that paths in the spec are relative to.
        precision: the type of the weights.
        estimate: count activations, as estimated, and not only what is exact.

    Raises:
        ValueError: the schema refuses a value; the message is its.
    """
    base = _spec(name, model, cluster, length, 1, 1, precision, {})
    validation = schema.validate(base, "spec")
    if not validation.valid:
        raise ValueError(validation.diagnostics[0].message)

    try:
        shape = Resolution(base, (), folder).shape
    except Unavailable as error:
        return FirstSpec(None, f"the model's {error} cannot be read")

    experts = 1 if shape.moe is None else shape.moe.num_experts

    def first(nodes: int, length: int) -> tuple[_Layout | None, _Layout | None, str]:
        def specs(ep: int) -> Iterator[dict[str, Any]]:
            machines = {**cluster, "nodes": nodes}
            world = nodes * cluster["gpus_per_node"]
            for pp in (size for size in divisors(world) if size <= _DEEPEST):
                more = cut(shape.num_hidden_layers, pp)
                for tp in divisors(cluster["gpus_per_node"]):
                    if more is not None and world % (tp * pp * ep) == 0:
                        dealt = {"ep": ep} if ep > 1 else {}
                        yield _spec(name, model, machines, length, tp, pp, precision, {**more, **dealt})

        smallest, refusal = None, ""
        for ep in (size for size in divisors(experts) if size <= _WIDEST):
            chosen, least, reason = _first(specs(ep), folder, estimate=estimate, executable=ep > 1)
            if chosen is not None:
                return chosen, None, ""
            if least is not None and (smallest is None or _needed(least) < _needed(smallest)):
                smallest = least
            refusal = refusal or reason
        return None, smallest, refusal

    chosen, smallest, refusal = first(cluster["nodes"], length)
    if chosen is not None:
        return FirstSpec(chosen.spec, _reason(chosen))
    if smallest is None:
        return FirstSpec(None, refusal)
    return FirstSpec(None, _too_large(smallest), tuple(_remedies(smallest, first)))


def _first(
    specs: Iterable[dict[str, Any]], folder: Path, *, estimate: bool, executable: bool
) -> tuple[_Layout | None, _Layout | None, str]:
    """The layout to take, the one that needs least of those that are too large, and what a rule refuses."""
    fitting: dict[str, _Layout] = {}
    smallest: _Layout | None = None
    refusal = ""
    for spec in specs:
        found = variant(spec, {}, folder, executable=executable)
        if found.work is None:
            refusal = f"[{found.code}] {found.message}"
            continue
        for recompute in ("none", "full") if estimate else ("none",):
            work = replace(found.work, recompute=recompute)
            layout = _Layout(_recomputed(spec, recompute), work, footprint(work) if estimate else None)
            if layout.fits:
                if recompute == "full" and recompute not in fitting and "none" not in fitting:
                    layout = _in_part(spec, layout)
                fitting.setdefault(recompute, layout)
            elif smallest is None or _needed(layout) < _needed(smallest):
                smallest = layout
        if "none" in fitting:
            return min(fitting.values(), key=lambda one: timing(one.work).step.seconds), smallest, refusal
    return fitting.get("full"), smallest, refusal


def _in_part(spec: Mapping[str, Any], full: _Layout) -> _Layout:
    """A layout that recomputes everything, or only the first stages, where that is enough and faster."""
    work = fewest_stages(replace(full.work, recompute="none"))
    if work is None or timing(work).step.seconds >= timing(full.work).step.seconds:
        return full
    return _Layout(_recomputed(spec, work.recompute), work, footprint(work))


def _recomputed(spec: Mapping[str, Any], recompute: str | tuple[str, ...]) -> dict[str, Any]:
    if recompute == "none":
        return dict(spec)
    word = recompute if isinstance(recompute, str) else list(recompute)
    return {**spec, "training": {**spec["training"], "activation_checkpointing": word}}


def _needed(layout: _Layout) -> float:
    return static_memory(layout.work).total_bytes if layout.memory is None else layout.memory.peak.total_bytes


def _reason(layout: _Layout) -> str:
    one_rank = layout.work.tp * layout.work.pp == 1
    why = "" if one_rank else ", the smallest sizes that fit and pass every rule"
    return f"{layout.name}{why}: {_size(layout)}"


def _size(layout: _Layout) -> str:
    memory, device = layout.memory, layout.work.machine.memory_bytes
    if memory is None:
        room = "" if device is None else f" of {format_bytes(device)}"
        size = format_bytes(static_memory(layout.work).total_bytes)
        return f"weights, gradients and optimizer state take {size}{room} on each rank"
    room = "" if memory.limit_bytes is None else f" of {format_bytes(memory.limit_bytes)} usable"
    chance = "" if memory.probability is None else f", which fits with probability {memory.probability:.0%}"
    return f"the peak of a rank is estimated as {format_bytes(memory.peak.total_bytes)}{room}{chance}"


def _too_large(layout: _Layout) -> str:
    largest = "" if layout.memory is None else f"; the largest part is {layout.memory.peak.largest}"
    return f"the layout that needs least is {layout.name}: {_size(layout)}{largest}"


def _remedies(
    smallest: _Layout, first: Callable[[int, int], tuple[_Layout | None, _Layout | None, str]]
) -> Iterator[str]:
    """What would fit: more nodes, shorter sequences, another ZeRO stage."""
    work = smallest.work
    for factor in _MORE_NODES:
        found, _, _ = first(work.nodes * factor, work.sequence_length)
        if found is not None:
            yield f"{work.nodes * factor} nodes: {_reason(found)}"
            break
    length = work.sequence_length // 2
    while length >= _SHORTEST:
        shorter = replace(work, sequence_length=length)
        found = first(work.nodes, length)[0] if smallest.memory is None or is_safe(footprint(shorter)) else None
        if found is not None:
            yield f"sequences of {length} tokens: {_reason(found)}"
            break
        length //= 2
    for stage in (2, 3):
        other = replace(work, zero_stage=stage)
        memory = footprint(other)
        if work.pp == 1 and is_safe(memory):
            layout = _Layout(smallest.spec, other, memory)
            run = ", which parcompile.runtime does not run" if stage == 3 else ""
            yield f"zero.stage {stage}{run}: {_reason(layout)}"
            break


def _spec(
    name: str,
    model: Mapping[str, Any],
    cluster: Mapping[str, Any],
    length: int,
    tp: int,
    pp: int,
    precision: str,
    cuts: Mapping[str, object],
) -> dict[str, Any]:
    dp = cluster["nodes"] * cluster["gpus_per_node"] // (tp * pp)
    training = {
        "sequence_length": length,
        "global_batch_size": dp * max(_MICRO_BATCHES, pp),
        "micro_batch_size": 1,
        "precision": precision,
        **({"gradient_accumulation_dtype": "fp32"} if pp > 1 and precision != "fp32" else {}),
    }
    return {
        "version": 1,
        "name": name,
        "model": dict(model),
        "cluster": dict(cluster),
        "parallelism": {"tp": tp, "cp": 1, "pp": pp, "dp": "auto", "sequence_parallel": tp > 1, **cuts},
        "training": training,
        "zero": {"stage": 1},
    }
