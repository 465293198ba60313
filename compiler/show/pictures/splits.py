"""What each axis splits: tp weights, cp tokens, dp the batch, pp layers, ep experts, ZeRO the optimizer state."""

from __future__ import annotations

from collections.abc import Callable

from parcompile.cost.memory import static_memory
from parcompile.cost.offload import host_memory
from parcompile.layout.groups import DENSE_AXES, Axis
from parcompile.layout.sequence import token_ranges
from parcompile.layout.shards import MASTER_BYTES, TensorLayout, owned_experts
from parcompile.model import Parameter
from parcompile.spec.values import workload_of
from parcompile.units import format_bytes

from . import SMALL, Box, Picture, Sketch, Subject, Text, fitted, reached, text_width
from .svg import shade

MOST_PARTS = 256
"""Pieces that are drawn one by one; of more, as many, and the words say how many there are."""
MOST_SEQUENCES = 512
BAR = 30.0


def draw(subject: Subject, width: float, *, axis: str | None = None) -> Picture:
    """One panel for each axis larger than 1, and for ZeRO; with `axis` (tp, cp, dp, pp, ep or zero) that panel only.

    Raises:
        ValueError: there is no such panel.
    """
    if axis is not None and axis not in _PANELS:
        raise ValueError(f"there is no panel {axis!r}: what is split is shown for {', '.join(_PANELS)}")
    names = [axis] if axis else _split(subject)
    sketch = Sketch(width)
    said = []
    for name in names:
        if sketch.y:
            sketch.y += 16
        said.append(_PANELS[name](sketch, subject))
    title = "What each axis splits" if axis is None else f"What {_NAMES.get(axis, axis)} splits"
    parallelism = subject.plan.spec.parallelism
    world = " × ".join(f"{axis} {parallelism.size(axis)}" for axis in DENSE_AXES)
    world += f", ep {parallelism.ep}" if parallelism.ep > 1 else ""
    return sketch.picture(title, f"{subject.plan.spec.name}: {world}", " ".join(said))


def _split(subject: Subject) -> list[str]:
    """The panels that show a split."""
    spec = subject.plan.spec
    found = [axis for axis in (*DENSE_AXES, Axis.EP) if spec.parallelism.size(axis) > 1]
    return [*found, *(["zero"] if spec.zero_stage and spec.parallelism.zero_shards > 1 else [])] or [Axis.TP]


def _weights(sketch: Sketch, subject: Subject) -> str:
    """The matrices of a layer side by side, each in the shades of the ranks that hold its pieces."""
    tp = subject.plan.spec.parallelism.tp
    how = f"tp {tp} splits the weights: each rank holds 1/{tp} of each matrix that is split."
    said = how if tp > 1 else "tp 1: weights are not split."
    sketch.caption(said, strong=True)
    found = [pair for pair in subject.plan.tensors().values() if pair[0].layers is not None and len(pair[0].shape) > 1]
    found = [pair for pair in found if pair[0].expert_dim is None][:7]
    largest = max(max(layout.full_shape) for _, layout in found)
    columns, side = (2, 84.0) if sketch.narrow else (len(found), 96.0)
    scale, slot = side / largest, sketch.width / columns
    sketch.y += 8
    for first in range(0, len(found), columns):
        row = found[first : first + columns]
        foot = sketch.y + max(max(layout.full_shape[0] * scale, 8.0) for _, layout in row)
        for column, (parameter, layout) in enumerate(row):
            _matrix(sketch, (column * slot, foot), scale, parameter, layout, tp)
        sketch.y = foot + 56
    sketch.legend([(shade(Axis.TP, rank, tp), f"tp {rank}") for rank in range(min(tp, 8))])
    copies = subject.plan.kv_replicas
    if copies > 1:
        sketch.caption(f"There are fewer kv heads than ranks: {copies} ranks hold each of them.", size=SMALL + 1)
    return said


