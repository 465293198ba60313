"""Sequences of the plan's length by number: windows of a stream of tokens, packed documents, mixtures of data sets."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parcompile.runtime.errors import everywhere
from parcompile.runtime.labels import IGNORED_LABEL


def shuffled(count: int, seed: int) -> list[int]:
    """0 … count − 1 in an order drawn from the seed."""
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def packed(numbers: Sequence[int], lengths: Sequence[int], room: int, at_once: int = 64) -> list[list[int]]:
    """Documents in groups of at most `room` tokens: each into the first of `at_once` open groups that has room."""
    full: list[list[int]] = []
    open_groups: list[list[int]] = []
    left: list[int] = []
    for number in numbers:
        into = next((at for at, free in enumerate(left) if free >= lengths[number]), len(left))
        if into == len(left):
            open_groups.append([])
            left.append(room)
        open_groups[into].append(number)
        left[into] -= lengths[number]
        if len(left) > at_once:
            fullest = left.index(min(left))
            full.append(open_groups.pop(fullest))
            del left[fullest]
    return full + open_groups


class Part(NamedTuple):
    """Tokens `first` … `end` − 1 of a document; `document` is its file with its line, row or number there."""

    file: str
    document: str
    first: int
    end: int


Places = Callable[[Collection[int]], Mapping[int, tuple[str, str]]]
"""The file and the document as `Part` names them, by the numbers of documents."""


class SequencesOfFiles(ABC):
    """Sequences of the plan's length, by number; `summary` says what was read, in one line."""

    summary: str
    _order: list[int]

    def __len__(self) -> int:
        return len(self._order)

    def _shuffle(self, count: int, seed: int) -> None:
        self._order = shuffled(count, seed)

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input_ids` and `labels` [S], and of packed documents `position_ids` and `attention_mask`."""

    @abstractmethod
    def extremes(self) -> tuple[int, int]:
        """The smallest and the largest token of all; of Megatron's files, of the first 16 million of each."""

    @abstractmethod
    def parts(self, indices: Sequence[int]) -> list[list[Part]]:
        """Of which documents these sequences are, in the order of their tokens, without padding."""


def _parts(spans: Sequence[Sequence[tuple[int, int, int]]], places: Places) -> list[list[Part]]:
    """Of sequences the documents by number, each with the first of its tokens there and the one behind the last."""
    names = places({number for row in spans for number, *_ in row})
    return [[Part(*names[number], first, end) for number, first, end in row] for row in spans]


class Mixture(SequencesOfFiles):
    """Data sets in turn by their weights: the next sequence is of the one that is furthest behind its share.

    Which one it is, and which of its sequences, follows from the sequence's number alone; the rule and its result are
    those of Megatron's blended data set (`build_blending_indices` in megatron/core/datasets/helpers.cpp). Each is
    walked round and round in its own order. A mixture ends where the share of each is as long as itself.
    """

    def __init__(self, names: Sequence[str], parts: Sequence[SequencesOfFiles], weights: Sequence[float]) -> None:
        self._parts, self.weights = parts, [weight / sum(weights) for weight in weights]
        self._length = math.ceil(max(len(part) / weight for part, weight in zip(parts, self.weights, strict=True)))
        self._counts = [0] * len(parts)
        self._sources, self._numbers = array("h"), array("q")
        said = [
            f"{name} ({weight:.4g}, {self._length * weight / len(part):.4g} times): {part.summary}"
            for name, weight, part in zip(names, self.weights, parts, strict=True)
        ]
        self.summary = f"{len(self):,} sequences of {len(parts)} data sets: {'; '.join(said)}"

    def __len__(self) -> int:
        return self._length

    def source(self, index: int) -> tuple[int, int]:
        """The data set of a sequence, by its place among them, and the sequence's number in it.

        Raises:
            IndexError: there is no such sequence.
        """
        if not 0 <= index < self._length:
            raise IndexError(index)
        while len(self._sources) <= index:
            many = max(len(self._sources), 1)
            behind = [weight * many - count for weight, count in zip(self.weights, self._counts, strict=True)]
            source = behind.index(max(behind))
            self._sources.append(source)
            self._numbers.append(self._counts[source])
            self._counts[source] += 1
        source = self._sources[index]
        return source, self._numbers[index] % len(self._parts[source])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source, number = self.source(index)
        found = self._parts[source][number]
        if "position_ids" not in found and any(isinstance(part, Packed) for part in self._parts):
            ids = found["input_ids"]  # samples of a batch have the same names
            found |= {"position_ids": torch.arange(len(ids)), "attention_mask": torch.ones_like(ids)}
        return found

    def extremes(self) -> tuple[int, int]:
        """Of all tokens."""
        found = [part.extremes() for part in self._parts]
        return min(low for low, _ in found), max(high for _, high in found)

    def parts(self, indices: Sequence[int]) -> list[list[Part]]:
        """Of which documents they are."""
        places = [self.source(index) for index in indices]
        found: dict[tuple[int, int], list[Part]] = {}
        for source in {source for source, _ in places}:
            numbers = [number for one, number in places if one == source]
            rows_of = self._parts[source].parts(numbers)
            found |= {(source, number): row for number, row in zip(numbers, rows_of, strict=True)}
        return [found[place] for place in places]


class Windows(SequencesOfFiles):
    """A stream of tokens, cut; a stream that is shorter than one sequence is padded with places that count nothing."""

    def __init__(
        self,
        parts: Sequence[NDArray[np.integer]],
        starts: Sequence[NDArray[np.int64]],
        places: Places,
        length: int,
        seed: int,
    ) -> None:
        self._parts, self._length, self._places = parts, length, places
        ends = list(itertools.accumulate(map(len, parts), initial=0))
        self._starts = np.concatenate([of_part + end for of_part, end in zip(starts, ends, strict=False)])
        self._ends = np.append(self._starts[1:], ends[-1])
        self._offsets = ends
        self._counts = [len(part) // length for part in parts]
        tokens = sum(map(len, parts))
        if not tokens:
            raise everywhere("the training data hold no token: every text is empty")
        if not any(self._counts):
            self._parts = [np.concatenate([np.asarray(part) for part in parts])[:length]]
            self._counts = [1]
        self._shuffle(sum(self._counts), seed)
        self.summary = f"{tokens:,} tokens, {len(self):,} sequences of {length:,}"
        if tokens < length:
            self.summary += f", of which {length - tokens:,} are padding"

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        part, number = self._window(index)
        cut = self._parts[part][number * self._length : (number + 1) * self._length]
        ids = torch.from_numpy(np.asarray(cut).astype(np.int64))
        padding = self._length - len(ids)
        if not padding:
            return {"input_ids": ids, "labels": ids}
        pad = torch.nn.functional.pad
        return {"input_ids": pad(ids, (0, padding)), "labels": pad(ids, (0, padding), value=IGNORED_LABEL)}

    def _window(self, index: int) -> tuple[int, int]:
        """The part of a sequence, and its number there."""
        number, part = self._order[index], 0
        while number >= self._counts[part]:
            number, part = number - self._counts[part], part + 1
        return part, number

    def parts(self, indices: Sequence[int]) -> list[list[Part]]:
        """Of which documents they are."""
        return _parts(list(map(self._spans, indices)), self._places)

    def _spans(self, index: int) -> list[tuple[int, int, int]]:
        part, number = self._window(index)
        first = self._offsets[part] + number * self._length
        end = min(first + self._length, self._offsets[-1])
        own = range(int(np.searchsorted(self._ends, first, side="right")), int(np.searchsorted(self._starts, end)))
        found = []
        for document in own:
            start, stop = int(self._starts[document]), int(self._ends[document])
            if start < stop:
                found.append((document, max(first, start) - start, min(end, stop) - start))
        return found

    def extremes(self) -> tuple[int, int]:
        """Of all tokens."""
        return _extremes(part[: 2**24] for part in self._parts)


class Packed(SequencesOfFiles):
    """Documents with labels, as many in a sequence as fit, none attending to another; the rest is padding."""

    def __init__(
        self, documents: Sequence[tuple[NDArray[Any], NDArray[Any]]], places: Places, length: int, seed: int
    ) -> None:
        self._documents, self._places, self._length = documents, places, length
        lengths = [len(ids) for ids, _ in documents]
        self._packs = packed(shuffled(len(documents), seed), lengths, length)
        self._shuffle(len(self._packs), seed)
        predicted = sum(int((labels != IGNORED_LABEL).sum()) for _, labels in documents)
        tokens = sum(lengths)
        self.summary = (
            f"{len(documents):,} conversations or documents, {tokens:,} tokens of which {predicted:,} are predicted, "
            f"{len(self):,} sequences of {length:,}"
        )

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.zeros(self._length, dtype=torch.long)
        labels = torch.full_like(ids, IGNORED_LABEL)
        positions, mask, at = torch.zeros_like(ids), torch.zeros_like(ids), 0
        for number in self._packs[self._order[index]]:
            tokens, targets = (torch.from_numpy(one.astype(np.int64)) for one in self._documents[number])
            place = slice(at, at + len(tokens))
            ids[place], labels[place], mask[place] = tokens, targets, 1
            positions[place] = torch.arange(len(tokens))
            at += len(tokens)
        positions[at:] = torch.arange(self._length - at)
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": mask}

    def parts(self, indices: Sequence[int]) -> list[list[Part]]:
        """Of which documents they are."""
        packs = [self._packs[self._order[index]] for index in indices]
        return _parts(
            [[(number, 0, len(self._documents[number][0])) for number in pack] for pack in packs], self._places
        )

    def extremes(self) -> tuple[int, int]:
        """Of all tokens."""
        return _extremes(one for ids, labels in self._documents for one in (ids, labels[labels != IGNORED_LABEL]))


def _extremes(parts: Iterable[NDArray[Any]]) -> tuple[int, int]:
    held = [(int(part.min()), int(part.max())) for part in parts if len(part)]
    return min(low for low, _ in held), max(high for _, high in held)
