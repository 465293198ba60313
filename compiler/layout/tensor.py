"""Which slice of each weight a tensor-parallel rank holds.

Sources: column and row splits, arXiv 1909.08053, section 3; the padded vocabulary is Megatron-LM's
`make_vocab_size_divisible_by`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from parcompile.model.table import Parameter, Part, Split

from .shards import Ranges, owned_experts


class SplitError(ValueError):
    """A size that tensor parallelism cannot cut evenly."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A parameter as a tp rank, and an ep rank where it holds routed experts, have it.

    `full_shape` includes padding. `ranges[rank]` are the pieces `[start, stop)` along `dim` that the rank holds, in
    order; None when every rank holds the whole tensor. `replicas` consecutive ranks hold the same slice. `ep` ranks
    share the experts, which lie along `expert_dim`; the last `idle_experts` of them are dealt apart from the others.
    """

    full_shape: tuple[int, ...]
    dim: int | None
    ranges: tuple[tuple[tuple[int, int], ...], ...] | None
    replicas: int
    ep: int = 1
    expert_dim: int = 0
    idle_experts: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape on each rank: slices are equal."""
        shape = list(self.full_shape)
        if self.dim is not None and self.ranges is not None:
            shape[self.dim] = sum(stop - start for start, stop in self.ranges[0])
        if self.ep > 1:
            shape[self.expert_dim] //= self.ep
        return tuple(shape)

    def experts(self, ep_rank: int) -> Ranges | None:
        """The experts of a rank of ep; None when every rank has all of them, or it holds none."""
        if self.ep == 1:
            return None
        return owned_experts(self.full_shape[self.expert_dim] - self.idle_experts, self.ep, ep_rank, self.idle_experts)

    @property
    def local_numel(self) -> int:
        """Elements on each rank."""
        return math.prod(self.local_shape)


def padded_vocab_size(vocab_size: int, tp: int, divisible_by: int) -> int:
    """The vocabulary rounded up to a multiple of `divisible_by · tp` (Megatron-LM's rule)."""
    multiple = divisible_by * tp
    return math.ceil(vocab_size / multiple) * multiple


def part_ranges(part: Part, tp: int, rank: int) -> tuple[int, int]:
    """The elements `[start, stop)` of a part that `rank` holds.

    Raises:
        SplitError: the units divide neither way.
    """
    unit = part.size // part.units
    if part.units % tp == 0:
        share = part.units // tp
        return rank * share * unit, (rank + 1) * share * unit
    if tp % part.units == 0:
        held = rank // (tp // part.units)
        return held * unit, (held + 1) * unit
    raise SplitError(f"{part.units} units on tp {tp}: neither {part.units} % {tp} nor {tp} % {part.units} is 0")


def part_replicas(part: Part, tp: int) -> int:
    """How many consecutive ranks hold the same unit: 1 unless there are fewer units than ranks."""
    return tp // part.units if part.units < tp and tp % part.units == 0 else 1


def tensor_layout(
    parameter: Parameter, tp: int, *, ep: int = 1, expert_tp: int | None = None, vocab_divisible_by: int = 1
) -> TensorLayout:
    """How `tp` ranks share a parameter, and `ep` ranks its experts, each of which `expert_tp` ranks share (None: tp).

    Raises:
        SplitError: it cannot be cut evenly.
    """
    if parameter.expert_dim is not None and expert_tp not in (None, tp):
        assert expert_tp is not None
        return _folded(tensor_layout(parameter, expert_tp, ep=ep), tp, expert_tp)
    split, shape = parameter.split, parameter.shape
    experts = (1, 0, 0) if parameter.expert_dim is None else (ep, parameter.expert_dim, parameter.idle_experts)
    if split is None:
        return TensorLayout(shape, None, None, tp, *experts)
    if split.pads_vocabulary:
        shape, split = _padded(shape, split, tp, vocab_divisible_by)
    ranges = []
    for rank in range(tp):
        offset, pieces = 0, []
        for part in split.parts:
            start, stop = part_ranges(part, tp, rank)
            pieces.append((offset + start, offset + stop))
            offset += part.size
        ranges.append(tuple(pieces))
    replicas = max(part_replicas(part, tp) for part in split.parts)
    return TensorLayout(shape, split.dim, tuple(ranges), replicas, *experts)


def _folded(layout: TensorLayout, tp: int, expert_tp: int) -> TensorLayout:
    """The slices of experts that `expert_tp` ranks share, as each of the `tp` ranks has them: neighbours share one."""
    if tp % expert_tp:
        raise SplitError(f"expert_tp {expert_tp} does not divide tp {tp}: {tp} / {expert_tp} is not whole")
    if expert_tp == 1 or layout.ranges is None:
        return replace(layout, dim=None, ranges=None)
    return replace(layout, ranges=layout.ranges * (tp // expert_tp))


def repeated_ranges(parameter: Parameter, layout: TensorLayout) -> tuple[tuple[int, int], ...]:
    """What of its slice a rank shares with the ranks that hold the same unit: ranges `[start, stop)` within the slice.

    All of it for keys and values with fewer heads than ranks; a part of it where they are fused with queries.
    """
    if parameter.split is None or layout.ranges is None or layout.replicas == 1:
        return ()
    found: list[tuple[int, int]] = []
    offset, tp = 0, len(layout.ranges)
    for part, (start, stop) in zip(parameter.split.parts, layout.ranges[0], strict=True):
        end = offset + stop - start
        if part_replicas(part, tp) > 1:
            found.append((found.pop()[0] if found and found[-1][1] == offset else offset, end))
        offset = end
    return tuple(found)


def _padded(shape: tuple[int, ...], split: Split, tp: int, divisible_by: int) -> tuple[tuple[int, ...], Split]:
    size = padded_vocab_size(shape[split.dim], tp, divisible_by)
    padded = (*shape[: split.dim], size, *shape[split.dim + 1 :])
    return padded, replace(split, parts=(Part(size, size),))
