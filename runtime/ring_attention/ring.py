"""Keys and values go around the ring, in messages between neighbours while both compute.

In backward they travel once more, and the gradients of keys and values follow them home. Which rank attends to what in
which step is the compiler's schedule (`parcompile.layout.sequence`), executed as it is.

KeySource: ring attention, arXiv 2310.01889.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.runtime.ring_attention.gather_schedule import GatherSchedule
from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Queries

from .kernels.blocks import add_gradients
from .passes import AttentionCall, Pass, keep, zeroed_sum_for
from .route import Hop, RingStep

# Messages between neighbours in the ring: one to the next rank and one from the previous, while both compute.


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


Pairs = TypeVar("Pairs", Pair, "Sequence[Pair]")


@dataclass(frozen=True, slots=True)
class Exchange(Generic[Pairs]):
    """Messages out and in, one each or one for each of several hops: none may be touched before `wait`."""

    works: tuple[dist.Work, ...]
    outgoing: Pairs
    incoming: Pairs

    def wait(self) -> Pairs:
        """What was received. On CUDA the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.incoming


def post_exchange(
    group: dist.ProcessGroup | None, hop: Hop, outgoing: Pair, incoming: Pair, kind: MessageKind
) -> Exchange[Pair]:
    """Start both messages at once, so that no order of the ranks can deadlock."""
    return Exchange(_post(_messages(group, hop, outgoing, incoming, kind)), outgoing, incoming)


def post_exchanges(
    group: dist.ProcessGroup | None,
    hops: Sequence[Hop],
    outgoing: Sequence[Pair],
    incoming: Sequence[Pair],
    kind: MessageKind,
) -> Exchange[Sequence[Pair]]:
    """Start the messages of several hops at once."""
    messages = [
        message for each in zip(hops, outgoing, incoming, strict=True) for message in _messages(group, *each, kind)
    ]
    return Exchange(_post(messages), outgoing, incoming)


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


# Keys and values go around the ring while each rank attends with its own queries to those at hand.


def around(
    group: dist.ProcessGroup | None, steps: tuple[RingStep, ...], key: Tensor, value: Tensor
) -> Generator[tuple[RingStep, Tensor, Tensor], None, None]:
    """Each step with its keys and values; the next ones are under way while the caller works on these.

    Two buffers take turns: what was received is sent on while the other one receives.
    """
    at_hand = spare = None
    keys, values = key, value
    for step in steps:
        exchange = None
        if step.keys_hop is not None:
            at_hand = at_hand or Pair.pack(key, value)
            spare = spare or Pair.empty_like(key, value)
            exchange = post_exchange(group, step.keys_hop, at_hand, spare, MessageKind.KEYS_AND_VALUES)
        yield step, keys, values
        if exchange is not None:
            at_hand, spare = exchange.wait(), at_hand
            keys, values = at_hand.first, at_hand.second
            del exchange
            if step is steps[-2]:
                # The last keys stay: nothing is received in exchange for them.
                spare = None


def ring_backward(
    call: AttentionCall,
    one: Pass,
    queries: Queries,
    key: Tensor,
    value: Tensor,
    targets: Gradients,
    bring_home: Callable[[], None] | None,
) -> Callable[[], None]:
    """One pass of the backward ring; returns what is left to do once the last gradients have arrived.

    The gradients of a rank's own keys stay with it. Those of others are summed while they travel behind the keys: they
    start in step 1 and are home after P − 1 hops. `bring_home` is what the pass before left; it is called after step 0,
    or on CPUs before: messages take their time from the computation there, and their memory is free.
    """
    if bring_home is not None and key.device.type == "cpu":
        bring_home()
        bring_home = None
    grad_query, grad_key, grad_value = map(zeroed_sum_for, (targets.query, targets.key, targets.value))
    exchange: Exchange[Pair] | None = None
    spare: Pair | None = None
    assert not isinstance(one.schedule, GatherSchedule)
    blocks = around(call.group, one.schedule, key, value)
    for step, keys, values in blocks:
        hop, terms = step.gradients_hop, one.terms_of_step(step)
        if hop is None:
            own = Gradients(grad_query, grad_key, grad_value)
            add_gradients(call.kernel, step.tiles, queries, keys, values, own, terms)
            if bring_home is not None:
                bring_home()
            continue
        travelling = spare or Pair.empty_like(key, value, grad_key.dtype)
        travelling.message.zero_()
        into = Gradients(grad_query, travelling.first, travelling.second)
        add_gradients(call.kernel, step.tiles, queries, keys, values, into, terms)
        if step is one.schedule[-1]:
            # Nobody needs the last keys while their gradients travel.
            blocks.close()
            del keys, values
        if exchange is None:
            incoming = Pair.empty_like(key, value, grad_key.dtype)
        else:
            incoming, spare = exchange.wait(), exchange.outgoing
            travelling.message.add_(incoming.message)
        exchange = post_exchange(call.group, hop, travelling, incoming, MessageKind.GRADIENTS)

    keep(grad_query, targets.query)

    def finish() -> None:
        nonlocal exchange, grad_key, grad_value
        if exchange is not None:
            arrived = exchange.wait()
            grad_key.add_(arrived.first)
            grad_value.add_(arrived.second)
        keep(grad_key, targets.key)
        keep(grad_value, targets.value)
        # The next pass needs as much memory.
        del exchange, grad_key, grad_value

    return finish
