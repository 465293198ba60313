"""Many tiles in one launch: the form of FlashAttention for packed sequences.

Such a kernel is told where each of many short sequences begins and ends, and computes the attention within each. Tiles
of which none shares a query or a key with another are such sequences; the queries and keys between them are sequences
without keys and without queries, so that nothing is copied together and no row is left unwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import Band, Tile

Numbers: TypeAlias = "npt.NDArray[np.int64]"
UNBOUNDED = 1 << 62
"""Where a tile has no bound."""


def window_of(band: Band, rows: int, columns: int) -> tuple[int, int]:
    """`left` and `right` of a band in a block of so many queries and keys; −1 is no bound.

    Both are counted from the bottom right corner, as in FlashAttention: query i of R sees key j of C if
    i + C − R − left ≤ j ≤ i + C − R + right.
    """
    ahead = columns - rows
    left = -1 if band.lower is None else ahead - band.lower
    right = -1 if band.upper is None else band.upper - ahead
    # Below −1 the kernels would take a bound for none: a tile that is not trimmed.
    assert left >= (-1 if band.lower is None else 0), f"{band} of {rows} × {columns} hides every key of a query"
    assert right >= (-1 if band.upper is None else 0), f"{band} of {rows} × {columns} hides every key of a query"
    return left, right


@dataclass(frozen=True, slots=True)
class Launch:
    """What one call computes: queries `cum_queries[i] … cum_queries[i + 1]` see keys `cum_keys[i] … cum_keys[i + 1]`.

    Both rise from 0 to all queries and all keys, int32 on the device of these. `most_queries` and `most_keys` are the
    longest of them. `window` holds for all, as `window_of` gives it.
    """

    cum_queries: Tensor
    cum_keys: Tensor
    most_queries: int
    most_keys: int
    window: tuple[int, int]


class PackedTiles(Sequence[Tile]):
    """Trimmed tiles as columns of numbers; a `Tile` is made where one is asked for.

    Args:
        query_starts: of each tile, as the others.
        query_stops: the last query of each and 1.
        key_starts: the first key.
        key_stops: the last key and 1.
        uppers: bounds as in `Band`, or `UNBOUNDED`.
        lowers: the same.
    """

    def __init__(
        self,
        query_starts: Numbers,
        query_stops: Numbers,
        key_starts: Numbers,
        key_stops: Numbers,
        uppers: Numbers,
        lowers: Numbers,
    ) -> None:
        self._columns = query_starts, query_stops, key_starts, key_stops
        self._uppers, self._lowers = uppers, lowers
        self._tiles: tuple[Tile, ...] | None = None
        self._launches: dict[tuple[int, int, torch.device], tuple[Launch, ...]] = {}

    @classmethod
    def of(cls, tiles: Sequence[Tile]) -> PackedTiles:
        """The same tiles."""
        rows = [
            (
                *(tile.queries.start, tile.queries.stop, tile.keys.start, tile.keys.stop),
                *(UNBOUNDED if bound is None else bound for bound in (tile.band.upper, tile.band.lower)),
            )
            for tile in tiles
        ]
        return cls(*np.asarray(rows, dtype=np.int64).reshape(-1, 6).T)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __iter__(self) -> Iterator[Tile]:
        return iter(self._all())

    def _all(self) -> tuple[Tile, ...]:
        if self._tiles is None:
            columns = (column.tolist() for column in (*self._columns, self._lowers, self._uppers))
            self._tiles = tuple(
                Tile(slice(first, last), slice(start, stop), Band(_bound(lower), _bound(upper)))
                for first, last, start, stop, lower, upper in zip(*columns, strict=True)
            )
        return self._tiles

    def launches(self, rows: int, columns: int, device: torch.device) -> tuple[Launch, ...]:
        """Calls that compute all tiles, of so many queries and keys in all. They are kept for the next layer."""
        found = self._launches.get((rows, columns, device))
        if found is None:
            found = tuple(
                self._launch(window, chosen, rows, columns, device)
                for window, of_window in self._windows()
                for chosen in self._disjoint(of_window)
            )
            if all(type(launch.cum_keys) is Tensor for launch in found):  # a stand-in of a tensor ends with its mode
                self._launches[rows, columns, device] = found
        return found

    def _windows(self) -> list[tuple[tuple[int, int], Numbers]]:
        """The windows that occur, each with its tiles. A bound that cuts nothing off a tile holds for it too."""
        query_starts, query_stops, key_starts, key_stops = self._columns
        rows, columns = query_stops - query_starts, key_stops - key_starts
        lefts, rights = (
            _shared(np.where(has, distance, -1), lengths)
            for has, distance, lengths in (
                (self._lowers != UNBOUNDED, columns - rows - self._lowers, columns),
                (self._uppers != UNBOUNDED, self._uppers - (columns - rows), rows),
            )
        )
        windows = sorted(set(zip(lefts.tolist(), rights.tolist(), strict=True)))
        return [
            (
                (left, right),
                np.flatnonzero((lefts == left) & (rights == right)) if windows[1:] else np.arange(len(rows)),
            )
            for left, right in windows
        ]

    def _disjoint(self, chosen: Numbers) -> list[Numbers]:
        """These tiles in groups within which queries rise from tile to tile, and keys too."""
        query_starts, query_stops, key_starts, key_stops = (column[chosen] for column in self._columns)
        falls = (query_starts[1:] < query_stops[:-1]) | (key_starts[1:] < key_stops[:-1])
        runs = np.flatnonzero(falls) + 1
        if not len(runs):
            return [chosen]
        begins, ends = np.append(0, runs), np.append(runs, len(chosen))
        places = begins, ends, query_starts[begins], query_stops[ends - 1], key_starts[begins], key_stops[ends - 1]
        last: list[tuple[int, int]] = []
        groups: list[list[Numbers]] = []
        # A run of rising tiles goes behind the first group that ends before it.
        for begin, end, first, stop, key, key_stop in zip(*(each.tolist() for each in places), strict=True):
            fits = (number for number, (query, seen) in enumerate(last) if query <= first and seen <= key)
            number = next(fits, len(last))
            if number == len(last):
                last.append((0, 0))
                groups.append([])
            last[number] = stop, key_stop
            groups[number].append(chosen[begin:end])
        return [np.concatenate(group) for group in groups]

    def _launch(
        self, window: tuple[int, int], chosen: Numbers, rows: int, columns: int, device: torch.device
    ) -> Launch:
        starts, stops, key_starts, key_stops = (column[chosen] for column in self._columns)
        queries, most_queries = _lengths(starts, stops, rows, 0)
        keys, most_keys = _lengths(key_starts, key_stops, columns, 1)
        queries, keys = _without_long_gaps(queries, keys, most_queries, most_keys)
        cum = np.zeros((2, len(queries) + 1), dtype=np.int32)
        np.cumsum(queries, out=cum[0, 1:])
        np.cumsum(keys, out=cum[1, 1:])
        host = torch.from_numpy(cum)
        if device.type == "cuda" and torch.cuda.is_available():
            host = host.pin_memory()
        both = host.to(device, non_blocking=True)
        return Launch(both[0], both[1], most_queries, most_keys, window)


def _shared(distances: Numbers, lengths: Numbers) -> Numbers:
    """The distances that a window allows to one side, −1 without a bound: that of others where it cuts nothing off."""
    bounded = distances[distances >= 0]
    if len(bounded) in (0, len(distances)):
        return distances
    values, counts = np.unique(bounded, return_counts=True)
    common = values[counts.argmax()]
    return np.where((distances < 0) & (lengths <= common + 1), common, distances)


def _bound(number: int) -> int | None:
    return None if number == UNBOUNDED else number


def _lengths(starts: Numbers, stops: Numbers, total: int, turn: int) -> tuple[Numbers, int]:
    """Lengths of all sequences on one side, and the longest of a tile.

    Before each tile, and after the last, there are two sequences that are no tiles: the first has only queries, the
    second only keys. `turn` says which of them this side has.
    """
    found = np.zeros(3 * len(starts) + 2, dtype=np.int64)
    found[2::3] = stops - starts
    found[turn::3] = np.append(starts, total) - np.append(0, stops)
    assert found.min() >= 0, "tiles of one launch share a query or a key"
    return found, int((stops - starts).max())


def _without_long_gaps(queries: Numbers, keys: Numbers, most_queries: int, most_keys: int) -> tuple[Numbers, Numbers]:
    """Gaps in pieces that are no longer than the longest tile, which says how much room each sequence is given."""
    if queries.max() <= most_queries and keys.max() <= most_keys:
        present = (queries > 0) | (keys > 0)
        return queries[present], keys[present]
    pieces = np.maximum(-(-queries // most_queries), -(-keys // most_keys))
    which = np.repeat(np.arange(len(pieces)), pieces)
    number = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return (
        np.minimum(np.maximum(queries[which] - number * most_queries, 0), most_queries),
        np.minimum(np.maximum(keys[which] - number * most_keys, 0), most_keys),
    )
