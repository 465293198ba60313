"""A causal convolution over pieces of a sequence: each begins with the last tokens of the piece before it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .chain import Chain
from .pieces import Pieces, Segment
from .scan import halo, join

Convolution = Callable[[Tensor], Tensor]
"""From [B, C, S] to [B, C, S], with zeros in front of the first token."""


def convolve(convolution: Convolution, pieces: Pieces, chain: Chain | None, x: Tensor, width: int) -> Tensor:
    """Convolves channels [B, C, S local tokens]; a document sees no token of another.

    Args:
        convolution: of tokens that follow each other.
        pieces: the local tokens.
        chain: of the ranks that share the sequences; None where there is one.
        x: the channels.
        width: tokens that the convolution sees, the token itself among them.

    Raises:
        ValueError: a piece is shorter than what the next one has to see of it.
    """
    if pieces.is_whole or width == 1:
        return convolution(x)
    seen = width - 1
    found: dict[Segment, Tensor] = {segment: convolution(_of(x, segment)).mT for segment in pieces.alone}
    if pieces.strands:
        assert chain is not None, "strands are what several ranks have parts of"
        slots = range(len(chain.mine))
        tails = [torch.cat([_tail(x, strand.slots[slot], seen) for strand in pieces.strands]) for slot in slots]
        heads = halo(chain, tails)
        for slot in slots:
            place = 0
            for strand in pieces.strands:
                first, *rest = strand.slots[slot]
                rows = first.rows[1] - first.rows[0]
                head = heads[slot][place : place + rows]
                place += rows
                # Of another document nothing is seen. Multiplied, not cut: every rank takes part in the backward.
                own = torch.arange(seen, 0, -1, device=x.device) <= first.before
                joined = torch.cat([head * own.to(head.dtype), _of(x, first)], -1)
                found[first] = convolution(joined)[..., seen:].mT
                found |= {segment: convolution(_of(x, segment)).mT for segment in rest}
    return join(found).mT


def _of(x: Tensor, segment: Segment) -> Tensor:
    return x[slice(*segment.rows), :, segment.start : segment.stop]


def _tail(x: Tensor, segments: tuple[Segment, ...], seen: int) -> Tensor:
    """The end of a piece."""
    first, last = segments[0], segments[-1]
    if last.stop - first.start < seen:
        raise ValueError(
            f"a piece of {last.stop - first.start} tokens is shorter than the {seen} tokens that the convolution of "
            "the next piece has to see of it: make the sequence longer, or cp smaller"
        )
    return x[slice(*first.rows), :, last.stop - seen : last.stop]
