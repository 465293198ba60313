"""What the layers of a stage hold: each of them for itself, all of them, and the one that is computed again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from parcompile.layout.pipeline import Stage
from parcompile.model import within
from parcompile.model.shape import ModelShape

from .activations import layer_bytes
from .blocks import kept_apart, uses
from .collectives import norms_mlp_output, routed_layers
from .kept import BESIDE, LayerBytes, mean_bytes, sort_bytes, sorts
from .layer_passes import (
    attention_in_flight,
    attention_sizes,
    behind_mlp_bytes,
    dealt_rows,
    entering_bytes,
    gathered_again_bytes,
    in_flight_bytes,
    input_bytes,
    keeps_input,
    kept_attention,
    kept_layers,
    leaving_bytes,
    norm_in_flight,
    parts_in_flight,
    parts_left,
    router_bytes,
    row_copies,
    streams_in_flight,
    tiled_bytes,
)
from .parameters import is_even
from .recurrent import (
    backward_bytes,
    choice_bytes,
    exchanged_bytes,
    forward_bytes,
    hiding_bytes,
    kept_bytes,
    let_go_bytes,
)
from .reductions import Reduction
from .workload import Workload


@dataclass(frozen=True, slots=True)
class Held:
    """A stage, and what one layer of it keeps: with a dense MLP, with experts, and the most of the kinds of layers."""

    work: Workload
    stage: Stage
    index: int
    copies: float
    """Micro-batches whose activations are held at the peak."""
    dense: LayerBytes
    sparse: LayerBytes
    largest: LayerBytes

    @classmethod
    def of(cls, work: Workload, index: int, stage: Stage | None = None) -> Held:
        """Of a step with what the stage recomputes, or of some layers of the stage."""
        stage = work.stages[index] if stage is None else stage
        shape, routed = work.shape_of_rows, routed_layers(work.shape, stage) > 0
        cut = (work.tp, work.sequence_parallel, work.element_bytes)
        if work.framework == "deepspeed":

            def held(layer: LayerBytes, *, of_experts: bool) -> LayerBytes:
                return gathered_again_bytes(work, dealt_rows(work, layer) if of_experts else tiled_bytes(work, layer))

            dense, sparse = (held(mean_bytes(shape, stage.layers, moe, *cut), of_experts=moe) for moe in (False, True))
            each = [] if shape.stack.blocks else sorts(shape, stage.layers)
            kinds = (held(sort_bytes(one, *cut), of_experts=one.routed) for _, one in each)
        else:
            form = partial(
                layer_bytes,
                tp=work.tp,
                sequence_parallel=work.sequence_parallel,
                element_bytes=work.element_bytes,
                row_copies=row_copies(work),
            )
            dense, sparse = (form(shape, moe=one) for one in (False, work.shape.moe is not None))
            dense, sparse = (gathered_again_bytes(work, one) for one in (tiled_bytes(work, dense), sparse))
            own = [one for own, one in shape.by_kind if len(within(own, stage.layers))] if work.shape.kinds else []
            every = (form(one, moe=True) if routed else tiled_bytes(work, form(one)) for one in own)
            kinds = (gathered_again_bytes(work, one) for one in every)
        largest = max(kinds, key=lambda one: one.total, default=sparse if routed else dense)
        return cls(work, stage, index, work.in_flight(index), dense, sparse, largest)

    @property
    def eager(self) -> bool:
        """Run by DeepSpeed, with transformers' layers."""
        return self.work.framework == "deepspeed"

    @property
    def tokens(self) -> int:
        """Those of a micro-batch that a rank has."""
        return self.work.local_tokens

    @property
    def untrained(self) -> int:
        """Layers that run without autograd."""
        return 0 if self.work.shape.stack.runs is None else self.work.shape.stack.runs.untrained

    @property
    def routed(self) -> int:
        """Layers with experts."""
        return routed_layers(self.work.shape, self.stage)

    @property
    def dense_layers(self) -> int:
        """Layers with a dense MLP that run with autograd."""
        return self.work.shape.dense(self.stage.layers) - self.untrained

    @property
    def attending(self) -> int:
        """Layers that attend."""
        return self.work.shape.attending(self.stage.layers)

    @property
    def states(self) -> int:
        """Layers that carry a state."""
        return sum(one.count(self.stage.layers) for one in self.work.shape.parts if one.states)

    @property
    def with_blocks(self) -> range:
        """Layers that may keep what `kept_apart` counts."""
        return self.stage.layers if self.eager else range(0)


def has_kinds(shape: ModelShape) -> bool:
    """Whether stages with as many layers of each sort hold the same."""
    return is_even(shape) and not shape.parts and shape.stack.runs is None


