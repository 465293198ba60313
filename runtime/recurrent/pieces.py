"""The tokens of a rank as pieces of sequences and documents: what a state goes through, and where it begins anew.

A state that goes through the pieces of a sequence, with gradients.

Shapes: B rows, S local tokens, H heads; a state is [B, H, …].
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.sequence import CpLayout, chunk_ids
from parcompile.runtime.ring_attention import Packing
from parcompile.runtime.ring_attention.passes import once
from parcompile.runtime.ring_attention.sequence import Documents, documents_of_rows


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


# The chain of a sequence's pieces: which rank has which, and what goes from one piece to the next.

Step = Callable[[int, Tensor], Tensor]
"""From the slot of a piece and what it receives to what it hands on."""


class MessageKind(enum.IntEnum):
    """What a message carries: its number is the tag by which gloo tells it from those of the ring (0 and 1)."""

    STATE = 2
    HALO = 3


@dataclass(frozen=True, slots=True)
class Chain:
    """The pieces of a sequence in their order: `owners[i]` is the rank of `group` that has piece i.

    Contiguous: 0, …, P − 1. Zigzag: 0, …, P − 1, P − 1, …, 0, so that the two pieces in the middle are neighbours on
    one rank. A rank's pieces have slots 0, 1, … in the order of its tokens, which is that of the chain.
    """

    owners: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, layout: CpLayout, group: dist.ProcessGroup) -> Chain:
        """The chain of a layout.

        Raises:
            ValueError: the layout is striped: every token would be a piece.
        """
        if layout is CpLayout.STRIPED:
            raise ValueError("a state cannot pass through a striped layout: neighbouring tokens are on different ranks")
        size = dist.get_world_size(group)
        held = {piece: rank for rank in range(size) for piece in chunk_ids(layout, size, rank)}
        return cls(tuple(held[piece] for piece in sorted(held)), dist.get_rank(group), group)

    @property
    def mine(self) -> tuple[int, ...]:
        """The pieces of this rank, by slot."""
        return tuple(piece for piece, owner in enumerate(self.owners) if owner == self.rank)

    def pass_through(self, first: Tensor, step: Step, *, reverse: bool = False) -> list[Tensor]:
        """What each of this rank's pieces receives while something goes through the chain; by slot.

        Args:
            first: what the first piece of the chain receives; all that goes through has its shape and type.
            step: what a piece makes of it.
            reverse: from the last piece to the first.
        """
        order = range(len(self.owners))[:: -1 if reverse else 1]
        received: list[Tensor] = [first] * len(self.mine)
        sending: list[tuple[Tensor, Any]] = []
        at_hand = first
        for place, piece in enumerate(order):
            if self.owners[piece] != self.rank:
                continue
            before = order[place - 1] if place else None
            if before is not None and self.owners[before] != self.rank:
                at_hand = torch.empty_like(first, memory_format=torch.contiguous_format)
                dist.recv(at_hand, group=self.group, group_src=self.owners[before], tag=MessageKind.STATE)
            slot = self.mine.index(piece)
            received[slot] = at_hand
            if place + 1 == len(order):
                break
            at_hand = step(slot, at_hand).contiguous()
            after = self.owners[order[place + 1]]
            if after != self.rank:
                work = dist.isend(at_hand, group=self.group, group_dst=after, tag=MessageKind.STATE)
                sending.append((at_hand, work))
        for _, work in sending:
            work.wait()
        return received

    def shift(self, values: Sequence[Tensor], *, reverse: bool = False) -> list[Tensor]:
        """Each piece gets the value of the piece before it (`reverse`: behind it), zeros where there is none; by slot.

        All messages are posted in one batch: NCCL would take others one after the other, each with its other end.
        """
        way = -1 if reverse else 1
        received: list[Tensor] = [torch.zeros_like(one) for one in values]
        messages: list[dist.P2POp] = []
        for slot, piece in enumerate(self.mine):
            target, source = piece + way, piece - way
            if 0 <= target < len(self.owners):
                if self.owners[target] == self.rank:
                    received[self.mine.index(target)] = values[slot]
                else:
                    messages.append(self._message(dist.isend, values[slot].contiguous(), target, slot))
            if 0 <= source < len(self.owners) and self.owners[source] != self.rank:
                received[slot] = torch.empty_like(values[slot], memory_format=torch.contiguous_format)
                of_owner = self.owners[:source].count(self.owners[source])
                messages.append(self._message(dist.irecv, received[slot], source, of_owner))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return received

    def _message(self, way: Any, value: Tensor, piece: int, slot: int) -> dist.P2POp:
        """To or from the rank of a piece; `slot` is the sender's."""
        return dist.P2POp(way, value, group=self.group, group_peer=self.owners[piece], tag=MessageKind.HALO + slot)


