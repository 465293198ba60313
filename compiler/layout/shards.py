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

Which parameters Muon updates, and which rank orthogonalises each of their matrices.

Muon orthogonalises whole matrices. Those of the layers take it, as in Keller Jordan's and Moonlight's recipes
(arXiv 2502.16982) and the documentation of `torch.optim.Muon`; embeddings, heads, norms, biases, routers, convolutions
and all else take AdamW. A matrix is what the model keeps as one parameter, fused projections included; a stack of
experts, which transformers keeps as one parameter of three dims, is a matrix for each expert.

A matrix is orthogonalised once. Its elements lie in the shards of ZeRO, and where tp cuts it on several tp ranks: they
are sent to an owner and come back. Owners take turns, those with the most work first, so that a rank holds one matrix
(or one stack) at a time. What no tp rank has a part of is orthogonalised by each tp rank of the owner's place.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from parcompile.model import Parameter, Part, Split

from .groups import Axis, Grid

LOSS_CHUNK_ELEMENTS = 2**25
"""Logits that the loss holds in fp32 at a time, on an accelerator."""


def loss_chunk_tokens(columns: int) -> int:
    """Tokens whose logits exist at a time with training.linear_cross_entropy, of a rank with so many columns."""
    return max(1, LOSS_CHUNK_ELEMENTS // columns)


MLP_TILE_TOKENS = 1.0
"""Tokens of a tile of an MLP, for each of its input features (ALST, arXiv 2506.13996, section 3.1)."""


def mlp_tile_length(features: int, rows: int, share: int) -> int:
    """Tokens of each row that a rank gives to a tile with training.tiled_mlp, of an MLP with so many input features.

    `share` ranks give as many of theirs to the same tile.
    """
    return max(1, int(MLP_TILE_TOKENS * features) // (rows * share))


PIECE_BYTES = 2**23
"""A piece that is gathered under a product has at least this size over all ranks: smaller messages and products do not
fill links and GPUs."""
MOST_PIECES = 4
"""Of one sequence: more of them would hide little more, at the cost of more launches and smaller products."""


def page_locked_pieces(size: int) -> list[int]:
    """What a tensor of so many bytes, or numbers, is cut into on the host, where torch takes a power of two for each.

    Descending powers of two, until less than 1/16 of it is left: that is the last piece, whatever its size.
    """
    pieces, left = [], size
    while left:
        largest = 1 << left.bit_length() - 1
        pieces.append(largest if 16 * left >= size else left)
        left -= pieces[-1]
    return pieces


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


def expert_rows(factor: float, tokens: int, choices: int, experts: int) -> int:
    """Rows that an expert takes of the `tokens` of a rank, each with so many choices, where its share is limited.

    ⌈factor · tokens · choices / experts⌉, and no more than all tokens: Megatron-Core's `get_capacity`, above which its
    `apply_router_token_dropping` drops nothing.
    """
    return min(math.ceil(factor * tokens * choices / experts), tokens)


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


class OptimizerShard(NamedTuple):
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

    Experts that are dealt over ep are a group of their own, cut over the ranks that hold the same experts; so is what
    Muon updates, and what weight decay leaves out.
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


@functools.lru_cache(maxsize=4096)
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
    return padded, split._replace(parts=(Part(size, size),))


# Which parameters weight decay leaves out.

BIASES_AND_NORMS, VECTORS = "biases_and_norms", "vectors"
"""Values of `training.optimizer.no_weight_decay`: the choice of transformers' Trainer, and that of Megatron-LM."""
_BIAS_OR_NORM = re.compile(
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"
    r"|(?:^|\.)ln_\w+\.|^transformer\.(?:blocks\.{layer}\.)?norm_\w\."
)
"""The names of `Trainer.get_decay_parameter_names` (transformers 5.23), and those of torch's LayerNorm beside them."""


def is_decayed(parameter: Parameter, no_weight_decay: str | None) -> bool:
    """Whether weight decay takes a parameter, where it leaves out what this value names; None: it takes all.

    "vectors" are parameters of one dim, for each expert, and biases (`get_standard_config_overrides` of Megatron-LM's
    core/optimizer/__init__.py).
    """
    if no_weight_decay == BIASES_AND_NORMS:
        return _BIAS_OR_NORM.search(parameter.name.lower()) is None
    is_vector = len(parameter.shape) - (parameter.expert_dim is not None) <= 1 or parameter.name.endswith("bias")
    return no_weight_decay is None or not is_vector


class GroupKind(NamedTuple):
    """What the parameters of a group of the optimizer have in common, beside being experts that are dealt over ep."""

    takes_muon: bool = False
    is_decayed: bool = True


def group_kind(parameter: Parameter, *, muon: bool, no_weight_decay: str | None) -> GroupKind:
    """The group of the optimizer that a parameter is in."""
    return GroupKind(muon and takes_muon(parameter), is_decayed(parameter, no_weight_decay))


# Which parameters Muon updates, and which rank orthogonalises each of their matrices.

_NOT_HIDDEN = re.compile(r"(^|\.)(\w*router(_gate)?|gate|\w*expert_gate)\.|norm|embed")
"""Routers with all that lies in them, gates of shared experts, norms that have matrices, and tables."""
_EXPERTS = 3


def takes_muon(parameter: Parameter) -> bool:
    """Whether the matrices of a parameter are orthogonalised."""
    if parameter.layers is None or not parameter.trained or _NOT_HIDDEN.search(parameter.name):
        return False
    if parameter.expert_dim is not None:
        return len(parameter.shape) == _EXPERTS and parameter.expert_dim == 0
    return len(parameter.shape) == _EXPERTS - 1 and parameter.name.endswith(".weight")


class Owner(NamedTuple):
    """Who orthogonalises a matrix: a place in the group of the shards, and on tp; None: each tp rank of that place."""

    matrix: int
    shard: int
    tp: int | None


def rounds(work: Sequence[float], cut: Sequence[bool], shards: int, tp: int) -> list[list[Owner]]:
    """Turns of matrices with this much work, so that a rank orthogonalises one at a time.

    Args:
        work: of each matrix, in any unit.
        cut: whether the tp ranks have slices of it; in a turn are such ones alone, or others alone.
        shards: ranks of the group over which ZeRO shards them.
        tp: tensor-parallel ranks.
    """
    found = []
    for is_cut in (True, False):
        # The most work first; of equal ones in the model's order.
        order = sorted((one for one in range(len(work)) if cut[one] is is_cut), key=lambda one: -work[one])
        slots = shards * (tp if is_cut else 1)
        for first in range(0, len(order), slots):
            turn = enumerate(order[first : first + slots])
            found.append([Owner(one, slot % shards, slot // shards if is_cut else None) for slot, one in turn])
    return found


def newton_schulz_work(shape: Sequence[int], steps: int = 5) -> float:
    """Multiplications and additions of orthogonalising a matrix, or a stack of them: 2 · (2 m n² + n³) in a step."""
    *stack, rows, columns = shape
    long, short = max(rows, columns), min(rows, columns)
    return 2.0 * steps * (stack[0] if stack else 1) * (2 * long * short**2 + short**3)


def pieces(
    numels: Sequence[int], shards: int, *, of_each: bool, whole: bool = False, only: Sequence[int] | None = None
) -> list[list[tuple[int, int]]]:
    """Of each parameter of a group the elements `[start, stop)` in each shard, or in some.

    Args:
        numels: elements of the parameters on this rank, in the order of the group.
        shards: ranks of the group.
        of_each: each parameter is cut by itself, as at ZeRO stage 3; otherwise all of them as one.
        whole: every rank holds all, as at ZeRO stage 0.
        only: these shards; None: all of them.
    """
    found, offset, wanted = [], 0, range(shards) if only is None else only
    together = padded_numel(sum(numels), shards) // shards
    for numel in numels:
        size = -(-numel // shards) if of_each else together
        start = 0 if of_each else offset
        stretches = ((rank * size - start, (rank + 1) * size - start) for rank in wanted)
        held = [(min(max(first, 0), numel), min(max(last, 0), numel)) for first, last in stretches]
        found.append([(0, numel)] * len(wanted) if whole else held)
        offset += numel
    return found
