"""Which layers each pipeline stage holds, and the schedule: which pass each pp rank computes after which.

Global stages follow each other through the layers. With virtual stages a pp rank holds several of them: rank r has the
global stages r, r + pp, r + 2 · pp, … (interleaved schedule, arXiv 2104.04473, section 2.2).
No layer is ever dropped: what cannot be divided is an error.

1F1B (arXiv 2104.04473, section 2.2): a rank runs a few micro-batches forward ahead, then one forward and one backward
in turn, then what is left backward. With virtual stages it is interleaved: global stage `chunk · pp + rank` is a rank's
chunk, and `group` micro-batches go through one chunk before the next is taken up. The runtime executes these passes in
this order; the plan lists them; estimates and pictures lay them out in seconds.

A message travels between neighbours around the ring of ranks. Its receive is posted one pass before the pass that needs
it, and a sender goes on to its next pass. Messages of one kind from one rank to the next are a lane. Each lane has a
communicator of its own, of its two ranks: a communicator carries messages in the order in which a rank posts them, so
that one that several lanes share would wait for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

RECEIVES_AHEAD = 1
"""Passes by which a receive is posted before the pass that needs it: one buffer is in use while another fills."""


class Pass(NamedTuple):
    """One forward or backward pass of a micro-batch through a chunk of layers."""

    forward: bool
    micro_batch: int
    chunk: int

    def label(self, virtual: int) -> str:
        """F3 is the forward pass of micro-batch 3; with virtual stages the chunk follows: B3.1."""
        name = f"{'F' if self.forward else 'B'}{self.micro_batch}"
        return name if virtual == 1 else f"{name}.{self.chunk}"


class Lane(NamedTuple):
    """The messages of one kind from one rank of a pipeline to its neighbour."""

    sender: int
    receiver: int
    forward: bool
    """Whether they are hidden states; else gradients."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The passes of a step on every rank of a pipeline.

    `group` micro-batches go through one chunk before the next one is taken up: pp in Megatron-LM, unless
    `microbatch_group_size_per_virtual_pipeline_stage` says otherwise.
    """

    pp: int
    micro_batches: int
    virtual: int = 1
    group: int | None = None

    @property
    def name(self) -> str:
        """What it is called."""
        return "1F1B" if self.virtual == 1 else "interleaved 1F1B"

    @property
    def group_size(self) -> int:
        """Micro-batches that go through one chunk after the other."""
        return self.group or self.pp

    def passes(self, rank: int) -> list[Pass]:
        """What a rank computes, in order."""
        ahead = self.forward_passes()
        back = [Pass(False, one.micro_batch, self.virtual - 1 - one.chunk) for one in ahead]
        warm_up = self.warm_up(rank)
        steady = [one for pair in zip(ahead[warm_up:], back, strict=False) for one in pair]
        return [*ahead[:warm_up], *steady, *back[len(ahead) - warm_up :]]

    def forward_passes(self) -> list[Pass]:
        """The forward passes alone, in order: those of an evaluation. They are the same on every rank."""
        if self.virtual == 1:
            return [Pass(True, micro, 0) for micro in range(self.micro_batches)]
        return [
            Pass(True, micro, chunk)
            for start in range(0, self.micro_batches, self.group_size)
            for chunk in range(self.virtual)
            for micro in range(start, min(start + self.group_size, self.micro_batches))
        ]

    def warm_up(self, rank: int) -> int:
        """Forward passes of a rank before its first backward pass has its turn."""
        if self.virtual == 1:
            return min(self.pp - rank - 1, self.micro_batches)
        ahead = (self.pp - rank - 1) * 2 + (self.virtual - 1) * self.group_size
        return min(ahead, self.micro_batches * self.virtual)

    def in_flight(self, rank: int) -> int:
        """Chunks whose activations a rank holds at most: forward has run through them, backward has not ended."""
        return min(self.warm_up(rank) + 1, self.micro_batches * self.virtual)

    def source(self, rank: int, one: Pass) -> int | None:
        """The rank that sends what a pass begins with; None: it begins with tokens, or with the loss of this rank."""
        return self._neighbour(rank, one, -1 if one.forward else 1)

    def target(self, rank: int, one: Pass) -> int | None:
        """The rank that gets what a pass ends with; None: it ends with the loss, or nothing comes before it."""
        return self._neighbour(rank, one, 1 if one.forward else -1)

    def _neighbour(self, rank: int, one: Pass, way: int) -> int | None:
        stage = one.chunk * self.pp + rank + way
        return (rank + way) % self.pp if 0 <= stage <= self.last_stage else None

    @property
    def last_stage(self) -> int:
        """The global stage with the loss."""
        return self.pp * self.virtual - 1

    @property
    def sends_under_way(self) -> int:
        """Messages of a lane that a sender may have under way when it posts another: two, or what waits for its group.

        With groups of more than pp micro-batches a chunk's outputs are sent before the next chunk has room for them.
        """
        return 2 + (max(0, self.group_size - self.pp) if self.virtual > 1 else 0)

    def lanes(self) -> list[list[Lane]]:
        """The lanes of a pipeline in rounds: within one each rank has a lane at most.

        Neighbours are taken in turn, so that there are two or three rounds for hidden states and as many for
        gradients, however long the pipeline is. With virtual stages the last rank is a neighbour of the first.
        """
        firsts = range(self.pp - 1 if self.virtual == 1 or self.pp == 1 else self.pp)
        last_of_odd = self.pp - 1 if self.pp % 2 else None
        rounds = [[first for first in firsts if first % 2 == turn and first != last_of_odd] for turn in (0, 1)]
        rounds.append([first for first in firsts if first == last_of_odd])
        return [
            [Lane(*(pair if forward else pair[::-1]), forward) for pair in pairs]
            for pairs in ([(first, (first + 1) % self.pp) for first in turn] for turn in rounds if turn)
            for forward in (True, False)
        ]

    def sends(self, rank: int) -> tuple[int, int]:
        """Messages that a rank sends in a step: hidden states, and gradients."""
        passes = (Pass(forward, 0, chunk) for forward in (True, False) for chunk in range(self.virtual))
        found = [one.forward for one in passes if self.target(rank, one) is not None]
        return self.micro_batches * sum(found), self.micro_batches * (len(found) - sum(found))


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one stage, and whether it also holds the embedding (first) and the head with the loss (last)."""

    layers: range
    has_embedding: bool
    has_head: bool


