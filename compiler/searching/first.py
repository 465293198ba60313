"""A first spec: a search over the layouts that a model on a cluster may sensibly have, and three to choose from.

| offer | what it is |
|---|---|
| fastest | the choice of the search |
| safest | the least memory among layouts that take at most `SLOWER` times as long |
| simplest | the fewest axes, no recomputation, no virtual stages, of those as fast |
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parcompile import schema
from parcompile.cost.calibration import TIE
from parcompile.cost.footprint import is_safe
from parcompile.cost.memory import is_own_master, static_memory
from parcompile.cost.offload import node_bytes
from parcompile.cost.workload import Workload
from parcompile.layout.groups import AXES, Axis
from parcompile.layout.shards import MASTER_BYTES
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.presets import text_part
from parcompile.rules.h_memory import far_too_large
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.units import format_bytes, format_seconds

from .ranking import Predictor, Progress, Ranked, SearchResult, search
from .space import ZERO_STAGES, ZERO_STAGES_TRIED, Refused, Setting, Space, expand, open_space
from .variant import changed

LONGEST = 8192
"""Tokens of a first spec's sequences, where the model does not have fewer positions."""
TOKENS = 4 * 2**20
"""Tokens of a step, about: what Llama 2 was trained with (arXiv 2307.09288, section 2.2)."""
SLOWER = 1.5
"""What a safer or simpler layout may cost in time."""
ROOMIER = 0.9
"""A safer layout is offered where it needs at most this share of the fastest one's memory."""
LARGE_BUBBLE, LOW_UTILISATION = 0.2, 0.2
"""Shares of a step and of the peak rate beyond which a layout is worth a warning."""
LARGE_PART = 0.1
"""The share of a step from which on a part of it is named as what makes it slow."""

_CERTAIN = 0.995
"""A chance to fit that is shown as 100 %, and need not be."""
_UNKNOWN = 1024
_DEEPEST, _WIDEST = 128, 64
"""Stages, and ranks over which experts are dealt or tp goes, that are tried at most."""
_LEAST_TOKENS = 1024
"""Of a sequence that a rank of cp gets at least: a shorter ring is as fast with fewer ranks."""
_MICRO_BATCHES = (1, 2, 4, 8)
_MORE_NODES = (2, 4, 8, 16, 32, 64)
"""Times as many nodes that are tried when nothing fits."""
_SHORTEST = 512
"""Tokens of the shortest sequences that are tried then."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A spec, in which respect its layout is the best, and what speaks against it."""

    word: str
    spec: dict[str, Any]
    reason: str
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Offer({self.word!r}, {self.spec['parallelism']})"


@dataclass(frozen=True, slots=True)
class FirstSpec:
    """Specs to choose from, the fastest first; without any, why none fits, and what would."""

    offers: tuple[Offer, ...] = ()
    reason: str = ""
    remedies: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"FirstSpec({', '.join(one.word for one in self.offers) or self.reason[:100]!r})"

    @property
    def spec(self) -> dict[str, Any] | None:
        """The one to take without a choice."""
        return self.offers[0].spec if self.offers else None


def sequence_length_of(config: Mapping[str, Any]) -> int:
    """Tokens of a sequence that a model's configuration leads to: its positions, as those of its text part."""
    try:
        known = shape_from_config(text_part(config)).max_position_embeddings or _UNKNOWN
    except ModelConfigError:
        known = _UNKNOWN  # whoever reads the model next says what is wrong with it
    return min(known, LONGEST)


def batch_of(world: int, length: int, tokens: int = TOKENS) -> int:
    """Sequences of a step of about so many tokens: the world times or divided by a power of two, so that dp divides it.

    At least one sequence, and one for each rank where that is not too many tokens.
    """
    wanted = max(1.0, tokens / length)
    power = round(math.log2(wanted / world))
    if power >= 0:
        return int(world * 2**power)
    halved = world
    while power < 0 and halved % 2 == 0:
        halved, power = halved // 2, power + 1
    return halved


