"""Keys and values of all ranks at once, for one group of heads while the group before it is computed.

Every rank sends its own keys straight to those that need them, and their gradients come straight back: as many bytes as
around a ring, in one exchange.

KeySource: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .gather_schedule import GatherSchedule
from .kernels.blocks import add_gradients
from .kernels.kernel import Gradients, Queries
from .passes import AttentionCall, Pass, keep, zeroed_sum_for
from .ring import Exchange, MessageKind, Pair, post_exchanges


def gathered(call: AttentionCall, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values [B, K, gathered tokens, D] of each pass; those of the next are under way meanwhile."""
    under_way = _post(call, call.passes[0], key, value) if call.passes else None
    for one, following in zip(call.passes, [*call.passes[1:], None], strict=True):
        assert isinstance(one.schedule, GatherSchedule)
        parts = [(one.of_keys(key), one.of_keys(value))]
        if under_way is not None:
            parts += [(pair.first, pair.second) for pair in under_way.wait()]
        under_way = None if following is None else _post(call, following, key, value)
        yield _in_order(one.schedule, [part[0] for part in parts]), _in_order(one.schedule, [part[1] for part in parts])


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
    (own_key, *other_keys), (own_value, *other_values) = _by_part(schedule, grad_keys), _by_part(schedule, grad_values)
    outgoing = [Pair.pack(*pair) for pair in zip(other_keys, other_values, strict=True)]
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


def _post(call: AttentionCall, one: Pass, key: Tensor, value: Tensor) -> Exchange[Sequence[Pair]]:
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
