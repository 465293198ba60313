"""The chain of a sequence's pieces: which rank has which, and what goes from one piece to the next."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.sequence import CpLayout, chunk_ids

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
                messages.append(self._message(dist.irecv, received[slot], source, self._slot_of(source)))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return received

    def _message(self, way: Any, value: Tensor, piece: int, slot: int) -> dist.P2POp:
        """To or from the rank of a piece; `slot` is the sender's."""
        return dist.P2POp(way, value, group=self.group, group_peer=self.owners[piece], tag=MessageKind.HALO + slot)

    def _slot_of(self, piece: int) -> int:
        """The slot that its owner has it in."""
        return self.owners[:piece].count(self.owners[piece])
