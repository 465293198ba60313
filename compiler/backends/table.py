"""One table for a tool: its options, and the values of a spec that they stand for. Both directions follow from it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parcompile.spec import Spec

from .losses import Loss
from .reading import Draft, Source, SpecPath

Arguments = dict[str, Any]
"""Options with their values, by the name that the tool gives them."""


def _same(value: Any) -> Any:
    return value


def _read_same(value: Any, _name: str) -> Any:
    return value


def _nothing(_spec: Spec) -> Iterator[Loss]:
    return iter(())


@dataclass(frozen=True, slots=True)
class Entry:
    """An option that stands for one value of the spec.

    `write` and `read` turn one into the other; what `write` gives None for is not written.
    """

    option: str
    path: SpecPath
    write: Callable[[Any], Any] = _same
    read: Callable[[Any, str], Any] = _read_same


@dataclass(frozen=True, slots=True)
class Bundle:
    """Options that stand for values of the spec only together, and what of those values they cannot say."""

    options: tuple[str, ...]
    write: Callable[[Spec], Arguments]
    read: Callable[[Source, Draft], None]
    losses: Callable[[Spec], Iterable[Loss]] = _nothing


Row = Entry | Bundle


def write(rows: Sequence[Row], spec: Spec) -> Arguments:
    """What a spec is in the tool's options."""
    found: Arguments = {}
    for row in rows:
        if isinstance(row, Bundle):
            found |= row.write(spec)
            continue
        value = value_at(spec, row.path)
        written = None if value is None else row.write(value)
        if written is not None:
            found[row.option] = written
    return found


def read(rows: Sequence[Row], source: Source, draft: Draft) -> None:
    """Takes the options over into a draft, in the order of the table."""
    for row in rows:
        if isinstance(row, Bundle):
            row.read(source, draft)
        else:
            draft.carry(source, row.option, row.path, row.read)


def losses(rows: Sequence[Row], spec: Spec) -> Iterator[Loss]:
    """What the tool cannot say of a spec."""
    for row in rows:
        if isinstance(row, Bundle):
            yield from row.losses(spec)


def names(rows: Sequence[Row]) -> frozenset[str]:
    """The options that the table speaks of."""
    return frozenset(name for row in rows for name in (row.options if isinstance(row, Bundle) else (row.option,)))


_RENAMED: Mapping[SpecPath, str] = {("zero", "stage"): "zero_stage"}


def value_at(spec: Spec, path: SpecPath) -> Any:
    """A value of a resolved spec by its path in the file: enumerations as their text, tuples as lists."""
    node: Any = spec
    for step in (_RENAMED[path],) if path in _RENAMED else path:
        node = getattr(node, step)
    if isinstance(node, enum.Enum):
        return node.value
    return list(node) if isinstance(node, tuple) else node


def flag(value: Any) -> bool | None:
    """What is written of something that is on or off: a flag, or nothing."""
    return True if value else None
