"""Ring attention: exact attention over a sequence that is split over the ranks of a context-parallel group.

Keys and values travel around the ring while each rank attends with its own queries to those at hand. In backward they
travel once more, and the gradients of keys and values follow them home. Which rank attends to what in which step is the
compiler's schedule (`parcompile.layout.sequence`), executed as it is.

Shapes: B batch, H query heads, K key/value heads, S tokens of this rank, D head dim.

Source: ring attention, arXiv 2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parcompile.layout.sequence import CpLayout

from .exchange import Exchange, Pair
from .kernels import Gradients, Kernel, Queries, Tile, add_gradients, attend, select_kernel
from .merge import RunningAttention, accumulation_dtype, unseen_rows_to_infinity
from .route import Route

# A message should be long enough that its latency does not matter, and a launch on a GPU should fill it about twice.
_SMALLEST_MESSAGE_BYTES = 1 << 20
_CUDA_ROWS_PER_LAUNCH = 2 * 132 * 128


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: CpLayout | str = CpLayout.ZIGZAG,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries over the keys of every rank of `group`; differentiable in all three tensors.

    Every rank of the group calls it with equal shapes. The local tokens are those that the layout deals to the rank
    (`split_sequence`), in their order.

    Args:
        query: [B, H, S, D].
        key: [B, K, S, D] with H a multiple of K; shared heads are neither repeated in memory nor on the wire.
        value: [B, K, S, D].
        group: the context-parallel group, any part of the world. None or a group of one rank: plain local attention.
        layout: how the sequence is dealt to the ranks; zigzag balances causal attention.
        causal: whether a query sees only keys that are not later in the sequence.
        scale: factor on the scores; default 1/√D.

    Returns:
        [B, H, S, D] in the dtype of the inputs, stored so that `out.transpose(1, 2)` is contiguous.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, with the numbers.
    """
    query, key, value = _autocast(query), _autocast(key), _autocast(value)
    _check(query, key, value)
    route = Route.of(group, CpLayout(layout), causal=causal, local_length=query.shape[2])
    scale = query.shape[3] ** -0.5 if scale is None else scale
    out: Tensor = _RingAttention.apply(query, key, value, route, scale)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    """Runs the ring once per group of heads, so that travelling buffers and fp32 sums are a fraction of the tensors."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, route: Route, scale: float) -> Tensor:
        kernel = select_kernel(query, value)
        batch, heads, length, _ = query.shape
        # [B, S, H, D] in memory: models join the heads of a token next.
        out = query.new_empty((batch, length, heads, value.shape[3])).transpose(1, 2)
        lse = query.new_empty((batch, heads, length), dtype=accumulation_dtype(query.dtype))
        for q_heads, kv_heads in _head_groups(query, key, value):
            total = _sum_for(out[:, q_heads])
            running = RunningAttention(total, lse[:, q_heads])
            _forward(route, kernel, query[:, q_heads], key[:, kv_heads], value[:, kv_heads], running, scale)
            _keep(total, out[:, q_heads])
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.route, ctx.scale = route, scale
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        kernel, lse = select_kernel(query, value), unseen_rows_to_infinity(lse)
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        bring_home = None
        for q_heads, kv_heads in _head_groups(query, key, value):
            queries = Queries(query[:, q_heads], grad_out[:, q_heads], out[:, q_heads], lse[:, q_heads], ctx.scale)
            targets = Gradients(grads[0][:, q_heads], grads[1][:, kv_heads], grads[2][:, kv_heads])
            keys, values = key[:, kv_heads], value[:, kv_heads]
            # The last gradients of these heads travel while the next heads compute their local block.
            bring_home = _backward(ctx.route, kernel, queries, keys, values, targets, bring_home)
        if bring_home is not None:
            bring_home()
        return (*grads, None, None)


def _forward(
    route: Route, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, running: RunningAttention, scale: float
) -> None:
    """One pass around the ring for some heads."""
    for _, tiles, keys, values in _around(route, key, value):
        for tile in tiles:
            attend(kernel, tile, query, keys, values, running, scale)
    running.finish()


def _backward(
    route: Route,
    kernel: Kernel,
    queries: Queries,
    key: Tensor,
    value: Tensor,
    targets: Gradients,
    bring_home: Callable[[], None] | None,
) -> Callable[[], None]:
    """One pass around the ring for some heads; returns what is left to do once the last gradients have arrived.

    The gradients of a rank's own keys stay with it. Those of others are summed while they travel behind the keys: they
    start in step 1 and are home after P − 1 hops. `bring_home` is what the pass before has left to do; it is called
    after step 0.
    """
    sums = Gradients(_sum_for(targets.query), _sum_for(targets.key), _sum_for(targets.value))
    for total in (sums.query, sums.key, sums.value):
        total.zero_()
    exchange: Exchange | None = None
    spare: Pair | None = None
    for step, tiles, keys, values in _around(route, key, value):
        if step == 0:
            for tile in tiles:
                add_gradients(kernel, tile, queries, keys, values, sums)
            if bring_home is not None:
                bring_home()
            continue
        travelling = spare or Pair.empty_like(keys, values, sums.key.dtype)
        travelling.message.zero_()
        for tile in tiles:
            add_gradients(
                kernel, tile, queries, keys, values, Gradients(sums.query, travelling.first, travelling.second)
            )
        if exchange is None:
            incoming = Pair.empty_like(keys, values, sums.key.dtype)
        else:
            incoming, spare = exchange.wait(), exchange.outgoing
            travelling.message.add_(incoming.message)
        exchange = route.pass_gradients_on(travelling, incoming)

    def finish() -> None:
        if exchange is not None:
            own = exchange.wait()
            sums.key.add_(own.first)
            sums.value.add_(own.second)
        _keep(sums.query, targets.query)
        _keep(sums.key, targets.key)
        _keep(sums.value, targets.value)

    return finish


def _around(route: Route, key: Tensor, value: Tensor) -> Iterator[tuple[int, tuple[Tile, ...], Tensor, Tensor]]:
    """Step, tiles, and the keys and values at hand; the next ones are under way while the caller works on these.

    Two buffers take turns: what was received is sent on while the other one receives.
    """
    at_hand = spare = None
    for step, tiles in route:
        exchange = None
        if step.send_to is not None:
            at_hand = at_hand or Pair.pack(key, value)
            exchange = route.pass_on(step, at_hand, spare or Pair.empty_like(key, value))
        if at_hand is None or step.step == 0:
            yield step.step, tiles, key, value
        else:
            yield step.step, tiles, at_hand.first, at_hand.second
        if exchange is not None:
            at_hand, spare = exchange.wait(), at_hand


def _sum_for(target: Tensor) -> Tensor:
    """Where to sum up what `target` will hold: the tensor itself where its dtype is exact enough."""
    dtype = accumulation_dtype(target.dtype)
    return target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)


def _keep(total: Tensor, target: Tensor) -> None:
    if total is not target:
        target.copy_(total)


def _head_groups(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[slice, slice]]:
    """Query heads and the key/value heads they read, for each pass around the ring; equal on every rank."""
    heads, kv_heads = query.shape[1], key.shape[1]
    share = heads // kv_heads
    bytes_per_head = (key[:, 0].numel() + value[:, 0].numel()) * key.element_size()
    rows_per_head = query.shape[0] * share * query.shape[2]
    for size in range(1, kv_heads + 1):
        fills = query.device.type != "cuda" or size * rows_per_head >= _CUDA_ROWS_PER_LAUNCH
        if size == kv_heads or (kv_heads % size == 0 and fills and size * bytes_per_head >= _SMALLEST_MESSAGE_BYTES):
            break
    return [
        (slice(start * share, (start + size) * share), slice(start, start + size)) for start in range(0, kv_heads, size)
    ]


def _autocast(tensor: Tensor) -> Tensor:
    """What autocast does for `scaled_dot_product_attention`: fp64 stays as it is."""
    device = tensor.device.type
    if tensor.dtype is not torch.float64 and torch.is_autocast_enabled(device):
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"ring attention: expected [batch, heads, local tokens, head dim] three times, got {shapes}")
    if not (query.dtype == key.dtype == value.dtype and query.device == key.device == value.device):
        raise ValueError(
            f"ring attention: query, key and value must have one dtype and one device, got query {query.dtype} on "
            f"{query.device}, key {key.dtype} on {key.device}, value {value.dtype} on {value.device}"
        )
    if not query.dtype.is_floating_point:
        raise ValueError(f"ring attention: expected a floating-point dtype, got {query.dtype}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[2] != key.shape[2]:
        raise ValueError(f"ring attention: batch, key/value heads and local tokens must be equal, got {shapes}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"ring attention: query and key must have one head dim, got {shapes}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"ring attention: {query.shape[1]} query heads are no multiple of {key.shape[1]} key/value heads ({shapes})"
        )
