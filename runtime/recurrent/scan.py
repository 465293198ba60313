"""A state that goes through the pieces of a sequence, with gradients.

Shapes: B rows, S local tokens, H heads; a state is [B, H, …].
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from parcompile.runtime.ring_attention.passes import once

from .pieces import Chain, Pieces, Segment


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
        if self is Action.MATRIX:
            return gradient @ state.mT
        return (gradient * state).sum_to_size(transition.shape)


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
    chain: Chain,
    action: Action,
    through: Tensor,
    transitions: Sequence[Tensor | None],
    states: Sequence[Tensor],
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
