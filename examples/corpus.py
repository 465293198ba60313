"""Real text that is on every machine: the source files of Python's standard library, as bytes."""

from __future__ import annotations

import random
import sysconfig
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
