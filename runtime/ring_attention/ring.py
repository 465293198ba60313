"""Keys and values go around the ring, in messages between neighbours while both compute.

In backward they travel once more, and the gradients of keys and values follow them home. Which rank attends to what in
which step is the compiler's schedule (`parcompile.layout.sequence`), executed as it is.

KeySource: ring attention, arXiv 2310.01889.

Keys and values of all ranks at once, for one group of heads while the group before it is computed.

Every rank sends its own keys straight to those that need them, and their gradients come straight back: as many bytes as
around a ring, in one exchange.

KeySource: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .kernels.blocks import add_gradients
from .kernels.kernel import Gradients, Queries
from .passes import AttentionCall, Pass, keep, zeroed_sum_for
from .route import GatherSchedule, Hop, RingStep


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
    """Messages out and in, one each for each of several hops: none may be touched before `wait`."""

    works: tuple[dist.Work, ...]
    outgoing: Sequence[Pair]
    incoming: Sequence[Pair]

    def wait(self) -> Sequence[Pair]:
        """What was received. On CUDA the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.incoming


def post_exchanges(
    group: dist.ProcessGroup | None,
    hops: Sequence[Hop],
    outgoing: Sequence[Pair],
    incoming: Sequence[Pair],
    kind: MessageKind,
) -> Exchange:
    """Start the messages of all hops at once, so that no order of the ranks can deadlock."""
    messages = []
    for hop, out, back in zip(hops, outgoing, incoming, strict=True):
        assert group is not None, "a ring of one rank exchanges nothing"
        messages += [
            dist.P2POp(dist.isend, out.message, dist.get_global_rank(group, hop.send_to), group, int(kind)),
            dist.P2POp(dist.irecv, back.message, dist.get_global_rank(group, hop.receive_from), group, int(kind)),
        ]
    return Exchange(tuple(dist.batch_isend_irecv(messages)) if messages else (), outgoing, incoming)


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
            exchange = post_exchanges(group, [step.keys_hop], [at_hand], [spare], MessageKind.KEYS_AND_VALUES)
        yield step, keys, values
        if exchange is not None:
            (at_hand,), (spare,) = exchange.wait(), exchange.outgoing
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
    exchange: Exchange | None = None
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
            (incoming,), (spare,) = exchange.wait(), exchange.outgoing
            travelling.message.add_(incoming.message)
        exchange = post_exchanges(call.group, [hop], [travelling], [incoming], MessageKind.GRADIENTS)

    keep(grad_query, targets.query)

    def finish() -> None:
        nonlocal exchange, grad_key, grad_value
        if exchange is not None:
            (arrived,) = exchange.wait()
            grad_key.add_(arrived.first)
            grad_value.add_(arrived.second)
        keep(grad_key, targets.key)
        keep(grad_value, targets.value)
        # The next pass needs as much memory.
        del exchange, grad_key, grad_value

    return finish


def gathered(call: AttentionCall, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values [B, K, gathered tokens, D] of each pass; those of the next are under way meanwhile."""
    under_way = _post_keys(call, call.passes[0], key, value) if call.passes else None
    for one, following in zip(call.passes, [*call.passes[1:], None], strict=True):
        assert isinstance(one.schedule, GatherSchedule)
        parts = [(one.of_keys(key), one.of_keys(value))]
        if under_way is not None:
            parts += [(pair.first, pair.second) for pair in under_way.wait()]
        under_way = None if following is None else _post_keys(call, following, key, value)
        both = [_in_order(one.schedule, [part[number] for part in parts]) for number in (0, 1)]
        parts.clear()  # what came takes memory until the caller asks for the next
        yield both.pop(0), both.pop()


def gathered_backward(
    call: AttentionCall,
    one: Pass,
    queries: Queries,
    keys: Tensor,
    values: Tensor,
    targets: Gradients,
    bring_home: Callable[[], None] | None,
) -> Callable[[], None]:
    """The backward of one pass; returns what is left to do once the gradients of the rank's own keys have arrived."""
    schedule, terms, dtype = one.schedule, one.gathered_terms(), queries.lse.dtype
    assert isinstance(schedule, GatherSchedule)
    grad_query = zeroed_sum_for(targets.query)
    grad_keys, grad_values = torch.zeros_like(keys, dtype=dtype), torch.zeros_like(values, dtype=dtype)
    into = Gradients(grad_query, grad_keys, grad_values)
    add_gradients(call.kernel, schedule.tiles, queries, keys, values, into, terms)
    keep(grad_query, targets.query)
    if bring_home is not None:
        bring_home()
    # Each copy takes as much memory as what it is a copy of, which goes as soon as it may.
    del into, grad_query
    own_key, *other_keys = _by_part(schedule, grad_keys)
    del grad_keys
    own_value, *other_values = _by_part(schedule, grad_values)
    del grad_values
    assert len(other_keys) == len(other_values) == len(schedule.hops)
    outgoing = [Pair.pack(other_keys.pop(0), other_values.pop(0)) for _ in schedule.hops]
    incoming = [Pair.empty_like(own_key, own_value) for _ in schedule.hops]
    # Back to where the keys came from.
    hops = [hop.reversed() for hop in schedule.hops]
    under_way = post_exchanges(call.group, hops, outgoing, incoming, MessageKind.GRADIENTS)

    def finish() -> None:
        grad_key, grad_value = own_key, own_value
        for pair in under_way.wait():
            grad_key, grad_value = grad_key + pair.first, grad_value + pair.second
        targets.key.copy_(grad_key)
        targets.value.copy_(grad_value)

    return finish


def _post_keys(call: AttentionCall, one: Pass, key: Tensor, value: Tensor) -> Exchange:
    assert isinstance(one.schedule, GatherSchedule)
    hops = one.schedule.hops
    own = Pair.pack(one.of_keys(key), one.of_keys(value)) if hops else None
    incoming = [] if own is None else [Pair.empty_like(own.first, own.second) for _ in hops]
    outgoing = [] if own is None else [own] * len(hops)
    return post_exchanges(call.group, hops, outgoing, incoming, MessageKind.KEYS_AND_VALUES)


def _in_order(schedule: GatherSchedule, parts: list[Tensor]) -> Tensor:
    """The gathered tokens in the order in which the tiles count them."""
    if not schedule.hops and len(schedule.pieces) == 1:
        return parts[0]
    return torch.cat([parts[piece.part][:, :, piece.keys] for piece in schedule.pieces], 2)


def _by_part(schedule: GatherSchedule, gathered_tokens: Tensor) -> list[Tensor]:
    """Undoes `_in_order`: what belongs to each part."""
    if not schedule.hops and len(schedule.pieces) == 1:
        return [gathered_tokens]
    lengths = [piece.keys.stop - piece.keys.start for piece in schedule.pieces]
    by_part: list[list[tuple[int, Tensor]]] = [[] for _ in range(len(schedule.hops) + 1)]
    for piece, tokens in zip(schedule.pieces, torch.split(gathered_tokens, lengths, 2), strict=True):
        by_part[piece.part].append((piece.keys.start, tokens))
    return [torch.cat([tokens for _, tokens in sorted(each, key=lambda one: one[0])], 2) for each in by_part]
