"""Tensors that published files store under other names than the model's, or expert by expert.

transformers renames and stacks them while it loads, and writes them back so; here only the slices that a rank needs are
read. Files of DeepSeek-V4 are published without the `model.` in front of the layers that transformers writes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parcompile.model.blocks import KNOWN
from parcompile.model.compressed_keys import STORED
from parcompile.user_files import shipped

RULES: Mapping[str, Sequence[Any]] = shipped(__package__, "stored_names.json")
_HEAD, *_REST = RULES["shorter"]
_SHORTER = (_HEAD, *STORED, *_REST)
_NORM = (r"\.kv_norm\.", ".norm.")


def short_names(name: str) -> tuple[str, ...]:
    """What a tensor of the model may be called: as transformers writes it, and as it is published."""
    short = _replaced(name, _SHORTER)
    found = (short, _replaced(short, (_NORM,)))
    return (*found, *(_replaced(one, RULES["published"]) for one in found))


def _replaced(name: str, rules: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


_BACKBONE = "backbone."
"""What stands for `model.` in files of Nemotron-H."""

_ATTENTION = (".self_attn.", ".attention.")
"""The model's name of attention, and the one in files of Bailing, where tensors inside have other names too."""

Opener = Callable[[str], Any]
"""From the name of a stored tensor to its safetensors slice."""

_RENAMED = RULES["renamed"]
"""Patterns of the model's names, and what stands there in files: as transformers writes them back, and as published."""
_JOINED = ((r"\.conv1d\.weight$", (".q_conv1d.weight", ".k_conv1d.weight", ".v_conv1d.weight")),)
"""The model's tensor, and the stored ones whose rows follow one another in it."""
_PIECES = tuple(pair for one in KNOWN for pair in one.pieces)
"""The model's tensor, and what its pieces are called by their numbers: their rows follow one another in it."""
_PARTS = RULES["parts"]
"""The model's tensors, and the stored one of which they are equal parts, in order."""
_EXPERTS = RULES["experts"]
"""The model's name, where the experts lie, and their parts in order."""


def stored_as(name: str, stored: Collection[str], opened: Opener) -> tuple[Any, set[str]] | None:
    """The slice of a tensor under the model's name, and the stored tensors that it is made of; None: there is none."""
    if name in stored:
        return opened(name), {name}
    if name.startswith("model.") and any(one.startswith(_BACKBONE) for one in stored):
        return stored_as(_BACKBONE + name.removeprefix("model."), stored, opened)
    for pattern, replacement in _RENAMED:
        other = re.sub(pattern, replacement, name)
        if other != name and other in stored:
            return opened(other), {other}
    for other in short_names(name):
        if other in stored:
            return opened(other), {other}
    if rows := _expert_by_expert(name, stored):
        return StackedExperts([_joined(row, opened) for row in rows]), {one for row in rows for one in row}
    for pattern, endings in _JOINED:
        names = [re.sub(pattern, ending, name) for ending in endings]
        if name not in names and all(one in stored for one in names):
            return _joined(names, opened), set(names)
    for pattern, ending in _PIECES:
        numbered = (re.sub(pattern, ending.format(piece), name) for piece in itertools.count())
        names = list(itertools.takewhile(lambda one: one != name and one in stored, numbered))
        if names:
            return _joined(names, opened), set(names)
    for pattern, replacement, order in _PARTS:
        found = re.search(pattern, name)
        if found and (other := re.sub(pattern, replacement, name)) in stored:
            whole, number = opened(other), order.index(found[1])
            size = whole.get_shape()[0] // len(order)
            return Rows(whole, number * size, (number + 1) * size), {other}
    return stored_as(name.replace(*_ATTENTION), stored, opened) if _ATTENTION[0] in name else None


def _joined(names: Sequence[str], opened: Opener) -> Joined:
    return Joined([opened(name) for name in names], names)


def written_as(name: str, whole: Tensor, stored: Collection[str], opened: Opener) -> dict[str, Tensor] | None:
    """A tensor of the model as the files store it, by stored name; None where it is a part of a stored one, or none."""
    entry = stored_as(name, stored, opened)
    if entry is None or isinstance(entry[0], Rows):
        return None
    if isinstance(entry[0], Joined | StackedExperts):
        return entry[0].parted(whole)
    (other,) = entry[1]
    return {other: whole}


def _expert_by_expert(name: str, stored: Collection[str]) -> list[list[str]]:
    """Of each expert the stored tensors whose rows follow one another in the model's; empty: there are none."""
    for pattern, place, parts in _EXPERTS:
        if not re.search(pattern, name):
            continue
        base = re.sub(pattern, place, name)
        rows: list[list[str]] = []
        while all(f"{base.format(len(rows))}.{part}.weight" in stored for part in parts):
            rows.append([f"{base.format(len(rows))}.{part}.weight" for part in parts])
        if rows:
            return rows
    return []


class Joined:
    """Several tensors as one; their rows follow one another."""

    def __init__(self, parts: Sequence[Any], names: Sequence[str] = ()) -> None:
        """`names`: of the stored ones, for `parted`."""
        self._parts, self._names = parts, names
        self._rows = [part.get_shape()[0] for part in parts]

    def parted(self, whole: Tensor) -> dict[str, Tensor]:
        """Another such tensor as the stored ones."""
        return dict(zip(self._names, torch.split(whole, self._rows), strict=True))

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return [sum(self._rows), *self._parts[0].get_shape()[1:]]

    def __getitem__(self, index: Any) -> Tensor:
        """The rows and further slices; only they are read."""
        start, stop, rest = _rows_and_rest(index, sum(self._rows))
        pieces, offset = [], 0
        for part, size in zip(self._parts, self._rows, strict=True):
            first, last = max(start - offset, 0), min(stop - offset, size)
            if first < last:
                place = (slice(first, last), *rest)
                pieces.append(part[place])
            offset += size
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class Rows:
    """A range of rows of a tensor."""

    def __init__(self, whole: Any, first: int, stop: int) -> None:
        self._whole, self._first, self._size = whole, first, stop - first

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return [self._size, *self._whole.get_shape()[1:]]

    def __getitem__(self, index: Any) -> Tensor:
        """The rows and further slices; only they are read."""
        start, stop, rest = _rows_and_rest(index, self._size)
        place = (slice(self._first + start, self._first + stop), *rest)
        found: Tensor = self._whole[place]
        return found


def _rows_and_rest(index: Any, size: int) -> tuple[int, int, tuple[slice, ...]]:
    """The first row, the one behind the last, and the slices of further dims."""
    rows, *rest = index if isinstance(index, tuple) else (slice(None) if index is ... else index,)
    start, stop, _ = rows.indices(size)
    return start, stop, tuple(rest)


class StackedExperts:
    """Many matrices as one [experts, rows, columns]; the rows of an expert's parts follow one another."""

    def __init__(self, experts: Sequence[Joined]) -> None:
        self._experts = experts

    def parted(self, whole: Tensor) -> dict[str, Tensor]:
        """Another such tensor as the stored ones."""
        parted = (expert.parted(matrix) for expert, matrix in zip(self._experts, whole, strict=True))
        return {name: part for parts in parted for name, part in parts.items()}

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return [len(self._experts), *self._experts[0].get_shape()]

    def __getitem__(self, index: Any) -> Tensor:
        """The experts, rows and columns of the given slices; only they are read."""
        places: tuple[slice, ...] = index if isinstance(index, tuple) else (slice(None),)
        return torch.stack([one[places[1:] or ...] for one in self._experts[places[0]]])
