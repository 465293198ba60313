"""The ring's schedule: what each cp rank computes in each step, and how evenly the work is shared."""

from __future__ import annotations

from fractions import Fraction

from parcompile.layout.context import ContextParallel, CpImplementation
from parcompile.layout.sequence import Block, CpLayout, Mask, Source, balance, source_blocks, work

from .shapes import SMALL, Area, Box, Cells, Picture, Sketch, Text
from .subject import Subject

MOST = 64
"""Ranks and steps that are drawn; of a longer ring, as many, evenly spread."""
GLYPHS = 18
"""In cells of at least so many pixels the blocks themselves are drawn."""


def draw(subject: Subject, width: float) -> Picture:
    """Ranks × steps: a cell is full, half or empty, and shows the blocks of its queries (down) and keys (across)."""
    parallelism = subject.plan.spec.parallelism
    context, layout = parallelism.context, parallelism.cp_layout
    cp, name = context.ring_ranks, _name(context)
    sketch = Sketch(width)
    shown = [index * cp // min(cp, MOST) for index in range(min(cp, MOST))]
    left, right = 58.0, 74.0 if sketch.narrow else 190.0
    cell = min(46.0, (width - left - right) / len(shown))
    top = 22.0
    blocks = source_blocks(layout, cp)
    shares = {kind: share(found, layout.chunks_per_rank) for kind, found in blocks.items()}
    sketch.add(Text(left, 12, "step of the ring" if cell * len(shown) > 100 else "step", SMALL, "soft"))
    label = max(1, int(26 // cell) + (cell < 26))
    corners: dict[str, list[tuple[float, float]]] = {}
    gap = 2.0 if cell > 8 else 0.4
    most = max(work(layout, cp, 0), work(layout, cp, cp - 1))
    for row, rank in enumerate(shown):
        y = top + row * cell
        if row % label == 0:
            sketch.add(Text(left - 8, y + cell / 2 + 4, f"{name} {rank}", SMALL, "soft", "end"))
        for column, step in enumerate(shown):
            source = context.source(step, rank)
            kind = Source.of(rank, source)
            x = left + column * cell
            if cell >= GLYPHS:
                title = f"{name} {rank}, step {step}: keys of {name} {source}, {words(shares[kind])}"
                sketch.add(Box(x, y, cell - gap, cell - gap, "track", title, radius=2))
                _blocks(sketch, x, y, cell - gap, blocks[kind], layout)
            else:
                corners.setdefault(_role(shares[kind]), []).append((x, y))
        length = float(work(layout, cp, rank) / most)
        end = left + cell * len(shown) + 12
        room = width - end - (46 if not sketch.narrow else 2)
        sketch.add(Box(end, y + cell * 0.3 - gap / 2, max(room * length, 1), max(cell * 0.4, 1), "half"))
        if not sketch.narrow and row % label == 0:
            sketch.add(Text(end + room * length + 6, y + cell / 2 + 4, f"{length:.0%}", SMALL, "soft"))
    sketch.add(*(Cells(tuple(found), cell - gap, cell - gap, role) for role, found in corners.items()))
    sketch.add(Text(left + cell * len(shown) + 12, 12, "work", SMALL, "soft"))
    if cell * label >= 22:
        for column, step in enumerate(shown):
            if column % label == 0:
                x = left + (column + 0.5) * cell - gap / 2
                sketch.add(Text(x, top + cell * len(shown) + 13, str(step), SMALL, "soft", "middle"))
    sketch.y = top + cell * len(shown) + 20
    sketch.legend([("full", "computed" if cell >= GLYPHS else "full"), *_half(shares, cell), ("track", "not seen")])
    if cell >= GLYPHS:
        sketch.caption("In a cell: the rank's query chunks down, the source's key chunks across.", size=SMALL + 1)
    if len(shown) < cp:
        sketch.caption(f"{len(shown)} of {cp} {name}s and steps are drawn, evenly spread.", size=SMALL + 1)
    even = float(balance(layout, cp))
    subtitle = f"{_said(context)}, {layout.value}: {_steps(context)}; balance {even:.0%}"
    if context.cp == 1:
        subtitle = "cp 1: each rank holds whole sequences, there is no ring"
    each = ", ".join(f"{kind.value} {words(found)}" for kind, found in shares.items() if cp > 1 or kind is Source.OWN)
    description = f"{subtitle} (mean work of a rank over the busiest one's). By whose keys they are: {each}."
    return sketch.picture("Ring schedule", subtitle, description)


def _name(context: ContextParallel) -> str:
    """What keys travel between: ranks, or places that several ranks share."""
    return "rank" if context.head_ranks == 1 else "place"


def _said(context: ContextParallel) -> str:
    is_ring = context.implementation is CpImplementation.RING
    return f"cp {context.cp}" if is_ring else f"{context.name} on cp {context.cp}"


def _steps(context: ContextParallel) -> str:
    if context.implementation is CpImplementation.ALL_GATHER:
        return "the keys of all ranks at once"
    steps = f"{context.ring_ranks} steps, {context.ring_ranks - 1} exchanges"
    shared = f"{context.head_ranks} ranks exchange heads for tokens and share a place"
    return steps if context.head_ranks == 1 else shared + (f"; {steps}" if context.ring_ranks > 1 else "")


def _half(shares: dict[Source, Fraction], cell: float) -> list[tuple[str, str]]:
    return [("half", "half")] if cell < GLYPHS and Fraction(1, 2) in shares.values() else []


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


def share(blocks: tuple[Block, ...], chunks: int) -> Fraction:
    """The part of a rank's queries × a source's keys that is computed."""
    return sum((block.area for block in blocks), Fraction(0)) / chunks**2


def words(part: Fraction) -> str:
    """`full`, `half` or `none`."""
    return {Fraction(1): "full", Fraction(1, 2): "half", Fraction(0): "none"}.get(part, f"{float(part):.0%}")


def _role(part: Fraction) -> str:
    return {Fraction(1): "full", Fraction(0): "track"}.get(part, "half")


def lines(subject: Subject, *, unicode: bool = True) -> list[str]:
    """For a terminal: a character for each rank and step."""
    context, layout = subject.plan.spec.parallelism.context, subject.plan.spec.parallelism.cp_layout
    cp = context.ring_ranks
    marks = {"full": "█", "half": "▌", "none": "·"} if unicode else {"full": "#", "half": "+", "none": "."}
    shares = {kind: share(found, layout.chunks_per_rank) for kind, found in source_blocks(layout, cp).items()}
    shown = [index * cp // min(cp, 32) for index in range(min(cp, 32))]
    legend = ", ".join(f"{mark} {name}" for name, mark in marks.items())
    said = f"ring of {cp}" if context.implementation is CpImplementation.RING else _said(context)
    even = float(balance(layout, cp))
    found = [f"{said}, {layout.value}, balance {even:.0%}; {_name(context)}s down, steps across: {legend}"]
    for rank in shown:
        cells = (marks.get(words(shares[Source.of(rank, context.source(step, rank))]), "+") for step in shown)
        found.append(f"{rank:>5} | {' '.join(cells)}")
    return found


def rows(subject: Subject) -> list[tuple[str, ...]]:
    """As a table: what a step computes, by whose keys are at hand."""
    parallelism = subject.plan.spec.parallelism
    found = source_blocks(parallelism.cp_layout, parallelism.context.ring_ranks)
    chunks = parallelism.cp_layout.chunks_per_rank
    names = {Source.OWN: "its own", Source.EARLIER: "an earlier rank", Source.LATER: "a later rank"}
    return [
        ("keys of", "computes"),
        *((names[kind], words(share(one, chunks))) for kind, one in found.items() if parallelism.cp > 1 or one),
    ]