def first_spec(
    name: str,
    model: Mapping[str, Any],
    cluster: Mapping[str, Any],
    length: int,
    folder: Path,
    precision: str = "bf16",
    *,
    training: Mapping[str, Any] | None = None,
    estimate: bool = True,
    progress: Progress | None = None,
) -> FirstSpec:
    """The fastest, the safest and the simplest layout that fit and that every rule allows.

    Args:
        name: of the run.
        model: the section of the spec.
        cluster: the section of the spec.
        length: tokens of a sequence.
        folder: the folder that paths in the spec are relative to.
        precision: the type of the weights.
        training: further values of that section; `global_batch_size` is that of `batch_of` where it has none.
        estimate: count activations and time, as estimated; otherwise only what is exact, and the simplest that fits.
        progress: passes on the settings of the axes, and may count them.

    Raises:
        ValueError: the schema refuses a value; the message is its.
    """
    world = cluster["nodes"] * cluster["gpus_per_node"]
    base = {
        "version": 1,
        "name": name,
        "model": dict(model),
        "cluster": dict(cluster),
        "parallelism": {},
        "training": {
            "sequence_length": length,
            "global_batch_size": batch_of(world, length),
            "precision": precision,
            **(training or {}),
        },
    }
    validation = schema.validate(base, "spec")
    if not validation.valid:
        raise ValueError(": ".join(filter(None, (validation.diagnostics[0].message, validation.diagnostics[0].help))))
    base = schema.whole(base, "spec")
    try:
        space = narrow_space(base, folder)
    except Unavailable as error:
        Resolution(base, (), folder).described_shape  # noqa: B018 -- it says what is wrong
        return FirstSpec(reason=f"its {error} cannot be read")
    if not estimate:
        return _exact_only(space)
    found = search(space, progress, wider=wider_space(base, space))
    return _nothing(space, found) if found.best is None else FirstSpec(tuple(_offers(space, found)))


def wider_space(tree: Mapping[str, Any], space: Space) -> Space:
    """Spread tp over several nodes, which is slow: what is left where nothing else fits."""
    whole = narrow_space(tree, space.variants.folder, widest=_WIDEST)
    wide = tuple(size for size in whole.axes[Axis.TP] if size not in space.axes[Axis.TP])
    return replace(space, axes={**space.axes, Axis.TP: wide})


