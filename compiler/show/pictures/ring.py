"""The ring's schedule: what each cp rank computes in each step, and how evenly the work is shared."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from parcompile.layout.sequence import (
    Block,
    ContextParallel,
    CpImplementation,
    CpLayout,
    KeySource,
    Mask,
    source_blocks,
)

from . import SMALL, Area, Box, Cells, Picture, Sketch, Subject, Text

MOST = 64
"""Ranks and steps that are drawn; of a longer ring, as many, evenly spread."""
GLYPHS = 18
"""In cells of at least so many pixels the blocks themselves are drawn."""


class _Ring(NamedTuple):
    """The places between which keys travel, and what is computed by whose keys are at hand."""

    context: ContextParallel
    layout: CpLayout
    blocks: Mapping[KeySource, tuple[Block, ...]]
    shares: Mapping[KeySource, Fraction]
    """The part of a rank's queries × a source's keys that is computed."""

    @classmethod
    def of(cls, subject: Subject) -> _Ring:
        parallelism = subject.plan.spec.parallelism
        layout, context = parallelism.cp_layout, parallelism.context
        blocks = source_blocks(layout, context.ring_ranks)
        areas = {kind: sum((block.area for block in found), Fraction(0)) for kind, found in blocks.items()}
        shares = {kind: area / layout.chunks_per_rank**2 for kind, area in areas.items()}
        return cls(context, layout, blocks, shares)

    @property
    def gathers(self) -> bool:
        """Whether all keys come at once: columns are then their ranks, not steps."""
        return self.context.implementation is CpImplementation.ALL_GATHER

    @property
    def row(self) -> str:
        """What a row is called."""
        return "rank" if self.context.head_ranks == 1 else "place"

    def shown(self, most: int) -> list[int]:
        """The places that are drawn."""
        size = self.context.ring_ranks
        return [index * size // min(size, most) for index in range(min(size, most))]

    def source(self, column: int, place: int) -> int:
        """Whose keys a column stands for."""
        return column if self.gathers else self.context.source(column, place)

    def work(self, place: int) -> Fraction:
        """The work of a place over that of the busiest."""
        first, last = (self.context.work(self.layout, rank) for rank in (0, self.context.cp - 1))
        return self.context.work(self.layout, place * self.context.head_ranks) / max(first, last)

    @property
    def words(self) -> str:
        """How the ranks work together, and how evenly."""
        context, places = self.context, self.context.ring_ranks
        balance = float(context.balance(self.layout))
        if context.cp == 1:
            return "cp 1: each rank holds whole sequences, there is no ring"
        how = {
            CpImplementation.ALL_GATHER: "all keys are gathered at once",
            CpImplementation.ULYSSES: "heads are exchanged for tokens, so that each rank sees the whole sequence",
            CpImplementation.USP: f"{context.head_ranks} ranks exchange heads and share one of {places} places",
        }.get(context.implementation, f"{places} steps, {places - 1} exchange{'s' * (places > 2)}")
        return f"cp {context.cp}, {context.name}, {self.layout.value}: {how}; balance {balance:.0%}"


def draw(subject: Subject, width: float) -> Picture:
    """Ranks × steps: a cell is full, half or empty, and shows the blocks of its queries (down) and keys (across)."""
    ring, sketch = _Ring.of(subject), Sketch(width)
    shown = ring.shown(MOST)
    left, right = 58.0, 74.0 if sketch.narrow else 190.0
    cell = min(46.0, (width - left - right) / len(shown))
    head = f"keys of {ring.row}" if ring.gathers else "step of the ring"
    sketch.add(Text(left, 12, head if cell * len(shown) > 100 else head.split()[0], SMALL, "soft"))
    _cells(sketch, ring, shown, (left, 22.0), cell)
    _axes(sketch, ring, shown, (left, 22.0), cell)
    sketch.y = 22.0 + cell * len(shown) + 20
    glyphs = cell >= GLYPHS
    half = [("half", "half")] if not glyphs and Fraction(1, 2) in ring.shares.values() else []
    sketch.legend([("full", "computed" if glyphs else "full"), *half, ("track", "not seen")])
    if glyphs:
        sketch.caption("In a cell: the rank's query chunks down, the source's key chunks across.", size=SMALL + 1)
    if len(shown) < ring.context.ring_ranks:
        size = ring.context.ring_ranks
        sketch.caption(f"{len(shown)} of {size} ranks and steps are drawn, evenly spread.", size=SMALL + 1)
    kinds = list(ring.shares) if ring.context.ring_ranks > 1 else [KeySource.OWN]
    each = ", ".join(f"{kind.value} {words(ring.shares[kind])}" for kind in kinds)
    description = f"{ring.words} (mean work of a rank over the busiest one's). By whose keys they are: {each}."
    return sketch.picture("Ring schedule", ring.words, description)


def _cells(sketch: Sketch, ring: _Ring, shown: list[int], corner: tuple[float, float], cell: float) -> None:
    corners: dict[str, list[tuple[float, float]]] = {}
    side = cell - (2.0 if cell > 8 else 0.4)
    for row, place in enumerate(shown):
        for column, step in enumerate(shown):
            source = ring.source(step, place)
            kind = KeySource.of(place, source)
            x, y = corner[0] + column * cell, corner[1] + row * cell
            if cell < GLYPHS:
                role = {Fraction(1): "full", Fraction(0): "track"}.get(ring.shares[kind], "half")
                corners.setdefault(role, []).append((x, y))
                continue
            when = "" if ring.gathers else f", step {step}"
            title = f"{ring.row} {place}{when}: keys of {ring.row} {source}, {words(ring.shares[kind])}"
            sketch.add(Box(x, y, side, side, "track", title, radius=2))
            _blocks(sketch, x, y, side, ring.blocks[kind], ring.layout)
    sketch.add(*(Cells(tuple(found), side, side, role) for role, found in corners.items()))


def _axes(sketch: Sketch, ring: _Ring, shown: list[int], corner: tuple[float, float], cell: float) -> None:
    """Names of rows and columns, and the work of each row as a bar."""
    left, top = corner
    label = max(1, int(26 // cell) + (cell < 26))
    end = left + cell * len(shown) + 12
    room = sketch.width - end - (46 if not sketch.narrow else 2)
    sketch.add(Text(end, 12, "work", SMALL, "soft"))
    for row, place in enumerate(shown):
        middle, length = top + (row + 0.5) * cell, float(ring.work(place))
        sketch.add(Box(end, middle - cell * 0.2, max(room * length, 1), max(cell * 0.4, 1), "half"))
        if row % label == 0:
            sketch.add(Text(left - 8, middle + 4, f"{ring.row} {place}", SMALL, "soft", "end"))
            if not sketch.narrow:
                sketch.add(Text(end + room * length + 6, middle + 4, f"{length:.0%}", SMALL, "soft"))
            if cell * label >= 22:
                x = left + (row + 0.5) * cell - 1
                sketch.add(Text(x, top + cell * len(shown) + 13, str(place), SMALL, "soft", "middle"))


def _blocks(sketch: Sketch, x: float, y: float, side: float, blocks: tuple[Block, ...], layout: CpLayout) -> None:
    """The blocks of one step: rectangles, and triangles on the diagonal."""
    unit = side / layout.chunks_per_rank
    for block in blocks:
        left, top = x + block.kv_start * unit, y + block.q_start * unit
        width, height = (block.kv_stop - block.kv_start) * unit, (block.q_stop - block.q_start) * unit
        if block.mask is Mask.FULL:
            sketch.add(Box(left, top, width, height, "full"))
            continue
        # The diagonal itself is one token wide: too little to be seen.
        sketch.add(Area(((left, top), (left, top + height), (left + width, top + height)), "full"))


def words(part: Fraction) -> str:
    """`full`, `half` or `none`."""
    return {Fraction(1): "full", Fraction(1, 2): "half", Fraction(0): "none"}.get(part, f"{float(part):.0%}")


def lines(subject: Subject, *, unicode: bool = True) -> list[str]:
    """For a terminal: a character for each rank and step."""
    ring = _Ring.of(subject)
    marks = {"full": "█", "half": "▌", "none": "·"} if unicode else {"full": "#", "half": "+", "none": "."}
    shown = ring.shown(32)
    legend = ", ".join(f"{mark} {name}" for name, mark in marks.items())
    found = [ring.words]
    if ring.context.ring_ranks > 1:
        across = f"keys of {ring.row}s" if ring.gathers else "steps"
        found.append(f"{ring.row}s down, {across} across: {legend}")
        for place in shown:
            kinds = (KeySource.of(place, ring.source(step, place)) for step in shown)
            cells = (marks.get(words(ring.shares[kind]), marks["half"]) for kind in kinds)
            found.append(f"{place:>5} | {' '.join(cells)}")
    return found


def rows(subject: Subject) -> list[tuple[str, ...]]:
    """As a table: what a step computes, by whose keys are at hand."""
    ring = _Ring.of(subject)
    names = {
        KeySource.OWN: "its own",
        KeySource.EARLIER: f"an earlier {ring.row}",
        KeySource.LATER: f"a later {ring.row}",
    }
    kinds = list(names) if ring.context.ring_ranks > 1 else [KeySource.OWN]
    return [("keys of", "computes"), *((names[kind], words(ring.shares[kind])) for kind in kinds)]