def are_alike(shape: ModelShape) -> bool:
    """Whether layers of a stage differ by their MLPs alone, or are counted together."""
    return has_kinds(shape) or shape.stack.runs is not None or shape.stack.layers_per_module > 1


def all_kept(one: Held) -> dict[str, float]:
    """What all layers keep for backward, where nothing is recomputed."""
    work, stage, tokens, held = one.work, one.stage, one.tokens, one.copies
    trained = len(stage.layers) - one.untrained
    dense, sparse = (parts_left(work, layer) for layer in (one.dense, one.sparse))
    routed = one.routed if work.shape.stack.blocks is None else 0
    kept: dict[str, float] = {
        part: ((trained - routed) * getattr(dense, part) + routed * getattr(sparse, part)) * tokens * held
        for part in ("stream", "gathered")
    }
    kept["attention"] = (one.attending - one.untrained) * (sparse if one.routed else dense).attention * tokens * held
    kept["mlp"] = (one.dense_layers * dense.mlp + one.routed * sparse.mlp) * tokens * held
    kept["mlp"] += (one.dense_layers * dense.layer + one.routed * sparse.layer) * held
    kept["attention"] += one.states * kept_bytes(work) * held
    for part in ("stream", "gathered"):
        # A sequence that is shorter than cp leaves ranks without a token: other rules refuse it.
        kept[part] *= work.split_tokens / max(1, tokens)
    kept["stream"] += sum(count * size for count, size in kept_apart(work, one.with_blocks, BESIDE)) * held
    return kept


def add_choices(one: Held, kept: dict[str, float]) -> None:
    """Adds what layers keep of choices: of keys, and of experts by their losses."""
    kept["attention"] += choice_bytes(one.work, one.stage) * one.eager * one.copies
    kept["mlp"] += router_bytes(one.work, one.stage) * one.copies


def in_flight_of(one: Held, bucket: float) -> float:
    """What one layer has in flight beside what it keeps, in its backward pass, which makes the `bucket`."""
    work, together = one.work, one.work.shape.stack.layers_per_module
    in_flight = in_flight_bytes(work, routed=one.routed > 0, bucket=bucket)
    if work.tp > 1 and work.sequence_parallel and not one.routed and work.mlp_tiles == 1:
        in_flight = max(in_flight, entering_bytes(work))
    if one.eager:
        layer = one.sparse if one.routed else one.dense
        if not one.routed and work.mlp_tiles == 1 and work.shape.stack.blocks is None:
            in_flight = max(in_flight, leaving_bytes(work, one.stage))
        if norms_mlp_output(work.shape):  # that norm is gone
            in_flight -= layer.stream / work.shape.norms.per_layer * work.split_tokens
        of_others = norm_in_flight(work, layer), attention_in_flight(work, one.stage, layer), streams_in_flight(work)
        in_flight = max(in_flight, *of_others)
    if together > 1 and one.routed:
        # The experts of a module go backward when its other layers, and the MLP of their own, are gone.
        gone = ((together - 1) * one.dense.total + one.dense.mlp) * one.tokens
        in_flight = max(in_flight_bytes(work, routed=False), in_flight - gone)
    if one.states:
        gone = let_go_bytes(work, one.stage, one.dense, one.sparse, one.largest)
        # What goes into a layer is there while it scans, and is added to its result.
        added = 0.0 if work.recomputes_layers or keeps_input(work) else input_bytes(work)
        in_flight = max(in_flight, max(backward_bytes(work), forward_bytes(work) + added) - gone)
    return parts_in_flight(work, one.largest, in_flight) if work.parts_again else in_flight


