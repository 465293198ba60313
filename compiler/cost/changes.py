"""Changes of a layout after which it fits: the smallest ones, with what each costs in time.

The global batch stays. Which changes the rules allow is not known here: what is found has to be checked.

Full recomputation in the first stages alone: in a 1F1B schedule these hold activations of the most micro-batches.
What a stage holds depends on what it recomputes itself. So it is enough to let the fewest of the first stages recompute
with which the layout fits: every further one would only take longer.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from parcompile.layout.groups import divisors
from parcompile.model.derived_rows import dense_mlps, shared_inputs
from parcompile.model.families import family_of
from parcompile.model.layer_parts import parts_of, why_whole
from parcompile.model.shape import ModelShape

from .coefficients import Fit
from .context_time import candidates, cheapest
from .footprint import Footprint, footprint, is_safe
from .step import timing
from .workload import Workload


def fewest_stages(work: Workload, memory: Fit | None = None) -> Workload | None:
    """The layout with the fewest first stages recomputed, and nothing else, with which it fits.

    None where all but the last are too few, and where only one word can be said for all: with one stage, and with
    virtual stages, of which every rank has some of the first.
    """
    if work.pp == 1 or work.virtual_stages > 1:
        return None
    counts = range(1, work.pp)
    index = bisect_left(
        counts, True, key=lambda count: is_safe(footprint(_recomputed(work, count), memory, fullest=True))
    )
    return None if index == len(counts) else _recomputed(work, counts[index])


def _recomputed(work: Workload, stages: int) -> Workload:
    return replace(work, recompute=("full",) * stages + ("none",) * (work.pp - stages))


PARTS_TRIED = ("norms", "attention+norms", "mlp", "mlp+norms")
"""Parts of layers that are recomputed, those first that take the least time. Attention beside the MLP takes about as
long as whole layers, of which many keep less."""


def fewest_parts(work: Workload, memory: Fit | None = None) -> Workload | None:
    """The layout with the first of `PARTS_TRIED` recomputed with which it fits; None where none is enough."""
    words = (word for word in PARTS_TRIED if why_whole(work.shape, parts_of(word)) is None)
    tried = (replace(work, recompute=word) for word in words)
    return next((one for one in tried if is_safe(footprint(one, memory, fullest=True))), None)


MOST_TRIED = 400
"""Layouts of which the memory is computed: about a tenth of a second."""
MOST_FOUND = 6
"""More than are shown, since the rules may refuse some."""
ENOUGH = 4
"""So many make last resorts needless."""
MOST_TOGETHER = 3
"""Values that are changed at once."""
LARGEST_SIZE = 1024

Value = int | str | bool | list[str]

NAMES = (
    "linear_cross_entropy",
    "gather_inputs_again",
    "tiled_mlp",
    "activation_checkpointing",
    "micro_batch_size",
    "sequence_parallel",
    "tp",
    "ep",
    "pp",
    "cp",
    "stage",
    "nodes",
)
"""What may be changed."""
_FIELDS = {
    "activation_checkpointing": "recompute",
    "micro_batch_size": "micro_batch",
    "stage": "zero_stage",
    "linear_cross_entropy": "linear_loss",
    "gather_inputs_again": "gathers_inputs",
}
_POWERS = (2, 4, 8, 16, 32, 64)
_LAST_RESORTS = {"nodes": 1}
"""What has to be bought."""


class Change(NamedTuple):
    """Values to set, the layout that follows, its memory, and its step beside that of the layout as it is."""

    settings: Mapping[str, Value]
    work: Workload
    memory: Footprint
    seconds: float
    before_seconds: float

    @property
    def cost(self) -> float:
        """The share by which a step takes longer; negative where it becomes shorter."""
        return self.seconds / self.before_seconds - 1


def changes_that_fit(
    work: Workload, names: Collection[str] = NAMES, *, chooses_context: bool = True, by_stage: bool = True
) -> list[Change]:
    """The smallest changes of `names` that fit with the probability that a choice asks for.

    Of each set of names the fastest change counts, with as few nodes as possible. Fewer nodes come first, then fewer
    changed values, then faster ones. With `chooses_context`, the implementation of context parallelism is chosen anew,
    as for a spec that leaves it open. With `by_stage`, only the first stages or parts of layers are recomputed where
    that is enough and faster.

    Raises:
        ValueError: the layout as it is cannot be cut.
    """
    before, tried = timing(work).step.seconds, 0
    found: dict[frozenset[str], Change] = {}
    for chosen in sorted(_sets(work, names), key=_rank):
        last_resort = _rank(chosen)[0] > 0
        if tried >= MOST_TRIED or len(found) >= (ENOUGH if last_resort else MOST_FOUND):
            break
        if any(known <= set(chosen) and "nodes" not in known for known in found):
            continue
        fitting: list[Change] = []
        for changed, settings in _changed(work, chosen):
            tried += 1
            # A layout that cannot be cut is none.
            with contextlib.suppress(ValueError):
                memory = footprint(changed)
                if is_safe(memory):
                    fitting.append(_change(settings, changed, memory, before, chooses_context=chooses_context))
                    less = _recomputed_in_part(work, changed) if by_stage and "full" in settings.values() else ()
                    for partly in less:
                        word = partly.recompute
                        words = {**settings, "activation_checkpointing": word if isinstance(word, str) else list(word)}
                        memory = footprint(partly)
                        fitting.append(_change(words, partly, memory, before, chooses_context=chooses_context))
        if not fitting:
            continue
        best = min(fitting, key=lambda one: (one.work.nodes, one.work.zero_stage, one.seconds))
        if all(best.work.nodes < one.work.nodes for known, one in found.items() if known <= set(chosen)):
            found[frozenset(chosen)] = best
    return sorted(found.values(), key=lambda one: (one.work.nodes, *_rank(one.settings), one.seconds))


def _change(
    settings: Mapping[str, Value], work: Workload, memory: Footprint, before: float, *, chooses_context: bool
) -> Change:
    run = _with_context(work) if chooses_context else work
    return Change(settings, run, memory, timing(run).step.seconds, before)


def _recomputed_in_part(before: Workload, full: Workload) -> Iterator[Workload]:
    """A layout that recomputes everything, with the fewest first stages recomputed, and with parts of all layers.

    Nothing where others did before.
    """
    if before.recompute == "none":
        none = replace(full, recompute="none")
        yield from (one for one in (fewest_stages(none), fewest_parts(none)) if one is not None)


def _with_context(work: Workload) -> Workload:
    """The layout with the implementation of context parallelism that a spec gets which leaves it open."""
    if work.cp == 1:
        return work
    possible, _ = candidates(work)
    chosen = cheapest(work, possible).context
    return replace(work, cp_implementation=chosen.implementation.value, cp_sizes=chosen.sizes)


def _rank(names: Collection[str]) -> tuple[int, int]:
    """What is tried and shown first."""
    return sum(_LAST_RESORTS.get(name, 0) for name in names), len(names)


def _sets(work: Workload, names: Collection[str]) -> Iterator[tuple[str, ...]]:
    """The sets of values to change together."""
    known = [name for name in NAMES if name in names and any(_values(work, name))]
    for count in range(1, MOST_TOGETHER + 1):
        yield from itertools.combinations(known, count)


def has_use_for(shape: ModelShape, name: str) -> bool:
    """Whether rules X011 to X013 take a switch of `training`: a head of tokens, dense MLPs, blocks of matrices."""
    if name == "tiled_mlp":
        return bool(dense_mlps(shape))
    if name == "gather_inputs_again":
        return bool(shared_inputs(shape))
    return name != "linear_cross_entropy" or (shape.user_module is None and not shape.head.labels)


def _values(work: Workload, name: str) -> list[Value]:
    """What a value may become; of sizes, the smaller changes first. None of an axis that the runtime refuses."""
    if name in family_of(work.shape.model_type).refused_axes:
        return []
    if name == "activation_checkpointing":
        return [] if work.recompute == "full" else ["full"]
    if name == "linear_cross_entropy":
        return [] if work.linear_loss or not has_use_for(work.shape, name) else [True]
    if name == "tiled_mlp":
        return [] if work.tiled_mlp or not has_use_for(work.shape, name) else [True]
    if name == "gather_inputs_again":
        of_use = work.sequence_parallel and work.tp > 1 and not work.shards_weights and has_use_for(work.shape, name)
        return [True] if of_use and not work.gathers_inputs else []
    if name == "sequence_parallel":
        return [] if work.sequence_parallel else [True]
    if name == "micro_batch_size":
        return list(divisors(work.micro_batch)[-2::-1])
    if name == "stage":
        return [stage for stage in (1, 2, 3) if stage > work.zero_stage]
    if name == "pp" and (work.virtual_stages > 1 or not isinstance(work.recompute, str)):
        return []
    if name == "ep":
        experts = work.shape.moe.num_experts if work.shape.moe else 1
        return [size for size in range(work.ep + 1, experts + 1) if experts % size == 0 and size % work.ep == 0]
    if name == "pp":
        layers, size = work.shape.num_hidden_layers, work.pp
        modules = layers // work.shape.stack.layers_per_module
        return [size * factor for factor in range(2, modules // size + 1) if modules % (size * factor) == 0]
    limit, size = work.gpus_per_node if name == "tp" else LARGEST_SIZE, int(getattr(work, name))
    factors = range(2, limit // size + 1) if name == "tp" else _POWERS
    return [size * factor for factor in factors if size * factor <= limit]


def _changed(work: Workload, names: tuple[str, ...]) -> Iterator[tuple[Workload, dict[str, Value]]]:
    """The layouts in which all of these values are others, at the same global batch."""
    for values in itertools.product(*(_values(work, name) for name in names)):
        settings = dict(zip(names, values, strict=True))
        changed = _apply(work, settings)
        if changed is not None:
            yield changed, settings


def _apply(work: Workload, settings: Mapping[str, Value]) -> Workload | None:
    """The layout with these values; None where heads, states, layers, tokens, ranks or the batch do not divide."""
    fields: dict[str, Any] = {_FIELDS.get(name, name): value for name, value in settings.items()}
    tp, pp, cp, nodes = (int(fields.get(name, getattr(work, name))) for name in ("tp", "pp", "cp", "nodes"))
    micro, batch = int(fields.get("micro_batch", work.micro_batch)), work.global_batch
    dp, rest = divmod(nodes * work.gpus_per_node, tp * pp * cp)
    if rest or not dp or batch % (dp * micro) or ("sequence_parallel" in fields and tp == 1):
        return None
    if (dp * cp) % int(fields.get("ep", work.ep)):
        return None
    if any(dealt.size % tp for one in work.shape.parts if (dealt := one.dealt()) is not None):
        return None
    if work.shape.num_attention_heads % tp or work.sequence_length % (2 * cp):
        return None
    if "pp" in fields:
        if work.shape.num_hidden_layers % (pp * work.shape.stack.layers_per_module):
            return None
        fields["stage_layers"] = None
    return replace(work, **fields, dp=dp, micro_batches=batch // (dp * micro))
