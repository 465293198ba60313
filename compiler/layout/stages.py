"""Which layers each pipeline stage holds. No layer is ever dropped: their number has to be divisible."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one stage, and whether it also holds the embedding (first) and the head with the loss (last)."""

    layers: range
    has_embedding: bool
    has_head: bool


def even_stages(num_layers: int, pp: int) -> tuple[Stage, ...]:
    """`num_layers / pp` layers on each of `pp` stages.

    Raises:
        ValueError: the layers do not divide evenly.
    """
    if pp < 1 or num_layers % pp:
        raise ValueError(f"{num_layers} layers on {pp} stages: {num_layers} / {pp} is not whole")
    share = num_layers // pp
    return tuple(Stage(range(index * share, (index + 1) * share), index == 0, index == pp - 1) for index in range(pp))
