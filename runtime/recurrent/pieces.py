"""The tokens of a rank as pieces of sequences and documents: what a state goes through, and where it begins anew."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from parcompile.layout.sequence import CpLayout, chunk_ids
from parcompile.runtime.ring_attention import Packing
from parcompile.runtime.ring_attention.packing import Documents, documents_of_rows


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one document: rows [`rows`) and local tokens [`start`, `stop`).

    `before` counts the document's tokens in front of it; where there are any, its state comes from the piece before.
    """

    rows: tuple[int, int]
    start: int
    stop: int
    before: int

    @property
    def is_carried(self) -> bool:
        """Whether it goes on with a state."""
        return self.before > 0

    @property
    def length(self) -> int:
        """Tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Strand:
    """What goes through the chain on its own, a sequence or a dealt document: for each slot its segments, in order."""

    slots: tuple[tuple[Segment, ...], ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """All local tokens: those of strands, and segments that no other rank has a part of."""

    strands: tuple[Strand, ...]
    alone: tuple[Segment, ...]

    @classmethod
    def of_sequence(
        cls, rows: int, length: int, documents: Documents | None, layout: CpLayout, size: int, rank: int
    ) -> Pieces:
        """Rows of `length` local tokens, of sequences dealt to `size` ranks; `documents` are borders in the sequences.

        Raises:
            ValueError: a piece is not whole.
        """
        if size == 1:
            layout = CpLayout.CONTIGUOUS
        ids = chunk_ids(layout, size, rank)
        if length % len(ids):
            raise ValueError(f"{length} local tokens are not {len(ids)} equal pieces: pad the sequence")
        piece = length // len(ids)
        strands = []
        for part, borders in documents_of_rows(documents, rows):
            stop = rows if part.stop is None else part.stop
            strands.append(
                Strand(
                    tuple(
                        _segments((part.start or 0, stop), number * piece, slot * piece, piece, borders)
                        for slot, number in enumerate(ids)
                    )
                )
            )
        if size > 1:
            return cls(tuple(strands), ())
        return cls((), tuple(segment for strand in strands for slot in strand.slots for segment in slot))

    @classmethod
    def of_packing(cls, packing: Packing, rank: int) -> Pieces:
        """The tokens of a packing: dealt documents, one after the other, then this rank's whole ones."""
        ids, chunks = chunk_ids(packing.layout, packing.cp, rank), packing.layout.chunks_per_rank * packing.cp
        strands, alone = [], []
        for begin, end in zip(packing.dealt_borders, packing.dealt_borders[1:], strict=False):
            piece, place = (end - begin) // chunks, begin // packing.cp
            if piece:
                slots = tuple(
                    (Segment((0, 1), place + slot * piece, place + (slot + 1) * piece, number * piece),)
                    for slot, number in enumerate(ids)
                )
                if packing.cp > 1:
                    strands.append(Strand(slots))
                else:
                    # One rank has all chunks, in order.
                    alone.append(Segment((0, 1), place, place + piece * len(ids), 0))
        borders = packing.whole_borders[rank]
        alone += [
            Segment((0, 1), packing.dealt_tokens + begin, packing.dealt_tokens + end, 0)
            for begin, end in itertools.pairwise(borders)
            if end > begin
        ]
        return cls(tuple(strands), tuple(alone))

    @property
    def is_whole(self) -> bool:
        """Whether every row is one document that this rank has alone."""
        starts = [segment.start for segment in self.alone]
        return not self.strands and not any(starts)


def _segments(
    rows: tuple[int, int], first: int, place: int, length: int, borders: Sequence[int] | None
) -> tuple[Segment, ...]:
    """The documents' parts in the piece [first, first + length) of a sequence, which lies at `place`."""
    begins = sorted({0, *(borders or ())})
    inside = [border for border in begins if first < border < first + length]
    cuts = [first, *inside, first + length]
    found = []
    for start, stop in itertools.pairwise(cuts):
        document = max(border for border in begins if border <= start)
        found.append(Segment(rows, place + start - first, place + stop - first, start - document))
    return tuple(found)
