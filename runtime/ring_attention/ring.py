"""Keys and values go around the ring while each rank attends with its own queries to those at hand.

In backward they travel once more, and the gradients of keys and values follow them home. Which rank attends to what in
which step is the compiler's schedule (`parcompile.layout.sequence`), executed as it is.

KeySource: ring attention, arXiv 2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange, MessageKind, Pair, post_exchange
from .gather_schedule import GatherSchedule
from .kernels.blocks import add_gradients
from .kernels.gradients import Gradients, Queries
from .passes import AttentionCall, Pass, keep, zeroed_sum_for
from .route import RingStep


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