def recomputed(one: Held, bucket: float, reductions: Sequence[Reduction] = ()) -> tuple[dict[str, float], float, float]:
    """Each layer's input is kept; one layer at a time is recomputed whole: all that is kept, that layer, its flight."""
    alone, in_flight, gone, stack = one, in_flight_of(one, bucket), 0.0, one.work.shape.stack
    if not are_alike(one.work.shape) and len(one.stage.layers) > 1:
        # Layers that go backward behind a reduction count with it.
        first = max(0, math.ceil(min(reductions[0].layers, len(one.stage.layers))) - 1) if reductions else 0
        each = each_sort(one, one.stage.layers[first:]).values()
        every = ((layer, in_flight_of(layer, bucket), _kept_behind(one, layer)) for layer in each)
        alone, in_flight, gone = max(every, key=lambda each: sum(_again(each[0]).values()) + each[1] - each[2])
    work, stage, tokens, held, layers = one.work, one.stage, one.tokens, one.copies, bool(one.stage.layers)
    kept = _again(alone)
    one_layer = sum(kept.values())
    inputs = input_bytes(work)
    modules = (len(stage.layers) - one.untrained) / stack.layers_per_module
    kept["stream"] += kept_layers(work, modules, held) * inputs
    if work.shape.residual.streams:
        # Of that one layer, which its first mixture keeps.
        kept["stream"] -= layers * inputs
        one_layer -= layers * inputs
    if one.eager and layers:
        kept["attention"] += kept_layers(work, one.attending, held) * kept_attention(work) * tokens
        kept["attention"] += kept_layers(work, one.states, held) * exchanged_bytes(work)
        kept["mlp"] += in_flight - behind_mlp_bytes(work)
        if alone.attending and not work.moves_activations:
            # What the layer that is computed again takes and attends to is among what all layers keep.
            attended = kept_attention(work) * tokens
            taken = inputs * (keeps_input(work) and not work.shape.residual.streams)
            kept["attention"] -= attended
            kept["stream"] -= taken
            one_layer -= attended + taken
        kept["stream"] -= gone
        one_layer -= gone
    return kept, one_layer, in_flight


def _kept_behind(one: Held, alone: Held) -> float:
    """What layers of a stage keep of a micro-batch that stand behind one which is computed again."""
    behind = range(alone.stage.layers.stop, one.stage.layers.stop)
    return sum(size * count for size, count in kept_tensors(one.work, behind)) * (not one.work.moves_activations)


def _again(one: Held) -> dict[str, float]:
    """What the largest layer keeps, by part, when it is computed again; of a module of several all of them."""
    work, layers = one.work, bool(one.stage.layers)
    # One of them has its experts.
    recomputed = (one.largest, *[one.dense] * (work.shape.stack.layers_per_module - 1))
    kept: dict[str, float] = {
        part: sum(getattr(each, part) for each in recomputed) * one.tokens * layers
        for part in ("stream", "attention", "gathered", "mlp")
    }
    kept["mlp"] += one.largest.layer * layers
    kept["attention"] += hiding_bytes(work, one.stage) * one.eager
    carried = kept_bytes(work) if one.states else 0.0
    if uses(work.shape, one.stage.layers):
        # A layer with a shared block has all of them.
        kept["attention"] += carried
    elif work.shape.stack.blocks is not None:
        # A layer is one block: the largest counts.
        kept["attention"] = max(kept["attention"] * (one.attending > 0), carried)
        kept["mlp"] *= one.dense_layers + one.routed > 0
        kept["attention" if kept["mlp"] > kept["attention"] else "mlp"] = 0.0
    else:
        beside = one.attending == len(one.stage.layers)
        kept["attention"] = kept["attention"] + carried if beside else max(kept["attention"], carried)
    kept["stream"] += max((size for _, size in kept_apart(work, one.with_blocks, BESIDE)), default=0.0)
    return kept


@lru_cache(maxsize=64)
def layer_sorts(shape: ModelShape) -> Sequence[int]:
    """Of each layer of a model a number, which those that keep the same share."""
    numbers, found = dict[object, int](), list[int]()
    kinds = {layer: kind for kind, (own, _) in enumerate(shape.by_kind) for layer in own}
    attending = set(shape.attention_layers)
    for layer in range(shape.num_hidden_layers):
        alone = range(layer, layer + 1)
        parts = tuple(place for place, part in enumerate(shape.parts) if part.count(alone))
        sort = kinds.get(layer), parts, layer in attending, shape.routed(alone), shape.dense(alone)
        found.append(numbers.setdefault(sort, len(numbers)))
    return found


def each_sort(one: Held, layers: range) -> dict[int, Held]:
    """One layer of each sort among some of a stage, alone: the last of them."""
    numbers = layer_sorts(one.work.shape)
    last = {numbers[layer]: layer for layer in layers}
    return {
        sort: Held.of(one.work, one.index, replace(one.stage, layers=range(layer, layer + 1)))
        for sort, layer in last.items()
    }


def kept_tensors(work: Workload, layers: range) -> list[tuple[float, float]]:
    """Bytes of a tensor of a micro-batch that these layers keep, and how many of it: inputs, attention, states."""
    attending, shape = work.shape.attending(layers), work.shape
    return [
        (input_bytes(work), len(layers) / shape.stack.layers_per_module),
        *((size * work.local_tokens, attending) for size in attention_sizes(work)),
        (exchanged_bytes(work), sum(one.count(layers) for one in shape.parts if one.states)),
    ]