class Action(enum.Enum):
    """How a piece's transition acts on a state."""

    MATRIX = "matrix"
    """[.., K, K] times [.., K, V]."""
    ELEMENTWISE = "elementwise"
    """Factors that broadcast to the state."""

    def apply(self, transition: Tensor, state: Tensor) -> Tensor:
        """What is left of a state behind the piece."""
        return transition @ state if self is Action.MATRIX else transition * state

    def transposed(self, transition: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the state in front of the piece, of that behind it."""
        return transition.mT @ gradient if self is Action.MATRIX else transition * gradient

    def gradient(self, transition: Tensor, state: Tensor, gradient: Tensor) -> Tensor:
        """That of the transition."""
        return gradient @ state.mT if self is Action.MATRIX else (gradient * state).sum_to_size(transition.shape)


@dataclass(frozen=True, slots=True)
class LocalScan:
    """What a segment computes on its own, from a state of zeros.

    `state` is that behind it. Where it may receive a state, `transition` is what is left of that behind the segment,
    and `read` what that state adds to `out`.
    """

    out: Tensor
    state: Tensor
    transition: Tensor | None = None
    read: Callable[[Tensor], Tensor] | None = None


Compute = Callable[[Segment], LocalScan]


def scan(pieces: Pieces, chain: Chain | None, action: Action, compute: Compute) -> Tensor:
    """The output [B, S, …] of a recurrence over all pieces.

    Args:
        pieces: the local tokens.
        chain: of the ranks; None where this rank has whole sequences.
        action: of the transitions.
        compute: of one segment.
    """
    found: dict[Segment, Tensor] = {segment: compute(segment).out for segment in pieces.alone}
    if pieces.strands:
        assert chain is not None, "strands are what several ranks have parts of"
        found |= _through(pieces, chain, action, compute)
    return join(found)


def _through(pieces: Pieces, chain: Chain, action: Action, compute: Compute) -> dict[Segment, Tensor]:
    strands, slots = pieces.strands, range(len(chain.mine))
    local = {segment: compute(segment) for strand in strands for slot in strand.slots for segment in slot}
    transitions, states = [], []
    for slot in slots:
        lasts = [(strand.slots[slot], local[strand.slots[slot][-1]]) for strand in strands]
        states.append(torch.cat([last.state for _, last in lasts]))
        # Where a document begins within the piece, nothing of what it receives is left behind it.
        kept = [last.transition if len(segments) == 1 else None for segments, last in lasts]
        transitions.append(_joined(kept, [last.state for _, last in lasts]))
    first = strands[0].slots[0][0]
    through, received = carry(chain, action, local[first].out, transitions, states)
    found = {}
    for slot in slots:
        place = 0
        for strand in strands:
            rows = local[strand.slots[slot][0]].state.shape[0]
            state = received[slot][place : place + rows]
            place += rows
            for number, segment in enumerate(strand.slots[slot]):
                one = local[segment]
                out = through if segment == first else one.out
                if number == 0 and one.read is not None:
                    out = (out + one.read(state)).to(out.dtype)
                found[segment] = out
    return found


def _joined(transitions: Sequence[Tensor | None], states: Sequence[Tensor]) -> Tensor | None:
    """Those of several strands, zeros where nothing is left; None where nothing is left of any."""
    like = next((one for one in transitions if one is not None), None)
    if like is None:
        return None
    return torch.cat(
        [
            like.new_zeros(state.shape[0], *like.shape[1:])
            if one is None
            else one.expand(state.shape[0], *like.shape[1:])
            for one, state in zip(transitions, states, strict=True)
        ]
    )


def join(found: dict[Segment, Tensor]) -> Tensor:
    """Segments [rows, tokens, …] as one tensor of all rows and tokens."""
    by_rows: dict[tuple[int, int], list[Segment]] = {}
    for segment in found:
        by_rows.setdefault(segment.rows, []).append(segment)
    parts = [
        [found[one] for one in sorted(segments, key=lambda one: one.start)] for _, segments in sorted(by_rows.items())
    ]
    joined = [part[0] if len(part) == 1 else torch.cat(part, 1) for part in parts]
    return joined[0] if len(joined) == 1 else torch.cat(joined)


def carry(
    chain: Chain, action: Action, through: Tensor, transitions: Sequence[Tensor | None], states: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The state that each of this rank's pieces receives, by slot, and `through` as it is.

    Some output of the rank has to go `through`: a rank whose pieces use no state still takes part in the backward of
    those of others.
    """
    found = _Carry.apply(chain, action, through, *transitions, *states)  # type: ignore[no-untyped-call]
    return found[0], tuple(found[1:])


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: Chain, action: Action, through: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        slots = len(tensors) // 2
        transitions, states = tensors[:slots], cast("tuple[Tensor, ...]", tensors[slots:])

        def step(slot: int, received: Tensor) -> Tensor:
            kept = transitions[slot]
            return states[slot] if kept is None else action.apply(kept, received) + states[slot]

        received = once(lambda: tuple(chain.pass_through(torch.zeros_like(states[0]), step)))
        ctx.chain, ctx.action, ctx.is_kept = chain, action, [one is not None for one in transitions]
        ctx.save_for_backward(*(one for one in transitions if one is not None), *received)
        return through.view_as(through), *(one.clone() for one in received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing lets no saved tensor be unpacked twice.
        saved = ctx.saved_tensors
        action, kept = ctx.action, iter(saved[: sum(ctx.is_kept)])
        transitions = [next(kept) if is_kept else None for is_kept in ctx.is_kept]
        received, of_received = saved[sum(ctx.is_kept) :], [one.contiguous() for one in grads[1:]]

        def step(slot: int, behind: Tensor) -> Tensor:
            one = transitions[slot]
            return of_received[slot] if one is None else of_received[slot] + action.transposed(one, behind)

        of_states = ctx.chain.pass_through(torch.zeros_like(of_received[0]), step, reverse=True)
        of_transitions = [
            None if one is None else action.gradient(one, state, gradient)
            for one, state, gradient in zip(transitions, received, of_states, strict=True)
        ]
        return None, None, grads[0], *of_transitions, *of_states


def halo(chain: Chain, tails: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What each of this rank's pieces finds in front of it: the end of the piece before, zeros in front of the first.

    `tails` are the ends of this rank's pieces, by slot.
    """
    return tuple(_Halo.apply(chain, *tails))  # type: ignore[no-untyped-call]


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: Chain, *tails: Tensor) -> tuple[Tensor, ...]:
        ctx.chain = chain
        return tuple(one.clone() for one in once(lambda: tuple(chain.shift(tails))))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.chain.shift([one.contiguous() for one in grads], reverse=True)
