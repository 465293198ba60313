"""The layouts that a search looks at, and what would fit where none of them does.

Open is what the spec leaves out or calls "auto": tp, cp, pp with the cut of the layers into stages and virtual stages
(`cuts`), ep (of models with experts) and whether experts are cut over tp, the micro-batch, recomputation, sequence
parallelism and the ZeRO stage; and of each layout its execution, the order of the axes and the implementation of cp. dp
follows from the world unless it is given. What the spec gives stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, NamedTuple

from parcompile.cost.changes import NAMES, Change, changes_that_fit, fewest_parts, fewest_stages, has_use_for
from parcompile.cost.coefficients import Fit
from parcompile.cost.executions import OpenChoices
from parcompile.cost.workload import Workload
from parcompile.layout.groups import AXES, DENSE_AXES, Axis
from parcompile.layout.pipeline import PipelineSplit
from parcompile.layout.sequence import CpImplementation
from parcompile.rules.facts.batches import whole_ramp
from parcompile.schema import default
from parcompile.spec.resolve import Resolution
from parcompile.spec.resolve.reader import CUT_KEYS, EMBEDDING, FIRST, LAST, LOSS, VIRTUAL
from parcompile.units import format_bytes, format_seconds

from .variant import Variants, variant

# How the layers of a model are cut into stages where a spec leaves it open: evenly if they divide, else nearly so.

INTERLEAVED = {2: 2, 8: 4}
"""Virtual stages of a rank that are tried, each from so many stages on: a short pipeline has little to win by more."""


def cut(layers: int, pp: int) -> dict[str, object] | None:
    """What a spec has to say so that `layers` go onto `pp` stages; nothing where they divide.

    The head with its loss, or with it the embedding, counts as a layer where the rest then divides. Otherwise all
    stages but the first and the last hold equally many, and these two share what is left, the last the smaller half.
    None where there are fewer layers than stages.
    """
    if layers < pp:
        return None
    if layers % pp == 0:
        return {}
    for accounts in ({LOSS: True}, {EMBEDDING: True, LOSS: True}):
        if (layers + len(accounts)) % pp == 0:
            return dict(accounts)
    middle = -(-layers // pp)
    while layers - middle * (pp - 2) < 2:
        middle -= 1
    ends = layers - middle * (pp - 2)
    return {FIRST: ends - ends // 2, LAST: ends // 2}


def cuts(layers: int, pp: int) -> list[dict[str, object]]:
    """The ways to cut that a search compares: as few chunks as stages, and interleaved ones where layers divide."""
    plain = cut(layers, pp)
    if plain is None:
        return []
    if pp == 1:
        return [{}]
    tried = [virtual for least, virtual in INTERLEAVED.items() if pp >= least]
    return [plain, *({**plain, VIRTUAL: virtual} for virtual in tried if _divides(layers, pp, virtual, plain))]


def _divides(layers: int, pp: int, virtual: int, plain: dict[str, object]) -> bool:
    accounts = {"embedding": bool(plain.get(EMBEDDING)), "loss": bool(plain.get(LOSS))}
    if FIRST in plain:
        return False
    try:
        counts = PipelineSplit(pp, virtual, **accounts).counts(layers)
    except ValueError:
        return False
    return min(counts) >= 1


# The layouts of a spec whose axes are open, and which of them the rules allow.

RECOMPUTE = ("none", "full")
"""Selective recomputation does what none does with fused attention."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
ZERO_STAGES = (1, 0, 2)
"""Of ZeRO. No layout is faster at another stage than at the first: another one is tried where it holds less, and the
layout does not fit at the first."""
LAST_ZERO_STAGE = 3
"""Tried where nothing fits at the others: its weights are gathered in each pass."""


OPTIONS: dict[str, dict[str, object]] = {
    "linear_cross_entropy": {"linear_cross_entropy": True},
    "tiled_mlp": {"tiled_mlp": True},
    "the optimizer on the host": {"offload_optimizer": {"device": "cpu"}},
    "weights on the host": {"offload_param": {"device": "cpu"}},
    "activations on the host": {"activation_offloading": True},
    "sums of gradients in bf16": {"gradient_accumulation_dtype": "bf16"},
}
"""What lets a rank hold less, and is tried where nothing fits without: what it sets, by what it is called."""