def narrow_space(tree: Mapping[str, Any], folder: Path, *, widest: int | None = None) -> Space:
    """What is worth trying: tp on a node, pieces of a sequence that are not short, no more stages than may win.

    With `widest`, so much tp.

    Raises:
        Unavailable: the model cannot be read.
    """
    space = open_space(Resolution(tree, (), folder), executable=True)
    length = tree["training"]["sequence_length"]
    limits = {
        Axis.TP: widest or tree["cluster"]["gpus_per_node"],
        Axis.CP: max(1, length // _LEAST_TOKENS),
        Axis.PP: _DEEPEST,
        Axis.EP: _WIDEST,
    }
    axes = {axis: tuple(size for size in sizes if size <= limits[axis]) for axis, sizes in space.axes.items()}
    micro = tuple(size for size in space.micro_batches if size in _MICRO_BATCHES)
    return replace(space, axes=axes, micro_batches=micro or (1,))


def _offers(space: Space, found: SearchResult) -> Iterator[Offer]:
    """The fastest, and what is safer or simpler than it, each layout once."""
    best = found.fitting[0]
    near = [one for one in found.fitting if one.seconds <= SLOWER * best.seconds]
    least = min(near, key=lambda one: (one.peak_bytes, one.seconds))
    plain = min(near, key=lambda one: (_parts(one), one.seconds))
    taken = [best]
    shortest = min(one.seconds for one in found.fitting)
    yield _offer(space, best, "fastest", best, shortest)
    if least is not best and least.peak_bytes <= ROOMIER * best.peak_bytes:
        taken.append(least)
        yield _offer(space, least, "safest", best, shortest)
    if _parts(plain) < min(map(_parts, taken)):
        yield _offer(space, plain, "simplest", best, shortest)


def _parts(one: Ranked) -> int:
    """How much there is to understand of a layout."""
    work = one.candidate.work
    axes = sum(work.size(axis) > 1 for axis in (Axis.TP, Axis.CP, Axis.EP, Axis.PP))
    further = (
        work.virtual_stages > 1,
        work.recompute != "none",
        work.order != AXES,
        work.expert_tp is not None,
        work.zero_stage != ZERO_STAGES[0],
    )
    return axes + sum(further)


def _offer(space: Space, one: Ranked, word: str, best: Ranked, shortest: float) -> Offer:
    gain = 1 - one.seconds / best.seconds
    more = f"; {gain:.1%} faster, which is within the error of the estimate" if gain > 0 else ""
    warnings = tuple(_warnings(one, shortest))
    return Offer(word, written(space.tree, one), f"{one.layout_name}: {_figures(one)}{more}", warnings)


def written(tree: Mapping[str, Any], one: Ranked) -> dict[str, Any]:
    """The spec of a layout, without what it does not need to say."""
    spec = changed(tree, one.candidate.changes)
    work, axes, training = one.candidate.work, spec["parallelism"], spec["training"]
    given = {name: value for name, value in axes.items() if name not in _ALWAYS and value not in (None, False)}
    if work.ep == 1:
        given.pop("ep", None)
    if work.cp == 1:
        given = {name: value for name, value in given.items() if not name.startswith(("cp_", "hierarchical_cp"))}
    sizes = {"tp": work.tp, "cp": work.cp, "pp": work.pp, "dp": "auto", "sequence_parallel": work.sequence_parallel}
    if training.get("activation_checkpointing") == "none":
        del training["activation_checkpointing"]
    return {**spec, "parallelism": {**sizes, **given}, "training": training}


_ALWAYS = ("tp", "cp", "pp", "dp", "sequence_parallel")


def _figures(one: Ranked) -> str:
    limit, chance = one.memory.limit_bytes, one.memory.probability
    room = "" if limit is None else f" of {format_bytes(limit)}"
    likely = "" if chance is None or chance >= _CERTAIN else f" ({chance:.0%} likely to fit)"
    rate = f"{one.time.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {one.time.utilisation:.0%}"
    work = one.candidate.work
    on_node = node_bytes(work)
    host = f", {format_bytes(on_node)} of each node's own memory" if on_node else ""
    return f"{format_bytes(one.peak_bytes)}{room}{likely}, {format_seconds(one.seconds)} a step, {rate}{host}"


def _warnings(one: Ranked, shortest: float) -> Iterator[str]:
    """What is bad in a layout, and what would be better; `shortest` is the least step of all layouts."""
    work, step = one.candidate.work, one.time.step
    if (share := step.bubble / step.seconds) > LARGE_BUBBLE:
        more = work.global_batch * 2
        yield (
            f"stages wait for {share:.0%} of the step: {work.micro_batches} micro-batches for pp {work.pp}. "
            f"A larger global_batch_size ({more}) or fewer GPUs fill the pipeline"
        )
    if one.time.utilisation < LOW_UTILISATION and work.accelerator != "cpu":
        part = max((name for name in step.parts if name != "computation"), key=lambda name: step.parts[name])
        share = step.parts[part] / step.seconds
        cause = f"{share:.0%} of the step is {part}"
        if share < LARGE_PART:
            again = ", about a quarter of it recomputation" if work.recompute == "full" else ""
            cause = f"computation alone takes {step.compute / step.seconds:.0%} of the step{again}"
        better = "no layout tried is much faster"
        if step.seconds > TIE * shortest:
            better = f"the fastest layout tried has {one.time.utilisation * step.seconds / shortest:.0%}"
        yield f"MFU {one.time.utilisation:.0%} is low: {cause}; {better}"
    if work.stride(Axis.TP) * work.tp > work.gpus_per_node:
        yield (
            f"tp {work.tp} leaves the node of {work.gpus_per_node} GPUs: it waits for the network in every layer. "
            "More nodes let tp stay on one"
        )


def _exact_only(space: Space) -> FirstSpec:
    """The simplest layout whose weights, gradients and optimizer state fit; activations and time are not estimated."""
    predictor, fitting, smallest, refusal = Predictor(space.choices), [], None, ""
    for each in _with_last_stage(space):
        for setting in _settings(each):
            if isinstance(setting, Refused):
                refusal = refusal or f"[{setting.code}] {setting.message}"
                continue
            one = Ranked(
                functools.partial(setting.candidate, setting.micro_batches[0], setting.recompute[0]), predictor
            )
            size = static_memory(setting.work).total_bytes
            if not far_too_large(setting.work):
                fitting.append((_parts(one), setting.work.pp, setting.work.tp, size, one))
            elif smallest is None or size < smallest[0]:
                smallest = (size, one)
        if fitting:
            break
    if fitting:
        *_, size, one = min(fitting, key=lambda entry: entry[:3])
        reason = f"{one.layout_name}: {_exact(one, size)}"
        return FirstSpec((Offer("simplest", written(space.tree, one), reason),))
    if smallest is None:
        return FirstSpec(reason=refusal)
    size, one = smallest
    return FirstSpec(reason=f"the layout that needs least is {one.layout_name}: {_exact(one, size)}")


def _exact(one: Ranked, size: float) -> str:
    device = one.base.work.machine.memory_bytes
    room = "" if device is None else f" of {format_bytes(device)}"
    return f"weights, gradients and optimizer state take {format_bytes(size)}{room} on each rank"


def _with_last_stage(space: Space) -> Iterator[Space]:
    """A space, and then the same at ZeRO stage 3 where that is open."""
    yield space
    if last := space.at_last_stage:
        yield last


def _settings(space: Space) -> Iterator[Setting | Refused]:
    """Every setting of the axes, at each ZeRO stage that holds less than the ones before it where these do not fit."""
    for changes in space.combinations:
        found = expand(space, changes)
        if isinstance(found, Setting) and not found.micro_batches:
            continue
        yield found
        for stage in space.zero_stages[1:] if isinstance(found, Setting) and far_too_large(found.work) else ():
            other = expand(space, {**changes, "stage": stage})
            if isinstance(other, Setting):
                yield other


def _nothing(space: Space, found: SearchResult) -> FirstSpec:
    """Why nothing fits, and what would."""
    if not found.too_large:
        one = found.refused[0]
        return FirstSpec(reason=f"[{one.code}] {one.message}")
    least = found.too_large[0]
    reason = f"the layout that needs least is {least.layout_name}: {_figures_of_memory(least)}"
    return FirstSpec((), reason, tuple(_remedies(space, least)))


def _figures_of_memory(one: Ranked) -> str:
    peak, limit = one.memory.peak, one.memory.limit_bytes or 0.0
    return (
        f"the peak of a rank is estimated as {format_bytes(peak.total_bytes)} of {format_bytes(limit)} usable; the "
        f"largest part is {peak.largest}"
    )


def _remedies(space: Space, least: Ranked) -> Iterator[str]:
    """What would fit: more nodes, shorter sequences, another ZeRO stage."""
    tree, work = space.tree, least.base.work
    # All ranks together hold this much, however it is spread: a search over fewer takes seconds, and finds nothing.
    enough = math.ceil(_state_bytes(work) / max(1.0, least.memory.limit_bytes or math.inf) / work.gpus_per_node)
    for nodes in (work.nodes * factor for factor in _MORE_NODES if work.nodes * factor >= enough):
        batch = {"global_batch_size": batch_of(nodes * work.gpus_per_node, work.sequence_length)}
        larger = {**tree, "cluster": {**tree["cluster"], "nodes": nodes}, "training": {**tree["training"], **batch}}
        if one := _any_that_fits(larger, space):
            yield f"{nodes} nodes: {one.layout_name}, {_size(one)}"
            break
    length = work.sequence_length // 2 if work.nodes >= enough else 0
    while length >= _SHORTEST:
        if one := _any_that_fits({**tree, "training": {**tree["training"], "sequence_length": length}}, space):
            yield f"sequences of {length} tokens: {one.layout_name}, {_size(one)}"
            break
        length //= 2
    for stage in ZERO_STAGES_TRIED if work.pp == 1 else ():
        if stage in space.zero_stages:
            continue
        other = Predictor(space.choices).footprint(replace(work, zero_stage=stage))
        if is_safe(other):
            yield f"zero.stage {stage}: {least.layout_name}, peak {format_bytes(other.peak.total_bytes)}"
            break


def _state_bytes(work: Workload) -> int:
    """What accelerators hold of weights and optimizer state of the whole model, each once."""
    master = 0 if is_own_master(work) else MASTER_BYTES
    state = 0 if work.on_host else master + work.state_bytes
    weight = 0 if work.weights_on_host else work.element_bytes
    return parameter_table(work.shape).numel * (weight + state)


def _size(one: Ranked) -> str:
    return f"peak {format_bytes(one.peak_bytes)} of {format_bytes(one.memory.limit_bytes or 0.0)}"


def _any_that_fits(tree: Mapping[str, Any], space: Space) -> Ranked | None:
    """A layout that fits, the simplest settings first, with full recomputation only where it has to be."""
    narrow = narrow_space(tree, space.variants.folder)
    predictor = Predictor(narrow.choices)
    spaces = (narrow, *(each[-1] for each in narrow.with_options))
    at_stages = itertools.chain.from_iterable(map(_with_last_stage, spaces))
    for setting in itertools.chain.from_iterable(map(_settings, at_stages)):
        if isinstance(setting, Refused) or far_too_large(setting.work):
            continue
        for word in setting.recompute:
            one = Ranked(functools.partial(setting.candidate, setting.micro_batches[0], word), predictor)
            if one.is_safe:
                return one
    return None
