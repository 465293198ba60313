"""Data sets that can only be read from the beginning on, as samples with numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any


def can_begin_anew(data: object) -> bool:
    """Whether iterating over it begins at the first sample each time, as an iterator or a generator does not."""
    return isinstance(data, Iterable) and not isinstance(data, Iterator)


def check_length(data: object, taker: str) -> None:
    """Refuses a stream where the number of samples has to be known.

    Raises:
        ValueError: the data have no length.
    """
    if not hasattr(data, "__len__"):
        raise ValueError(
            f"{taker} takes a sequence, and a {type(data).__name__} has no length; list(data.take(n)) is a sequence"
        )


class Stream:
    """Samples of an iterable by their numbers, which rise: sample n is the n-th, whatever the layout is.

    A rank passes by the samples of others, and a run that resumes those of the steps before: each costs its reading.
    At its end the stream begins anew, behind `set_epoch` where it has that (`datasets.IterableDataset`). So its samples
    have to be the same each time, but for the epoch's shuffling. Nothing but the sample itself is held in memory.

    Args:
        data: the iterable: each `iter(data)` begins at the first sample.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self._epoch = self._next = 0
        self._samples: Iterator[Any] | None = None

    def __len__(self) -> int:
        """As many as numbers go: where the stream ends is known when it ends."""
        return sys.maxsize

    def __getitem__(self, number: int) -> Any:
        """The sample; those between this and the one before are passed by.

        Raises:
            ValueError: the stream has none.
        """
        if self._samples is None or number < self._next:
            self._epoch = self._next = 0
            self._samples = self._begun()
        while self._next < number:
            self._following()
        return self._following()

    def _begun(self) -> Iterator[Any]:
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(self._epoch)
        return iter(self._data)

    def _following(self) -> Any:
        assert self._samples is not None
        found = next(self._samples, self)
        if found is self:
            self._epoch += 1
            self._samples = self._begun()
            found = next(self._samples, self)
        if found is self:
            raise ValueError("the data set is empty" if self._next == 0 else "the stream is empty when it begins anew")
        self._next += 1
        return found