LISTED = (Axis.TP, Axis.CP, Axis.EP, Axis.PP, Axis.DP)
"""The axes, as a layout's name lists them."""


class Candidate(NamedTuple):
    """A layout: what it sets in the spec, and its step."""

    changes: Mapping[str, object]
    work: Workload

    @property
    def name(self) -> str:
        """Short, for tables."""
        work = self.work
        axes = " ".join(f"{axis}{work.size(axis)}" for axis in LISTED)
        marks = [f"v{work.virtual_stages}"] * (work.virtual_stages > 1)
        counts = [len(stage.layers) for stage in work.stages]
        marks += [f"layers {counts[0]}-{counts[len(counts) // 2]}-{counts[-1]}"] * (len(set(counts)) > 1)
        marks += [f"etp{work.expert_tp}"] * (work.expert_tp not in (None, work.tp))
        marks += [f"zero{work.zero_stage}"] * (work.zero_stage != ZERO_STAGES[0])
        marks += ["sp"] * work.sequence_parallel + [work.recompute_text] * (
            not {*work.recompute_words} <= {"none", "selective"}
        )
        marks += ["-".join(axis for axis in work.order if axis in self.ordered)] * (work.order != AXES)
        marks += [short for name, short in _SHORT.items() if name in self.changes]
        marks += [work.context.name] * (work.cp > 1 and work.cp_implementation != CpImplementation.RING.value)
        return " ".join([axes, f"mb{work.micro_batch}", *marks])

    @property
    def options(self) -> list[str]:
        """What a search switched on because nothing fits without."""
        return [name for name, settings in OPTIONS.items() if self.changes.keys() >= settings.keys()]

    @property
    def ordered(self) -> tuple[Axis, ...]:
        """The axes whose order matters."""
        return tuple(axis for axis in DENSE_AXES if self.work.size(axis) > 1)


_SHORT = {
    "linear_cross_entropy": "linear_ce",
    "gather_inputs_again": "gather",
    "tiled_mlp": "tiled",
    "offload_optimizer": "offload",
    "offload_param": "offload_weights",
    "activation_offloading": "offload_acts",
    "gradient_accumulation_dtype": "bf16_sums",
}


