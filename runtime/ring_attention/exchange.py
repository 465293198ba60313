"""Messages between neighbours in the ring: one to the next rank and one from the previous, while both compute."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .route import Hop


class MessageKind(enum.IntEnum):
    """What a message between two ranks carries.

    Its number is the tag by which gloo tells messages apart. NCCL matches them by their order, which is equal on all
    ranks.
    """

    KEYS_AND_VALUES = 0
    GRADIENTS = 1


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors that travel in one message: keys and values, or their gradients. Both are views of `message`."""

    message: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def empty_like(cls, first: Tensor, second: Tensor, dtype: torch.dtype | None = None) -> Pair:
        """Room for two tensors of these shapes."""
        message = torch.empty(first.numel() + second.numel(), dtype=dtype or first.dtype, device=first.device)
        return cls(message, message[: first.numel()].view(first.shape), message[first.numel() :].view(second.shape))

    @classmethod
    def pack(cls, first: Tensor, second: Tensor) -> Pair:
        """A copy of both tensors, ready to be sent."""
        pair = cls.empty_like(first, second)
        pair.first.copy_(first)
        pair.second.copy_(second)
        return pair


@dataclass(frozen=True, slots=True)
class Exchange:
    """One message out and one in, both under way: neither may be touched before `wait`."""

    works: tuple[dist.Work, ...]
    outgoing: Pair
    incoming: Pair

    def wait(self) -> Pair:
        """What was received. On CUDA the current stream waits, not the host."""
        _wait(self.works)
        return self.incoming


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Messages to several ranks and from several, all under way."""

    works: tuple[dist.Work, ...]
    outgoing: Sequence[Pair]
    incoming: Sequence[Pair]

    def wait(self) -> Sequence[Pair]:
        """What was received, in the order of the hops."""
        _wait(self.works)
        return self.incoming


def post_exchange(
    group: dist.ProcessGroup | None, hop: Hop, outgoing: Pair, incoming: Pair, kind: MessageKind
) -> Exchange:
    """Start both messages at once, so that no order of the ranks can deadlock."""
    return Exchange(_post(_messages(group, hop, outgoing, incoming, kind)), outgoing, incoming)


def post_exchanges(
    group: dist.ProcessGroup | None,
    hops: Sequence[Hop],
    outgoing: Sequence[Pair],
    incoming: Sequence[Pair],
    kind: MessageKind,
) -> Exchanges:
    """Start the messages of several hops at once."""
    messages = [
        message for each in zip(hops, outgoing, incoming, strict=True) for message in _messages(group, *each, kind)
    ]
    return Exchanges(_post(messages), outgoing, incoming)


def _messages(
    group: dist.ProcessGroup | None, hop: Hop, outgoing: Pair, incoming: Pair, kind: MessageKind
) -> list[dist.P2POp]:
    assert group is not None, "a ring of one rank exchanges nothing"
    return [
        dist.P2POp(dist.isend, outgoing.message, dist.get_global_rank(group, hop.send_to), group, int(kind)),
        dist.P2POp(dist.irecv, incoming.message, dist.get_global_rank(group, hop.receive_from), group, int(kind)),
    ]


def _post(messages: list[dist.P2POp]) -> tuple[dist.Work, ...]:
    return tuple(dist.batch_isend_irecv(messages)) if messages else ()


def _wait(works: tuple[dist.Work, ...]) -> None:
    for work in works:
        work.wait()