class PipelineSplit(NamedTuple):
    """How layers are counted out to `pp · virtual` global stages.

    `embedding` and `loss` let the embedding or the head with its loss take the place of one layer; `first` and `last`
    are the layers of the first and the last pp rank, all its virtual stages together. The two ways exclude each other.
    """

    pp: int
    virtual: int = 1
    embedding: bool = False
    loss: bool = False
    first: int | None = None
    last: int | None = None

    def counts(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each global stage; they add up to `num_layers`.

        Raises:
            ValueError: they do not divide; the message has the equation.
        """
        if self.pp < 1 or self.virtual < 1:
            raise ValueError(f"pp {self.pp} with {self.virtual} virtual stages: both have to be 1 or more")
        if self.first is None and self.last is None:
            return self._even_counts(num_layers)
        if self.embedding or self.loss:
            raise ValueError(
                "layers of the first or last stage are given: embedding and loss cannot count as layers as well"
            )
        return self._counts_around_given(num_layers)

    def _even_counts(self, num_layers: int) -> tuple[int, ...]:
        stages = self.pp * self.virtual
        total = num_layers + self.embedding + self.loss
        terms = f"{num_layers} layers" + " + 1 for the embedding" * self.embedding + " + 1 for the loss" * self.loss
        terms = f"({terms})" if total != num_layers else terms
        virtual = f" · {self.virtual} virtual" if self.virtual > 1 else ""
        if total % stages:
            raise ValueError(f"{terms} on {self.pp} stages{virtual}: {total} / {stages} is not whole")
        counts = [total // stages] * stages
        counts[0] -= self.embedding
        counts[-1] -= self.loss
        if min(counts) < 0:
            raise ValueError(f"{terms} on {self.pp} stages{virtual}: a stage would have {min(counts)} layers")
        return tuple(counts)

    def _counts_around_given(self, num_layers: int) -> tuple[int, ...]:
        ends = {0: self.first, self.pp - 1: self.last}
        given = {rank: layers for rank, layers in ends.items() if layers is not None}
        if self.first is not None and self.last is not None and self.pp == 1:
            raise ValueError(f"first {self.first} and last {self.last} layers are given, but pp 1 has one stage")
        rest, others = num_layers - sum(given.values()), self.pp - len(given)
        equation = f"({num_layers} layers − {' − '.join(map(str, given.values()))} given) on {others} other stages"
        if rest < 0 or (others == 0 and rest) or (others and rest % others):
            raise ValueError(f"{equation}: {rest} / {others} is not whole")
        per_rank = [given.get(rank, rest // max(others, 1)) for rank in range(self.pp)]
        for rank, layers in enumerate(per_rank):
            if layers % self.virtual:
                raise ValueError(
                    f"{layers} layers of stage {rank} in {self.virtual} virtual stages: "
                    f"{layers} / {self.virtual} is not whole"
                )
        return tuple(layers // self.virtual for _ in range(self.virtual) for layers in per_rank)


def stages_from_counts(counts: Sequence[int]) -> tuple[Stage, ...]:
    """Global stages with these many layers, in order."""
    bounds = [0, *accumulate(counts)]
    last = len(counts) - 1
    return tuple(
        Stage(range(bounds[index], bounds[index + 1]), has_embedding=index == 0, has_head=index == last)
        for index in range(len(counts))
    )


def merged(stages: Sequence[Stage], boundary: int) -> Stage:
    """One stage that stands for all that a pp rank holds when layers are counted.

    With virtual stages the layers of a rank are no range: this one has as many on each side of `boundary`, where the
    kind of the layers changes.
    """
    if len(stages) == 1:
        return stages[0]
    before = sum(len(range(stage.layers.start, min(stage.layers.stop, boundary))) for stage in stages)
    start, count = boundary - before, sum(len(stage.layers) for stage in stages)
    return Stage(
        range(start, start + count),
        has_embedding=any(stage.has_embedding for stage in stages),
        has_head=any(stage.has_head for stage in stages),
    )


@lru_cache(maxsize=256)  # a search asks for the same ones for every stage of every layout
def even_stages(num_layers: int, pp: int) -> tuple[Stage, ...]:
    """`num_layers / pp` layers on each of `pp` stages.

    Raises:
        ValueError: the layers do not divide evenly.
    """
    return stages_from_counts(PipelineSplit(pp).counts(num_layers))


def rank_stages(num_layers: int, split: PipelineSplit) -> tuple[tuple[Stage, ...], ...]:
    """For each pp rank its (virtual) stages, in the order of the layers.

    Raises:
        ValueError: the layers do not divide.
    """
    stages = stages_from_counts(split.counts(num_layers))
    return tuple(stages[rank :: split.pp] for rank in range(split.pp))
