"""How one parameter is cut, and whose tokens or heads it works on: what a row of a parameter table says beside it."""

from __future__ import annotations

from dataclasses import dataclass

from parcompile.model.table import Part, Split


@dataclass(frozen=True, slots=True)
class Cut:
    """The fields of the same names of `Parameter`."""

    split: Split | None = None
    expert_dim: int | None = None
    sequence_parallel: bool = False
    partial: bool = False
    trained: bool = True


STREAM = Cut(sequence_parallel=True)
"""Whole on every rank, which works on its own tokens: norms of the stream, biases behind a sum over ranks."""

FROZEN = Cut(trained=False)
"""Whole on every rank, all of which compute the same with it; it gets no gradient."""

PARTIAL = Cut(partial=True)
"""Whole on every rank, which works on its own heads, features or experts."""


def columns(parts: tuple[Part, ...], dims: int, *, transposed: bool) -> Cut:
    """A linear cut by its outputs, or its bias."""
    return Cut(Split(1 if transposed and dims > 1 else 0, parts))


def rows(part: Part, *, transposed: bool) -> Cut:
    """A linear's weight cut by its inputs."""
    return Cut(Split(0 if transposed else 1, (part,)))