@dataclass(frozen=True, slots=True)
class Refused:
    """Axes that a rule refuses, with every micro-batch and recomputation."""

    changes: Mapping[str, object]
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Space:
    """What is open and what it may be. `tree` names an accelerator, the default one where the spec names none."""

    variants: Variants
    assumes_accelerator: bool
    world: int
    axes: Mapping[Axis, tuple[int, ...]]
    layers: int | None
    """Layers to cut into stages; None where the spec says how."""
    dp: int | None
    """Copies of the model, None where the world decides."""
    accumulation_steps: int | None
    """Micro-batches of a step where they are given: the size of each then follows from the layout."""
    sequence_parallel: bool
    """Beside tp; on where the spec leaves it open, as it is never slower and never needs more memory."""
    whole_experts: bool
    """Whether experts may also stay whole beside tp (`expert_tp` 1): the model has some and the spec does not say."""
    micro_batches: tuple[int, ...]
    common_batch: int
    """What divides the batch of every step, which may grow."""
    recompute: tuple[str, ...] | None
    """What may be recomputed; None where the spec says it."""
    zero_stages: tuple[int, ...]
    """As `ZERO_STAGES`; the one that the spec gives."""
    choices: OpenChoices
    document_length: int | None = None
    """Tokens of each document that is packed into a sequence; None: a sequence is one document."""
    switched_on: Mapping[str, object] = field(default_factory=dict)
    """What every layout has of `OPTIONS`."""

    @property
    def tree(self) -> Mapping[str, Any]:
        """The spec."""
        return self.variants.tree

    @property
    def executable(self) -> bool:
        """Whether what the project's own runtime refuses is left out."""
        return self.variants.executable

    @property
    def combinations(self) -> list[dict[str, object]]:
        """Every setting of the axes that makes the world: the micro-batch and recomputation come on top."""
        found = []
        for sizes in itertools.product(*self.axes.values()):
            named = dict(zip(self.axes, sizes, strict=True))
            dp, rest = divmod(self.world, named[Axis.TP] * named[Axis.CP] * named[Axis.PP])
            if rest or self.dp not in (None, dp):
                continue
            ways = cuts(self.layers, named[Axis.PP]) if self.layers is not None else [{}]
            for way, whole in itertools.product(ways, self._ways_of_experts(named)):
                changes: dict[str, object] = {axis.value: size for axis, size in named.items()} | way | whole
                changes |= self.switched_on
                if self.dp is not None:
                    changes[Axis.DP.value] = self.dp
                changes["sequence_parallel"] = self.sequence_parallel and named[Axis.TP] > 1
                found.append(changes)
        return found

    def _ways_of_experts(self, named: Mapping[Axis, int]) -> list[dict[str, int]]:
        """Cut over tp as everything else is, or whole: then the ranks of tp are among those of ep."""
        tp = named[Axis.TP]
        whole = self.whole_experts and tp > 1 and named[Axis.EP] > 1 and named[Axis.EP] % tp == 0
        return [{}, {"expert_tp": 1}] if whole else [{}]

    @property
    def at_last_stage(self) -> Space | None:
        """The same at ZeRO stage 3; None where the spec gives a stage, needs pp, or is not meant for the runtime."""
        if len(self.zero_stages) == 1 or not self.executable or 1 not in self.axes[Axis.PP]:
            return None
        return replace(self, zero_stages=(LAST_ZERO_STAGE,), axes={**self.axes, Axis.PP: (1,)})

    @property
    def with_options(self) -> list[list[Space]]:
        """The same with more and more of `OPTIONS` that the spec leaves open.

        First without the host, then with the optimizer there, then with activations there, then with weights, too; then
        all of these with sums in bf16, which lose digits. Only the runtime has them, DeepSpeed offloads from stage 1 on
        and weights at stage 3, and of recomputed layers alone activations go to the host.
        """
        if not self.executable:
            return []
        given = {name for section in ("training", "zero") for name in self.tree.get(section) or {}}
        *chunks, host, weights, kept, sums = ({} if one.keys() & given else one for one in OPTIONS.values())
        shape = Resolution(self.tree, (), self.variants.folder).shape
        few = [one for one in chunks if any(has_use_for(shape, name) for name in one)]
        subsets = itertools.chain.from_iterable(itertools.combinations(few, size) for size in range(len(few) + 1))
        sets = [{name: value for one in each for name, value in one.items()} for each in subsets]
        stages = tuple(stage for stage in self.zero_stages if stage)
        found = [[replace(self, switched_on=one) for one in sets if one]]
        if host and stages:
            found.append([replace(self, switched_on={**host, **one}, zero_stages=stages) for one in sets])
        word = (self.tree.get("training") or {}).get("activation_checkpointing", "full")
        if kept and "full" in word:
            of_layers = replace(self, recompute=None if self.recompute is None else ("full",))
            found.append([replace(of_layers, switched_on={**kept, **one}) for one in sets])
            if host and stages:
                more = ({**host, **kept, **one} for one in sets)
                found[-1] += [replace(of_layers, switched_on=one, zero_stages=stages) for one in more]
        if weights and (last := self if self.zero_stages == (LAST_ZERO_STAGE,) else self.at_last_stage):
            found.append([replace(last, switched_on={**host, **weights, **one}) for one in sets])
            if kept and "full" in word:
                of_layers = replace(last, recompute=None if last.recompute is None else ("full",))
                found[-1] += [replace(of_layers, switched_on={**host, **weights, **kept, **one}) for one in sets]
        if sums and (self.tree.get("training") or {}).get("precision", "bf16") == "bf16":
            every = [[self], *found]
            found += [[replace(one, switched_on={**sums, **one.switched_on}) for one in each] for each in every]
        return [one for one in found if one]


