"""Which ranks own which parameters of a stage under ZeRO stages 1 and 2.

DeepSpeed flattens the parameters of a group in the model's order and cuts them into shards (runtime/zero/
stage_1_and_2.py), of dense layers and of experts that are dealt over ep apart.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from parcompile.layout.pipeline import Stage
from parcompile.layout.shards import GroupKind, group_kind, padded_numel, tensor_layout
from parcompile.model import Parameter
from parcompile.model.derived_rows import parameter_table
from parcompile.model.families import family_of
from parcompile.model.layer_parts import MLP, modules_of
from parcompile.model.shape import ModelShape

from .workload import RankPlace, Workload


class Role(enum.IntEnum):
    """The part of a layer that a parameter belongs to: gradients do not come in the order of the model."""

    ROUTED = enum.auto()
    """Experts."""
    SHARED = enum.auto()
    """An expert of all tokens that runs behind these, and goes backward before them."""
    SHARED_FIRST = enum.auto()
    MLP = enum.auto()
    SUMMED = enum.auto()
    """Each rank of tp has a part of the gradient, which is summed at the end of the step."""
    OTHERS = enum.auto()


class Flat(NamedTuple):
    """A parameter of a rank."""

    numel: int
    is_dealt: bool
    kind: GroupKind
    role: Role
    layer: int
    """The place of its layer in the stage."""


class Kept(NamedTuple):
    """Of a rank, the parameters that lie in its shard at least in part."""

    numel: int
    first: int
    last: int
    """The places of the first and of the last of them in the model's order."""
    rank: int
    """The first that has these."""


_OfRow = tuple[tuple[int, bool, GroupKind, Role], ...]
"""Of each row of trained parameters the elements of a rank, whether they are dealt, its group, and its role."""
_NOTHING = Kept(0, -1, -1, -1)
_Runs = Sequence[tuple[int, Kept]]
"""What ranks have, each from a rank on: neighbours that have the same are one entry, of a million ranks few."""


class Spread(NamedTuple):
    """The ranks that own a parameter, from `start` to before `stop`; it begins at `begin` of the first's shard."""

    start: int
    stop: int
    begin: int
    shard: int
    """Elements of a shard."""


