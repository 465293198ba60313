"""Which slice of each weight, which experts and which part of the optimizer state a rank holds.

Which routed experts each rank of an ep group holds, and how many rows of hidden states it sends to the others.

Experts are dealt in equal runs, in their order, as in Megatron-Core and DeepSpeed: rank r of ep holds the experts
[r · E / ep, (r + 1) · E / ep). A row is one token on its way to one of its experts.

Which part of the optimizer state each rank of the dp × cp group holds under ZeRO-1.

Two rules are in use. DeepSpeed flattens a parameter group, pads it and cuts it into equal pieces; the even rule (as in
entrenar's `OptimizerShard`) gives the first ranks one element more. The runtime executes DeepSpeed's; both are
reported.

Sources: column and row splits, arXiv 1909.08053, section 3; the padded vocabulary is Megatron-LM's
`make_vocab_size_divisible_by`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from parcompile.model.table import Parameter, Part, Split

from .groups import Axis, Grid

# Which routed experts each rank of an ep group holds, and how many rows of hidden states it sends to the others.

LOSS_CHUNK_ELEMENTS = 2**25
"""Logits that the loss holds in fp32 at a time, on an accelerator."""


def loss_chunk_tokens(columns: int) -> int:
    """Tokens whose logits exist at a time with training.linear_cross_entropy, of a rank with so many columns."""
    return max(1, LOSS_CHUNK_ELEMENTS // columns)


COUNT_BYTES = 8
"""Before rows travel, ranks tell each other how many go to each expert: a number of so many bytes."""


Ranges = tuple[tuple[int, int], ...]
"""Stretches `[start, stop)` of experts, ascending."""


def owned_experts(experts: int, ep: int, rank: int, idle: int = 0) -> Ranges:
    """The experts of a rank; of further `idle` ones behind them, with which nothing is computed, a run of their own.

    Raises:
        ValueError: the experts do not divide, or there is no such rank.
    """
    if experts % ep or idle % ep or not 0 <= rank < ep:
        raise ValueError(f"{experts} experts on ep {ep}, rank {rank}: it needs experts % ep = 0 and 0 ≤ rank < ep")
    runs = [(0, experts // ep), (experts, idle // ep)]
    return tuple((first + rank * share, first + (rank + 1) * share) for first, share in runs if share)


def balanced_rows(rows: int, ep: int) -> int:
    """Rows that a rank sends to each of the others when every expert is chosen equally often; it keeps the rest."""
    return rows // ep


def shared_tokens(tokens: int, tp: int, rank: int) -> tuple[int, int]:
    """The tokens `[start, stop)` that a tensor-parallel rank sends to their experts: equal runs, the last ones shorter.

    The first rank has most: ⌈tokens / tp⌉.
    """
    share = -(-tokens // tp)
    return min(rank * share, tokens), min((rank + 1) * share, tokens)


def keeps_places(dense: Grid, expert: Grid) -> bool:
    """Whether every rank holds experts of its own stage, cut at its own place on tp.

    It has the same tp and pp coordinate in both grids then. Where fewer ranks share an expert than share a dense layer,
    those that hold the same experts have to have one place on tp: their optimizer shards are those of dp · cp.
    """
    if expert.size((Axis.TP,)) < dense.size((Axis.TP,)):
        tp, same_stage = dense.size((Axis.TP,)), dense.size((Axis.PP,)) == 1
        apart = expert.size((Axis.DP,)) > 1 and expert.stride(Axis.DP) % tp != 0
        same_stage = same_stage or dense.stride(Axis.PP) == expert.stride(Axis.PP)
        return dense.stride(Axis.TP) == 1 and same_stage and not apart
    return all(dense.size((axis,)) == 1 or dense.stride(axis) == expert.stride(axis) for axis in (Axis.TP, Axis.PP))


# Which part of the optimizer state each rank of the dp × cp group holds under ZeRO-1.

MASTER_BYTES = 4
"""Bytes of one fp32 master weight."""
ADAM_STATE_BYTES = 8
"""Bytes of Adam's two fp32 moments of one element."""
MOMENTUM_BYTES = 4
"""Bytes of one fp32 state of one element: the momentum of Muon's matrices and of SGD, the sums of Adagrad."""


@dataclass(frozen=True, slots=True)
class OptimizerShard:
    """Elements `[start, stop)` of the flattened parameter group; the last `padding` of them belong to no parameter."""

    start: int
    stop: int
    padding: int = 0

    @property
    def numel(self) -> int:
        """Elements of the shard, padding included."""
        return self.stop - self.start


def padded_numel(numel: int, shards: int) -> int:
    """The flattened group as DeepSpeed pads it: to a multiple of 2 · shards (NCCL wants 4-byte boundaries)."""
    multiple = 2 * shards
    return -(-numel // multiple) * multiple


def padded_shard(numel: int, shards: int, rank: int) -> OptimizerShard:
    """DeepSpeed's rule: equal shards of the padded group.

    Raises:
        ValueError: `rank` is not one of the shards.
    """
    _check(shards, rank)
    size = padded_numel(numel, shards) // shards
    start, stop = rank * size, (rank + 1) * size
    return OptimizerShard(start, stop, padding=max(0, stop - max(numel, start)))


def even_shard(numel: int, shards: int, rank: int) -> OptimizerShard:
    """The even rule: shard sizes differ by at most one, the first ones are larger.

    Raises:
        ValueError: `rank` is not one of the shards.
    """
    _check(shards, rank)
    size, larger = divmod(numel, shards)
    start = rank * size + min(rank, larger)
    return OptimizerShard(start, start + size + (rank < larger))


@dataclass(frozen=True, slots=True)
class ShardedGroups:
    """The flattened groups of a rank, and its shard of all of them.

    Experts that are dealt over ep are a group of their own, cut over the ranks that hold the same experts.
    """

    padded_numel: int
    shard_numel: int
    expert_numel: int
    """Of the shard, those of experts that are dealt over ep."""
    matrix_numel: int = 0
    """Of the shard, those of matrices that Muon orthogonalises, which have no second moment."""

    def __add__(self, other: ShardedGroups) -> ShardedGroups:
        """Both together."""
        return ShardedGroups(*(getattr(self, one) + getattr(other, one) for one in self.__slots__))


def sharded_groups(numel: int, shards: int, experts: int = 0, expert_shards: int = 1) -> ShardedGroups:
    """By DeepSpeed's rule, of `numel` parameters of which so many are in the group of `experts`."""
    dense, dealt = padded_numel(numel - experts, shards), padded_numel(experts, expert_shards)
    return ShardedGroups(dense + dealt, dense // shards + dealt // expert_shards, dealt // expert_shards)


def _check(shards: int, rank: int) -> None:
    if shards < 1 or not 0 <= rank < shards:
        raise ValueError(f"rank {rank} of {shards} optimizer shards: it needs 0 ≤ rank < shards and shards ≥ 1")


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