def open_space(spec: Resolution, *, executable: bool, document_length: int | None = None) -> Space:
    """What a spec leaves open.

    Args:
        spec: valid but for what is open.
        executable: leave out what the project's own runtime refuses.
        document_length: tokens of each document that is packed into a sequence; None: a sequence is one document.

    Raises:
        Unavailable: the model cannot be read.
        ValueError: the batch is not given, so that layouts cannot be compared, or the given axes do not make the world.
    """
    tree, layers, experts = spec.tree, spec.shape.num_hidden_layers, spec.shape.moe.num_experts if spec.shape.moe else 0
    cluster, parallelism, training = (tree.get(name) or {} for name in ("cluster", "parallelism", "training"))
    batch = training.get("global_batch_size")
    if batch is None:
        raise ValueError("training.global_batch_size is not given: layouts are compared at one global batch")
    # What fits, and how fast, depends on it: a search says which one it means.
    named = {**tree, "cluster": {"accelerator": default("spec", ("cluster", "accelerator")), **cluster}}
    world = int(cluster.get("nodes", 1) * cluster["gpus_per_node"])  # the schema takes 8.0 for a whole number
    limits = {Axis.TP: min(world, 64), Axis.CP: world, Axis.PP: min(world, layers)}

    def sizes(axis: Axis, limit: int) -> tuple[int, ...]:
        given = parallelism.get(axis, "auto")
        return (given,) if given != "auto" else tuple(one for one in range(1, limit + 1) if world % one == 0)

    axes = {axis: sizes(axis, limit) for axis, limit in limits.items()}
    if experts:
        given = parallelism.get(Axis.EP)
        axes[Axis.EP] = (given,) if given else tuple(one for one in range(1, experts + 1) if experts % one == 0)
    split = parallelism.get("sequence_parallel")
    micro = training.get("micro_batch_size")
    copies, levels = parallelism.get(Axis.DP, "auto"), parallelism.get("hierarchical_cp_sizes")
    space = Space(
        variants=Variants(named, spec.folder, executable),
        assumes_accelerator="accelerator" not in cluster,
        world=world,
        axes=axes,
        layers=None if any(parallelism.get(key) is not None for key in CUT_KEYS) else layers,
        dp=None if copies == "auto" else copies,
        accumulation_steps=training.get("gradient_accumulation_steps"),
        sequence_parallel=True if split is None else split,
        whole_experts=experts > 0 and parallelism.get("expert_tp") is None,
        micro_batches=(micro,) if micro else tuple(one for one in MICRO_BATCHES if batch % one == 0),
        common_batch=batch if (ramp := whole_ramp(spec)) is None else gcd(*(size for *_, size in ramp.sizes(batch))),
        recompute=RECOMPUTE if training.get("activation_checkpointing") is None else None,
        zero_stages=ZERO_STAGES if (stage := (tree.get("zero") or {}).get("stage")) is None else (stage,),
        choices=OpenChoices(
            orders=parallelism.get("order") is None,
            implementations=parallelism.get("cp_implementation", "auto") == "auto",
            sizes=None if levels is None else (levels[0], levels[1]),
        ),
        document_length=document_length,
    )
    if not space.combinations:
        given = {axis: parallelism[axis] for axis in DENSE_AXES if parallelism.get(axis, "auto") != "auto"}
        equation = " · ".join(f"{axis} {size}" for axis, size in given.items())
        raise ValueError(f"{equation} does not divide the world {world} so that the open axes fill it: leave one open")
    return space


def written_word(recompute: str | tuple[str, ...]) -> str | list[str]:
    """What is recomputed, as a spec says it."""
    return recompute if isinstance(recompute, str) else list(recompute)