@dataclass(frozen=True, eq=False)
class Partition:
    """The parameters of a stage and their owners. Many layouts of a search have the same one: made by `partition`."""

    every: Sequence[Flat]
    """The parameters that a rank trains, in the model's order."""
    shards: int
    expert_shards: int

    @cached_property
    def spread(self) -> Sequence[Spread]:
        """The ranks that own each parameter."""
        groups = dict[tuple[bool, GroupKind], list[int]]()
        for number, one in enumerate(self.every):
            groups.setdefault((one.is_dealt, one.kind), []).append(number)
        found = [Spread(0, 0, 0, 1)] * len(self.every)
        for (is_dealt, _), members in groups.items():
            ranks, stop = self.expert_shards if is_dealt else self.shards, 0
            shard = max(1, padded_numel(sum([self.every[number].numel for number in members]), ranks) // ranks)
            for number in members:
                start, stop = stop, stop + self.every[number].numel
                found[number] = Spread(start // shard, -(-stop // shard), start % shard, shard)
        return found

    @cached_property
    def kept(self) -> tuple[_Runs, _Runs]:
        """Of the ranks that share dense layers, and of those that share experts which are dealt over ep."""
        changes = dict[int, list[int]](), dict[int, list[int]]()
        for number, (one, at) in enumerate(zip(self.every, self.spread, strict=True)):
            changes[one.is_dealt].setdefault(at.start, []).append(number)
            changes[one.is_dealt].setdefault(at.stop, []).append(~number)
        return _swept(self.every, changes[0]), _swept(self.every, changes[1])

    def kept_by(self, place: RankPlace) -> tuple[Kept, Kept]:
        """The same of one rank."""
        dense, dealt = self.kept
        return _of_rank(dense, place.shard), _of_rank(dealt, place.expert_shard)

    def largest_pieces(self, place: RankPlace) -> tuple[int, int]:
        """Elements of the largest piece of a parameter in a rank's shard: of dense layers, and of dealt experts."""
        largest = [0, 0]
        for one, at in zip(self.every, self.spread, strict=True):
            ahead = (place[one.is_dealt] - at.start) * at.shard - at.begin  # what ranks before have of it
            piece = min(ahead + at.shard, one.numel) - max(ahead, 0)
            largest[one.is_dealt] = max(largest[one.is_dealt], piece)
        return largest[0], largest[1]

    @cached_property
    def largest(self) -> tuple[int, int]:
        """Elements of the largest parameter, of which a shard may have less: of dense layers, and of dealt experts."""
        dense, dealt = (max([one.numel for one in self.every if one.is_dealt == which], default=0) for which in (0, 1))
        return dense, dealt


class _Cut(NamedTuple):
    """What the parameters of a rank depend on: few of what makes layouts of a search differ."""

    shape: ModelShape
    stage: Stage
    tp: int
    ep: int
    expert_tp: int | None
    vocab_divisible_by: int
    muon: bool
    no_weight_decay: str | None
    sums_partial: bool
    """Parts of gradients on the ranks of tp are summed at the end of a step."""
    sums_norms: bool
    runs_shared_first: bool


@lru_cache(maxsize=64)
def partition(work: Workload, stage: Stage) -> Partition:
    """The parameters of a stage and their owners."""
    at_end, shape = work.zero_stage == 1 and work.tp > 1, work.shape
    sums = at_end, at_end and work.sequence_parallel, work.runs_shared_first
    kinds = work.muon, work.no_weight_decay
    cut = _Cut(shape, stage, work.tp, work.ep, work.expert_tp, work.vocab_divisible_by, *kinds, *sums)
    return _partition(shape, stage, _of_rows(cut), work.shards, work.expert_shards)


@lru_cache(maxsize=256)
def _partition(shape: ModelShape, stage: Stage, of_row: _OfRow, shards: int, expert_shards: int) -> Partition:
    _, order = _trained(shape, stage)
    new = tuple.__new__  # as `Flat(...)`, of thousands of parameters for each layout of a search
    return Partition([new(Flat, (*of_row[row], layer)) for row, layer in order], shards, expert_shards)


def _of_rank(runs: _Runs, rank: int) -> Kept:
    return runs[bisect.bisect_right(runs, rank, key=lambda run: run[0]) - 1][1]


def _swept(every: Sequence[Flat], changes: Mapping[int, Sequence[int]]) -> _Runs:
    """From the ranks at which parameters begin (their number) and end (its complement), what each rank has."""
    here, runs = set[int](), [(0, _NOTHING)]
    for rank in sorted(changes):
        for change in changes[rank]:
            (here.add if change >= 0 else here.discard)(max(change, ~change))
        numel = sum([every[number].numel for number in here])
        runs.append((rank, Kept(numel, min(here, default=-1), max(here, default=-1), rank)))
    return runs


@lru_cache(maxsize=256)
def _of_rows(cut: _Cut) -> _OfRow:
    rows, _ = _trained(cut.shape, cut.stage)
    layouts = [
        tensor_layout(row, cut.tp, ep=cut.ep, expert_tp=cut.expert_tp, vocab_divisible_by=cut.vocab_divisible_by)
        for row in rows
    ]
    kinds = [group_kind(row, muon=cut.muon, no_weight_decay=cut.no_weight_decay) for row in rows]
    each = zip(layouts, kinds, map(_roles(cut), rows), strict=True)
    return tuple((one.local_numel, one.ep > 1, kind, role) for one, kind, role in each)


def _roles(cut: _Cut) -> Callable[[Parameter], Role]:
    experts = family_of(cut.shape.model_type).experts
    beside = f".{experts.shared}." if experts is not None and experts.shared else None
    in_mlp = [f".{{layer}}.{name}." for name in modules_of(cut.shape, MLP)]

    def role(row: Parameter) -> Role:
        if (cut.sums_partial and row.partial) or (cut.sums_norms and row.sequence_parallel):
            return Role.SUMMED
        if row.expert_dim is not None:
            return Role.ROUTED
        if beside is not None and beside in row.name:
            return Role.SHARED_FIRST if cut.runs_shared_first else Role.SHARED
        return Role.MLP if any(inside in row.name for inside in in_mlp) else Role.OTHERS

    return role


@lru_cache(maxsize=64)
def _trained(shape: ModelShape, stage: Stage) -> tuple[Sequence[Parameter], Sequence[tuple[int, int]]]:
    """Rows of trained parameters; and of each parameter its row's number and its layer's place, in order."""
    table, rows, order = parameter_table(shape), dict[int, Parameter](), list[tuple[int, int]]()
    places, before = dict[int, int](), {id(row) for row in table.before}
    for row, layer in table.in_order():
        is_before = id(row) in before
        at_end = stage.has_embedding if is_before else stage.has_head
        if row.trained and (at_end if layer is None else layer in stage.layers):
            end = -1 if is_before else len(stage.layers)
            rows[id(row)] = row
            order.append(
                (places.setdefault(id(row), len(places)), end if layer is None else layer - stage.layers.start)
            )
    return tuple(rows.values()), order
