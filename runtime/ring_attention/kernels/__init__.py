"""Attention over one local block of keys, by the kernel that is fastest where it is right.

Rectangles of queries × keys, and which of their corners a mask cuts off. Plain geometry, in tokens.

A mask between tokens with consecutive positions is a band around a diagonal: causal attention has it above, a sliding
window above and below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Band:
    """Query i of a tile sees key j if `lower ≤ j − i ≤ upper`; both count from the tile's corner, None is no bound."""

    lower: int | None = None
    upper: int | None = None

    def columns_of(self, rows: slice, columns: int) -> tuple[int, int]:
        """First and last + 1 of so many keys that any of these queries sees."""
        first = 0 if self.lower is None else max(0, rows.start + self.lower)
        return first, columns if self.upper is None else max(0, min(columns, rows.stop + self.upper))


def spans(start: int, stop: int, most: int) -> Iterator[slice]:
    """Slices of at most so many, one after the other."""
    return (slice(first, min(first + most, stop)) for first in range(start, stop, most))


FULL = Band()
CAUSAL = Band(None, 0)


@dataclass(frozen=True, slots=True)
class Tile:
    """Local queries × keys of the source at hand; each query and each key of a trimmed tile sees something."""

    queries: slice
    keys: slice
    band: Band = FULL

    def trimmed(self) -> Tile | None:
        """Without rows and columns in which nothing is seen and bounds that cut nothing; None if nothing is left."""
        rows, columns = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        lower = -rows if self.band.lower is None else self.band.lower
        upper = columns if self.band.upper is None else self.band.upper
        first_row, last_row = max(0, -upper), min(rows - 1, columns - 1 - lower)
        first_column, last_column = max(0, first_row + lower), min(columns - 1, last_row + upper)
        if first_row > last_row or first_column > last_column or lower > upper:
            return None
        shift = first_row - first_column
        cuts_below = lower + shift > first_row - last_row
        cuts_above = upper + shift < last_column - first_column
        return Tile(
            slice(self.queries.start + first_row, self.queries.start + last_row + 1),
            slice(self.keys.start + first_column, self.keys.start + last_column + 1),
            Band(lower + shift if cuts_below else None, upper + shift if cuts_above else None),
        )

    def part(self, queries: slice, keys: slice) -> Tile | None:
        """The trimmed part of this tile in these queries and keys, which lie within it."""
        shift = (queries.start - self.queries.start) - (keys.start - self.keys.start)
        lower, upper = self.band.lower, self.band.upper
        band = Band(None if lower is None else lower + shift, None if upper is None else upper + shift)
        if queries.start >= queries.stop or keys.start >= keys.stop:
            return None
        return Tile(queries, keys, band).trimmed()

    def cut(self, most_rows: int) -> list[Tile]:
        """Slices of at most `most_rows` queries: a rectangle in which all see all, and what is left beside it."""
        parts: list[Tile | None] = []
        for start in range(self.queries.start, self.queries.stop, most_rows):
            whole = self.part(slice(start, min(start + most_rows, self.queries.stop)), self.keys)
            if whole is None:
                continue
            queries, keys = whole.queries, whole.keys
            rows, lower, upper = queries.stop - queries.start, whole.band.lower, whole.band.upper
            all_see_from = keys.start if lower is None else keys.start + rows - 1 + lower
            all_see_to = keys.stop if upper is None else keys.start + upper
            if all_see_from >= all_see_to:
                parts.append(whole)
                continue
            parts.append(whole.part(queries, slice(keys.start, all_see_from)))
            parts.append(whole.part(queries, slice(all_see_from, all_see_to)))
            parts.append(whole.part(queries, slice(all_see_to, keys.stop)))
        return [part for part in parts if part is not None]
