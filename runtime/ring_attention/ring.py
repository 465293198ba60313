"""Ring attention: exact attention over a sequence that is split over the ranks of a context-parallel group.

Keys and values travel around the ring while each rank attends with its own queries to those at hand. In backward they
travel once more, and the gradients of keys and values follow them home. Which rank attends to what in which step is the
compiler's schedule (`parcompile.layout.sequence`), executed as it is.

Shapes: B batch, H query heads, K key/value heads, S tokens of this rank, D head dim.

Source: ring attention, arXiv 2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parcompile.layout.sequence import CpLayout

from .documents import Documents, documents_of_rows
from .exchange import Exchange, Pair, Stream, post_exchange
from .inputs import autocast, check_inputs
from .kernels import Gradients, Kernel, Queries, add_gradients, attend, select_kernel
from .merge import RunningAttention, accumulation_dtype, unseen_rows_to_infinity
from .recompute import attention_once
from .route import Hop, Masking, Step, plan_route
from .tiles import Tile

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
    window: int | None = None,
    documents: Documents | None = None,
    per_document: bool = False,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of this rank's queries over the keys of every rank of `group`; differentiable in all tensors.

    Every rank of the group calls it with equal shapes and masks. The local tokens are those that the layout deals to
    the rank (`split_sequence`), in their order.

    Args:
        query: [B, H, S, D].
        key: [B, K, S, D] with H a multiple of K; shared heads are neither repeated in memory nor on the wire.
        value: [B, K, S, E]; with E other than D on a slower kernel.
        group: the context-parallel group, any part of the world. None or a group of one rank: plain local attention.
        layout: how the sequence is dealt to the ranks; zigzag balances causal attention.
        causal: whether a query sees only keys that are not later in the sequence.
        scale: factor on the scores; default 1/√D.
        window: a query sees only keys less than this many tokens away, itself included.
        documents: where packed documents begin in the whole sequence, and its length: `cu_seqlens`, [0, …, S · ranks].
            A query sees only keys of its document. One list for all rows of the batch, or one list per row.
        per_document: the layout was applied to each document on its own, which balances the ranks.
        sinks: for each query head [H] the score of one more key, which has no value. The gradient is this rank's part
            of the sum over ranks.
        softcap: scores s become softcap · tanh(s / softcap), on a slower kernel.

    Returns:
        [B, H, S, E] in the dtype of the inputs, stored so that `out.transpose(1, 2)` is contiguous. A query that sees
        no key gets 0, and so does its gradient.

    Raises:
        ValueError: shapes, dtypes, devices or masks that do not fit together, with the numbers.
    """
    query, key, value = autocast(query), autocast(key), autocast(value)
    check_inputs(query, key, value, sinks)
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    if rank < 0:
        raise ValueError(f"ring attention: global rank {dist.get_rank()} is not in the group that it was given")
    routes = [
        (rows, plan_route(CpLayout(layout), size, rank, query.shape[2], Masking(causal, window, borders, per_document)))
        for rows, borders in documents_of_rows(documents, query.shape[0])
    ]
    job = _Job(
        group,
        select_kernel(query, value, banded=window is not None, softcap=softcap),
        query.shape[3] ** -0.5 if scale is None else scale,
        tuple(
            _Pass(rows, q_heads, kv_heads, steps)
            for rows, steps in routes
            for q_heads, kv_heads in _head_groups(query[rows], key[rows], value[rows])
        ),
    )
    out: Tensor = _RingAttention.apply(query, key, value, sinks, job)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass around the ring, for some rows of the batch and some heads."""

    rows: slice
    q_heads: slice
    kv_heads: slice
    steps: tuple[Step, ...]

    def of_queries(self, tensor: Tensor) -> Tensor:
        return tensor[self.rows, self.q_heads]

    def of_keys(self, tensor: Tensor) -> Tensor:
        return tensor[self.rows, self.kv_heads]


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to do, apart from the tensors.

    There is a pass for each group of heads, so that travelling buffers and fp32 sums are a fraction of the tensors.
    """

    group: dist.ProcessGroup | None
    kernel: Kernel
    scale: float
    passes: tuple[_Pass, ...]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, job: _Job) -> Tensor:
        out, lse = attention_once(lambda: _forward(job, query, key, value, sinks))
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.job = job
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        job: _Job = ctx.job
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        lse = unseen_rows_to_infinity(lse)
        bring_home = None
        for one in job.passes:
            queries = Queries(
                one.of_queries(query), one.of_queries(grad_out), one.of_queries(out), one.of_queries(lse), job.scale
            )
            targets = Gradients(one.of_queries(grads[0]), one.of_keys(grads[1]), one.of_keys(grads[2]))
            # The last gradients of this pass travel while the next one computes its local tiles.
            bring_home = _backward(job, one, queries, one.of_keys(key), one.of_keys(value), targets, bring_home)
        if bring_home is not None:
            bring_home()
        return (*grads, None if sinks is None else _sink_gradient(sinks, grad_out, out, lse), None)


