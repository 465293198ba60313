"""Real text that is on every machine: the source files of Python's standard library, as bytes."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


class StandardLibrary:
    """Windows of `length` bytes of the standard library's source, in an order drawn from `seed`.

    The text is the top-level modules, sorted by name; the same Python version reads the same text everywhere.
    """

    def __init__(self, length: int, seed: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._length = length
        self._order = list(range(len(self._bytes) // length))
        random.Random(seed).shuffle(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Tensor:
        start = self._order[index] * self._length
        return self._bytes[start : start + self._length].long()


class PackedSources:
    """Sequences of `length` bytes, filled with source files one after the other; positions begin anew with each."""

    def __init__(self, length: int, count: int) -> None:
        stream = self._tokens()
        self._samples = [self._sample(stream, length) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._samples[index]

    def _tokens(self) -> Iterator[tuple[int, int]]:
        """Bytes with their positions in their file."""
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            for position, byte in enumerate(file.read_bytes()[:2000]):
                yield byte, position

    def _sample(self, stream: Iterator[tuple[int, int]], length: int) -> dict[str, Tensor]:
        ids, positions = zip(*(next(stream) for _ in range(length)), strict=True)
        # A document that goes on from the sequence before begins anew here.
        places = torch.tensor(positions)
        first = int((places == 0).nonzero()[0]) if bool((places == 0).any()) else length
        places[:first] = torch.arange(first)
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids), "position_ids": places}