def _matrix(
    sketch: Sketch, foot: tuple[float, float], scale: float, parameter: Parameter, layout: TensorLayout, tp: int
) -> None:
    x, bottom = foot
    rows, columns = layout.full_shape[0], layout.full_shape[-1]
    height, width = max(rows * scale, 8.0), max(columns * scale, 8.0)
    y = bottom - height
    if layout.ranges is None:
        sketch.add(Box(x, y, width, height, "hidden", f"{parameter.name}: replicated"))
    else:
        drawn: set[tuple[int, int]] = set()
        for rank, pieces in enumerate(layout.ranges):
            for start, stop in pieces:
                if (start, stop) in drawn:
                    continue  # a kv head that the rank before has too
                drawn.add((start, stop))
                role, title = shade(Axis.TP, rank, tp), f"{parameter.name}: tp {rank} holds [{start}, {stop})"
                if layout.dim == 0:
                    first, last = height * start / rows, height * stop / rows
                    sketch.add(Box(x, y + first, width, max(last - first - 0.6, 0.4), role, title))
                else:
                    first, last = width * start / columns, width * stop / columns
                    sketch.add(Box(x + first, y, max(last - first - 0.6, 0.4), height, role, title))
    name = parameter.name.removesuffix(".weight").rsplit(".", 1)[-1]
    how = "replicated" if layout.dim is None else "split by rows" if layout.dim == 0 else "split by columns"
    sketch.add(Text(x, bottom + 15, fitted(name, 118, SMALL + 1), SMALL + 1, strong=True))
    sketch.add(Text(x, bottom + 29, f"{rows} × {columns}", SMALL, "soft"))
    sketch.add(Text(x, bottom + 42, how, SMALL, "soft"))