class Setting(NamedTuple):
    """One setting of the axes that the rules allow, with the micro-batches and the recomputation that it may have."""

    changes: Mapping[str, object]
    work: Workload
    """With the smallest micro-batch."""
    micro_batches: tuple[int, ...]
    """Sequences of a micro-batch, ascending."""
    recompute: tuple[str | tuple[str, ...], ...]

    def candidate(self, micro: int, word: str | tuple[str, ...]) -> Candidate:
        """The layout with a micro-batch and a recomputation."""
        share = self.work.micro_batch * self.work.micro_batches
        written = {"micro_batch_size": micro, "activation_checkpointing": written_word(word)}
        work = self.work.having(micro_batch=micro, micro_batches=share // micro, recompute=word)
        return Candidate({**self.changes, **written}, work)


def expand(space: Space, changes: Mapping[str, object], *, any_rule: bool = False) -> Setting | Refused:
    """What one setting of the axes leaves open, or what refuses it; with `any_rule` not always the first that does.

    The rules are asked once, with the smallest micro-batch; a larger one has to divide what the batch leaves to a copy
    of the model, which is arithmetic.
    """
    changes = {**changes, "stage": changes.get("stage", space.zero_stages[0])}
    if space.accumulation_steps is None:
        batch: dict[str, object] = {"micro_batch_size": space.micro_batches[0]}
    else:
        batch = changes = {**changes, "gradient_accumulation_steps": space.accumulation_steps}
    smallest = {**changes, **batch, **({"activation_checkpointing": space.recompute[0]} if space.recompute else {})}
    checked = space.variants.having(smallest, any_rule=any_rule)
    if checked.work is None:
        return Refused(changes, checked.code or "", checked.message)
    work = replace(checked.work, document_length=space.document_length)
    share = gcd(space.common_batch, work.global_batch) // work.dp
    # The schedule of virtual stages goes through micro-batches in groups (rule B006).
    group = (work.micro_batch_group or work.pp) if work.virtual_stages > 1 else 1
    tried = space.micro_batches if space.accumulation_steps is None else (work.micro_batch,)
    sizes = tuple(micro for micro in tried if share % micro == 0 and share // micro % group == 0)
    return Setting(changes, work, sizes, space.recompute or (work.recompute,))


# Layouts between those that recompute nothing and those that recompute everything.


def is_open(one: Candidate, judged: Iterable[tuple[Candidate, bool]]) -> bool:
    """Whether a layout fits where all layers are recomputed, so that fewer, or parts of them, may be enough."""
    full = (other for other, fits in judged if fits and other.work.recompute == "full")
    return any(other.work.micro_batch == one.work.micro_batch for other in full)


def between(judged: Iterable[tuple[Candidate, bool]], memory: Fit | None) -> Iterator[Candidate]:
    """Of layouts that recompute nothing and do not fit, and all and do: those that recompute less.

    These are the fewest first stages, and the parts of all layers that take the least time and are enough.

    `judged` are layouts that differ in the micro-batch and in what is recomputed, with whether each fits.
    """
    known = list(judged)
    for one, fits in known:
        if not fits and one.work.recompute == "none" and is_open(one, known):
            for found in (fewest_stages(one.work, memory), fewest_parts(one.work, memory)):
                if found is not None:
                    yield Candidate({**one.changes, "activation_checkpointing": written_word(found.recompute)}, found)


MOST = 3
ZERO_STAGES_TRIED = (2, LAST_ZERO_STAGE)
"""Where stage 1 does not fit."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of the spec, on top of a layout that does not fit, after which it does and every rule allows it."""

    candidate: Candidate
    change: Change

    def __str__(self) -> str:
        known = {**self.change.settings}
        if isinstance(known.get("activation_checkpointing"), list):
            known["activation_checkpointing"] = self.change.work.recompute_text
        settings = ", ".join(f"{_NAMES.get(name, name)} {value}" for name, value in known.items())
        peak, seconds = format_bytes(self.change.memory.peak.total_bytes), format_seconds(self.change.seconds)
        chance = self.change.memory.probability or 0.0
        return f"{settings}: peak {peak}, fits with probability {chance:.0%}, step {seconds}"


_NAMES = {"stage": "zero.stage", "activation_checkpointing": "recomputation"}


def remedies(space: Space, smallest: Candidate) -> Iterator[Remedy]:
    """Up to `MOST` changes of the layout that needs least, the smallest first."""
    found = 0
    # Only the runtime recomputes some stages and not others, computes in chunks and tiles, and keeps inputs or not.
    names = [name for name in NAMES if space.executable or name not in (*OPTIONS, "gather_inputs_again")]
    for change in changes_that_fit(smallest.work, names, by_stage=space.executable):
        changes = {**smallest.changes, **change.settings}
        if "dp" in smallest.changes:
            changes["dp"] = change.work.dp
        if variant(space.tree, changes, space.variants.folder, executable=False).work is not None:
            yield Remedy(smallest, change)
            found += 1
        if found == MOST:
            return