def _forward(job: _Job, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [B, H, S, E] and log-sum-exp [B, H, S], pass by pass."""
    batch, heads, length, _ = query.shape
    # [B, S, H, E] in memory: models join the heads of a token next.
    out = query.new_empty((batch, length, heads, value.shape[3])).transpose(1, 2)
    lse = query.new_empty((batch, heads, length), dtype=accumulation_dtype(query.dtype))
    for one in job.passes:
        total = _sum_for(one.of_queries(out))
        running = RunningAttention(total, one.of_queries(lse))
        for _, tiles, keys, values in _around(job.group, one.steps, one.of_keys(key), one.of_keys(value)):
            for tile in tiles:
                attend(job.kernel, tile, one.of_queries(query), keys, values, running, job.scale)
        if sinks is not None:
            running.add_sinks(sinks[one.q_heads])
        running.finish()
        _keep(total, one.of_queries(out))
    return out, lse


def _backward(
    job: _Job,
    one: _Pass,
    queries: Queries,
    key: Tensor,
    value: Tensor,
    targets: Gradients,
    bring_home: Callable[[], None] | None,
) -> Callable[[], None]:
    """One pass of the backward ring; returns what is left to do once the last gradients have arrived.

    The gradients of a rank's own keys stay with it. Those of others are summed while they travel behind the keys: they
    start in step 1 and are home after P − 1 hops. `bring_home` is what the pass before left; it is called after step 0.
    """
    grad_query, grad_key, grad_value = map(_zeroed_sum_for, (targets.query, targets.key, targets.value))
    exchange: Exchange | None = None
    spare: Pair | None = None
    for hop, tiles, keys, values in _around(job.group, one.steps, key, value):
        if hop is None:
            for tile in tiles:
                add_gradients(job.kernel, tile, queries, keys, values, Gradients(grad_query, grad_key, grad_value))
            if bring_home is not None:
                bring_home()
            continue
        travelling = spare or Pair.empty_like(keys, values, grad_key.dtype)
        travelling.message.zero_()
        into = Gradients(grad_query, travelling.first, travelling.second)
        for tile in tiles:
            add_gradients(job.kernel, tile, queries, keys, values, into)
        if exchange is None:
            incoming = Pair.empty_like(keys, values, grad_key.dtype)
        else:
            incoming, spare = exchange.wait(), exchange.outgoing
            travelling.message.add_(incoming.message)
        exchange = post_exchange(job.group, hop, travelling, incoming, Stream.GRADIENTS)

    _keep(grad_query, targets.query)

    def finish() -> None:
        nonlocal exchange
        if exchange is not None:
            own = exchange.wait()
            grad_key.add_(own.first)
            grad_value.add_(own.second)
            # Its buffers are free before the next pass needs as many.
            exchange = None
        _keep(grad_key, targets.key)
        _keep(grad_value, targets.value)

    return finish


def _around(
    group: dist.ProcessGroup | None, steps: tuple[Step, ...], key: Tensor, value: Tensor
) -> Iterator[tuple[Hop | None, tuple[Tile, ...], Tensor, Tensor]]:
    """Gradients' hop, tiles, keys and values of each step; the next keys are under way while the caller works on these.

    Two buffers take turns: what was received is sent on while the other one receives.
    """
    at_hand = spare = None
    keys, values = key, value
    for step in steps:
        exchange = None
        if step.keys_hop is not None:
            at_hand = at_hand or Pair.pack(key, value)
            spare = spare or Pair.empty_like(key, value)
            exchange = post_exchange(group, step.keys_hop, at_hand, spare, Stream.KEYS_AND_VALUES)
        yield step.gradients_hop, step.tiles, keys, values
        if exchange is not None:
            at_hand, spare = exchange.wait(), at_hand
            keys, values = at_hand.first, at_hand.second


def _sink_gradient(sinks: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """A sink is a key whose value is 0: the gradient of its score is −p · Σ grad_out · out, summed over the queries."""
    delta_BHS = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weight_BHS = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    return -(weight_BHS * delta_BHS).sum((0, 2)).to(sinks.dtype)


def _sum_for(target: Tensor) -> Tensor:
    """Where to sum up what `target` will hold: the tensor itself where its dtype is exact enough."""
    dtype = accumulation_dtype(target.dtype)
    return target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)


def _zeroed_sum_for(target: Tensor) -> Tensor:
    return _sum_for(target).zero_()


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
