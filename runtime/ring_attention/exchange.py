"""Messages between neighbours in the ring: one to the next rank and one from the previous, while both compute."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .route import Hop


class Stream(enum.IntEnum):
    """What travels between two ranks: gloo tells streams apart by the tag, NCCL by their order, equal on all ranks."""

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
        for work in self.works:
            work.wait()
        return self.incoming


def post_exchange(
    group: dist.ProcessGroup | None, hop: Hop, outgoing: Pair, incoming: Pair, stream: Stream
) -> Exchange:
    """Start both messages at once, so that no order of the ranks can deadlock."""
    assert group is not None, "a ring of one rank exchanges nothing"
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing.message, dist.get_global_rank(group, hop.send_to), group, int(stream)),
            dist.P2POp(dist.irecv, incoming.message, dist.get_global_rank(group, hop.receive_from), group, int(stream)),
        ]
    )
    return Exchange(tuple(works), outgoing, incoming)