def _tokens(sketch: Sketch, subject: Subject) -> str:
    """The sequence as a bar, each stretch in the shade of the rank that holds it."""
    parallelism, length = subject.plan.spec.parallelism, subject.plan.spec.training.sequence_length
    cp, layout = parallelism.cp, parallelism.cp_layout
    said = f"cp {cp} splits each sequence of {length:,} tokens: a rank holds {length // cp:,} of them ({layout.value})."
    sketch.caption(said, strong=True)
    top = sketch.y + 8
    step = max(1, cp // MOST_PARTS)
    for rank in range(0, cp, step):
        for piece in token_ranges(layout, cp, rank, length):
            if piece.step > 1:
                # Tokens are dealt one by one: a few rounds of the deal stand for all of them.
                rounds = min(6, length // cp)
                unit = sketch.width / (rounds * cp)
                for index in range(rounds):
                    x, title = (index * cp + rank) * unit, f"cp {rank}: tokens {rank} + i · {cp}"
                    sketch.add(Box(x, top, unit * step - 0.4, BAR, shade(Axis.CP, rank, cp), title))
                continue
            x, wide = sketch.width * piece.start / length, sketch.width * len(piece) / length * step
            title = f"cp {rank}: tokens [{piece.start}, {piece.stop})"
            _part(sketch, x, top, wide, shade(Axis.CP, rank, cp), str(rank), title)
    _ends(sketch, top + BAR, "token 0", f"{length:,}")
    sketch.legend([(shade(Axis.CP, rank, cp), f"cp {rank}") for rank in range(min(cp, 8))])
    return said


def _batch(sketch: Sketch, subject: Subject) -> str:
    """The sequences of a step as squares, each in the shade of the copy of the model that reads it."""
    training, dp = subject.plan.spec.training, subject.plan.spec.parallelism.dp
    micro, steps = training.micro_batch_size, training.gradient_accumulation_steps
    said = (
        f"dp {dp} splits the batch of {training.global_batch_size:,} sequences: each copy of the model reads "
        f"{micro * steps:,} of them, {micro} at a time in {steps:,} micro-batches."
    )
    sketch.caption(said, strong=True)
    shown_dp, shown = min(dp, 16), min(micro * steps, MOST_SEQUENCES // min(dp, 16))
    left = text_width(f"dp {dp - 1}", SMALL) + 12
    # An eighth of a square parts the micro-batches.
    cell = min(18.0, (sketch.width - left) / (shown + shown // micro / 8))
    top = sketch.y + 8
    for row in range(shown_dp):
        rank = row if shown_dp == dp else row * (dp - 1) // (shown_dp - 1)
        y = top + row * 20
        sketch.add(Text(0, y + 13, f"dp {rank}", SMALL, "soft"))
        for index in range(shown):
            x = left + index * cell + (index // micro) * cell / 8
            title = f"dp {rank}: micro-batch {index // micro}"
            sketch.add(Box(x, y, max(cell - 1.5, 0.5), 16, shade(Axis.DP, rank, dp), title, radius=2))
    sketch.y = top + shown_dp * 20
    if shown_dp < dp or shown < micro * steps:
        drawn = f"{shown_dp} of {dp} copies and {shown} of their {micro * steps:,} sequences are drawn."
        sketch.caption(drawn, size=SMALL + 1)
    return said


def _layers(sketch: Sketch, subject: Subject) -> str:
    """The layers as a bar, each in the shade of its stage."""
    spec = subject.plan.spec
    pp, layers = spec.parallelism.pp, spec.model.shape.num_hidden_layers
    said = f"pp {pp} splits the {layers} layers into stages."
    sketch.caption(said, strong=True)
    top, wide = sketch.y + 8, sketch.width / (layers + 2)
    # The embedding stands before the layers, the head behind them.
    for rank, held in enumerate(spec.virtual_stages):
        role = shade(Axis.PP, rank, pp)
        for stage in held:
            for layer in stage.layers:
                sketch.add(Box(wide * (layer + 1), top, wide - 0.8, BAR, role, f"pp {rank}: layer {layer}"))
            if len(stage.layers) * wide > 30:
                x = wide * (stage.layers.start + 1 + len(stage.layers) / 2)
                sketch.add(Text(x, top + 19, f"pp {rank}", SMALL, f"on:{role}", "middle"))
        if any(stage.has_embedding for stage in held):
            sketch.add(Box(0, top, wide - 0.8, BAR, role, f"pp {rank}: embedding", "soft"))
        if any(stage.has_head for stage in held):
            sketch.add(Box(wide * (layers + 1), top, wide - 0.8, BAR, role, f"pp {rank}: head", "soft"))
    _ends(sketch, top + BAR, "embedding, layer 0", "head")
    return said


def _optimizer(sketch: Sketch, subject: Subject) -> str:
    """Weights and gradients whole, the optimizer state in shards."""
    spec = subject.plan.spec
    work = workload_of(spec)
    memory = static_memory(work)
    shards = spec.optimizer_shards
    host = host_memory(work)
    where = "on the host of each rank" if host else "on each rank"
    state = (host or memory).master_bytes + (host or memory).optimizer_bytes
    said = (
        f"ZeRO-{spec.zero_stage} splits the optimizer state: {format_bytes(state)} {where} instead of "
        f"{format_bytes(memory.numel * (MASTER_BYTES + work.state_bytes))}."
    )
    sketch.caption(said, strong=True)
    whole = {"weights": ("weights", spec.zero_stage >= 3), "gradients": ("gradients", spec.zero_stage >= 2)}
    for name, (role, is_split) in whole.items():
        sketch.caption(f"{name}: {'split as well' if is_split else 'in full on each rank'}", size=SMALL + 1)
        sketch.add(Box(0, sketch.y + 2, sketch.width, 16, role, name))
        sketch.y += 24
    dealt = max(map(work.dealt_parameters, spec.stages))
    what = "of what is not a routed expert" if dealt else "one shard each"
    _shards(sketch, f"fp32 master weights and Adam's two moments, {what}: dp · cp = {shards} shards", shards)
    if dealt:
        count = work.expert_shards
        _shards(sketch, f"of the routed experts of a rank: expert-dp = {count} shard{'s' * (count > 1)}", count)
    return said


def _shards(sketch: Sketch, said: str, shards: int) -> None:
    sketch.caption(said, size=SMALL + 1)
    y, shown = sketch.y + 2, min(shards, MOST_PARTS)
    wide = sketch.width / shown
    for index in range(shown):
        rank = index * shards // shown
        _part(sketch, index * wide, y, wide, shade(Axis.DP, rank, shards), str(rank), f"shard {rank} of {shards}")
    _ends(sketch, y + BAR, "first parameter", "last")


NARROW = 6.0
"""Below this width, experts of one rank are drawn as one."""


def _experts(sketch: Sketch, subject: Subject) -> str:
    """The routed experts of a layer as a bar, each in the shade of the ep index that holds it."""
    plan, ep = subject.plan, subject.plan.spec.parallelism.ep
    moe = plan.spec.model.shape.moe
    count = moe.num_experts if moe else 0
    if not count or ep == 1:
        said = f"ep 1: each rank holds all {count} experts of a layer." if count else "The model has no experts."
        sketch.caption(said, strong=True)
        return said
    slices = workload_of(plan.spec).expert_slices
    each = f", 1/{slices} of each" if slices > 1 else ""
    said = f"ep {ep} splits the {count} routed experts of each layer: a rank holds {count // ep} of them{each}."
    sketch.caption(said, strong=True)
    ranks = plan.groups.of_rank(Axis.EP, 0)
    top, wide = sketch.y + 8, sketch.width / count
    for index in range(ep):
        role = shade(Axis.EP, index, ep)
        for start, stop in owned_experts(count, ep, index):
            # Gaps between hundreds of experts would wash out their colours.
            size = 1 if wide >= NARROW else stop - start
            for first in range(start, stop, size):
                label = str(first) if size == 1 else f"{first}-{first + size - 1}"
                said_of = f"expert{'s' * (size > 1)} {label}: ep {index}"
                _part(sketch, first * wide, top, size * wide, role, label, said_of)
    _ends(sketch, top + BAR, "expert 0", f"{count - 1}")
    shown = min(ep, 8)
    sketch.legend([(shade(Axis.EP, index, ep), f"ep {index}: rank {ranks[index]}") for index in range(shown)])
    more = f" of the first {shown} of {ep} ranks" if shown < ep else ""
    sketch.caption(f"The colours are those of the ep group of rank 0{more}; other groups hold copies.", size=SMALL + 1)
    for one in subject.estimate.traffic:
        if one.group == Axis.EP:
            sent = f"All-to-all: a rank sends {format_bytes(one.wire_bytes)} in a step, "
            sent += f"{one.messages:,} messages {reached(one.leaves_node)}."
            sketch.caption(sent, size=SMALL + 1)
            said += f" {sent}"
    return said


def _part(sketch: Sketch, x: float, y: float, width: float, role: str, label: str, title: str) -> None:
    sketch.add(Box(x, y, max(width - 0.8, 0.4), BAR, role, title))
    if width > text_width(label, SMALL) + 6:
        sketch.add(Text(x + width / 2, y + 19, label, SMALL, f"on:{role}", "middle"))


def _ends(sketch: Sketch, y: float, first: str, last: str) -> None:
    sketch.add(Text(0, y + 14, first, SMALL, "soft"), Text(sketch.width, y + 14, last, SMALL, "soft", "end"))
    sketch.y = y + 18


_PANELS: dict[str, Callable[[Sketch, Subject], str]] = {
    Axis.TP: _weights,
    Axis.CP: _tokens,
    Axis.DP: _batch,
    Axis.PP: _layers,
    Axis.EP: _experts,
    "zero": _optimizer,
}
_NAMES = {"zero": "ZeRO"}


def lines(subject: Subject, *, unicode: bool = True) -> list[str]:  # noqa: ARG001 -- words only
    """For a terminal: what each panel says."""
    sketch = Sketch(1e6)
    return [_PANELS[name](sketch, subject) for name in _split(subject)]
