"""Which layers each pipeline stage holds. No layer is ever dropped: what cannot be divided is an error.

Global stages follow each other through the layers. With virtual stages a pp rank holds several of them: rank r has the
global stages r, r + pp, r + 2 · pp, … (interleaved schedule, arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one stage, and whether it also holds the embedding (first) and the head with the loss (last)."""

    layers: range
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True, slots=True)
class PipelineSplit:
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
