"""One call of attention over ranks: what meets what by which kernel, its forward passes and its backward passes.

Shapes: B batch, H query heads, K key/value heads, S tokens of this rank, D head dim.

What attention over ranks accepts: its arguments, dtypes as autocast wants them, and shapes that fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.ring_attention.kernels.kernel import BlockGradients, Gradients, Queries, QueriesOfPass
from parcompile.runtime.ring_attention.route import GatherSchedule, plan_gather

from .document_tiles import Masking
from .kernels import Band, Tile
from .kernels.blocks import RunningAttention, attend, unseen_rows_to_infinity
from .kernels.fused import CpuFlashKernel, is_fused_on_cpus
from .kernels.kernel import Terms, accumulation_dtype
from .kernels.selection import select_kernel
from .passes import AttentionCall, Pass, head_groups
from .ring import around, gathered, gathered_backward, ring_backward
from .route import RingStep, effective_layout, plan_route
from .sequence import Documents, documents_of_rows, positions_of_ranks


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments, all of them optional."""

    group: dist.ProcessGroup | None
    layout: CpLayout | str
    causal: bool
    scale: float | None
    window: int | None
    documents: Documents | None
    per_document: bool
    sinks: Tensor | None
    softcap: float | None
    alibi_slopes: Tensor | None
    bias: Tensor | None
    dropout: float
    dropout_seed: int | None
    first_row: int
    first_head: int


class RingOptions(AttentionOptions, total=False):
    """Those of the ring."""

    inner_ranks: int | None


def autocast(tensor: Tensor) -> Tensor:
    """What autocast does for `scaled_dot_product_attention`: fp64 stays as it is."""
    device = tensor.device.type
    if tensor.is_meta:  # a device that autocast does not know
        return tensor
    if tensor.dtype is not torch.float64 and torch.is_autocast_enabled(device):
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def check_inputs(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> None:
    """Raise ValueError, with the numbers, where the tensors do not fit together."""
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
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise ValueError(f"ring attention: sinks {list(sinks.shape)} must be one score for each query head ({shapes})")


def check_terms(
    query: Tensor,
    ranks: int,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    dropout: float,
    dropout_seed: int | None,
) -> None:
    """Raise ValueError, with the numbers, where what is added to the scores or dropped does not fit."""
    batch, heads, length, _ = query.shape
    for name, tensor in (("alibi_slopes", alibi_slopes), ("bias", bias)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"ring attention: {name} would get no gradient: give {name}.detach()")
    if alibi_slopes is not None and alibi_slopes.shape != (heads,):
        raise ValueError(
            f"ring attention: alibi_slopes {list(alibi_slopes.shape)} must be one for each of {heads} query heads"
        )
    if bias is not None and (
        bias.dim() != 4
        or bias.shape[0] not in (1, batch)
        or bias.shape[1] not in (1, heads)
        or bias.shape[2:] != (length, length * ranks)
    ):
        raise ValueError(
            f"ring attention: bias {list(bias.shape)} must be [1 or {batch}, 1 or {heads}, {length} local tokens, "
            f"{length} · {ranks} ranks = {length * ranks}]"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"ring attention: dropout {dropout} must be at least 0 and below 1")
    if dropout and dropout_seed is None:
        raise ValueError("ring attention: dropout wants a dropout_seed that is equal on all ranks")


def attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    carrier: str,
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
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    dropout_seed: int | None = None,
    first_row: int = 0,
    first_head: int = 0,
    inner_ranks: int | None = None,
) -> AttentionCall:
    """Which rank meets which keys when, and by which kernel; arguments and errors are those of `ring_attention`."""
    check_inputs(query, key, value, sinks)
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    if rank < 0:
        raise ValueError(f"ring attention: global rank {dist.get_rank()} is not in the group that it was given")
    check_terms(query, size, alibi_slopes, bias, dropout, dropout_seed)
    banded = False
    schedules: list[tuple[slice, tuple[RingStep, ...] | GatherSchedule, Terms | None]] = []
    has_terms = alibi_slopes is not None or bias is not None or dropout > 0
    for rows, borders in documents_of_rows(documents, query.shape[0]):
        masking = Masking(causal, window, borders, per_document)
        banded |= masking.has_bands(effective_layout(CpLayout(layout), size))
        place = CpLayout(layout), size, rank, query.shape[2], masking
        schedule = plan_gather(*place) if carrier == "all_gather" else plan_route(*place, inner_ranks)
        terms = None
        if has_terms:
            every = positions_of_ranks(layout, size, query.shape[2], borders if per_document else None, query.device)
            terms = Terms(
                every[rank],
                every.flatten(),
                torch.arange(first_row, first_row + query.shape[0], device=query.device),
                torch.arange(first_head, first_head + query.shape[1], device=query.device),
                alibi_slopes,
                bias,
                dropout,
                dropout_seed or 0,
            )
        schedules.append((rows, schedule, terms))
    return AttentionCall(
        group,
        select_kernel(
            query,
            value,
            banded=banded,
            packed=documents is not None,
            softcap=softcap,
            added=alibi_slopes is not None or bias is not None,
            dropout=dropout > 0,
        ),
        query.shape[3] ** -0.5 if scale is None else scale,
        tuple(
            Pass(rows, q_heads, kv_heads, schedule, None if terms is None else terms.of_pass(rows, q_heads))
            for rows, schedule, terms in schedules
            for q_heads, kv_heads in head_groups(query[rows], key[rows], value[rows], size)
        ),
    )


def only_block(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Band | None:
    """The band of the block that is all there is, on one rank: nothing is merged then, and nothing summed."""
    if len(call.passes) != 1 or query.numel() == 0:
        return None
    (one,) = call.passes
    if one.terms is not None or isinstance(one.schedule, GatherSchedule) or len(one.schedule) != 1:
        return None
    tiles = one.schedule[0].tiles
    if len(tiles) != 1 or one.of_queries(query).shape != query.shape:
        return None
    (tile,) = tiles
    whole = tile.queries.indices(query.shape[2]) == tile.keys.indices(key.shape[2]) == (0, query.shape[2], 1)
    # Other blocks than these CPUs compute in tiles of their own.
    fits = not isinstance(call.kernel, CpuFlashKernel) or is_fused_on_cpus(query, key, value, tile.band, None)
    return tile.band if whole and fits and call.kernel.one_call else None


def attention_backward(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and sinks."""
    if sinks is None and (band := only_block(call, query, key, value)) is not None:
        block, hidden = BlockGradients(query, key, value), unseen_rows_to_infinity(lse)
        read = Queries(query, grad_out, out, hidden, call.scale)
        call.kernel.backward(read, key, value, band=band, terms=None, into=block)
        grads = tuple(one.to(query.dtype) for one in block.given)  # kernels of CPUs compute fp16 in fp32
        return grads[0], grads[1], grads[2], None
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    bring_home = None
    ahead = gathered(call, key, value)
    for one in call.passes:
        queries = queries_of_pass(call, one, query, grad_out, out, lse)
        targets = Gradients(one.of_queries(grads[0]), one.of_keys(grads[1]), one.of_keys(grads[2]))
        # The last gradients of this pass travel while the next one computes.
        if isinstance(one.schedule, GatherSchedule):
            bring_home = gathered_backward(call, one, queries, *next(ahead), targets, bring_home)
        else:
            keys, values = one.of_keys(key), one.of_keys(value)
            bring_home = ring_backward(call, one, queries, keys, values, targets, bring_home)
    if bring_home is not None:
        bring_home()
    return *grads, None if sinks is None else _sink_gradient(sinks, grad_out, out, lse)


def queries_of_pass(
    call: AttentionCall, one: Pass, query: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor
) -> QueriesOfPass:
    """What backward of a pass reads of its queries, their outputs and the gradients of these."""
    hidden = unseen_rows_to_infinity(one.of_queries(lse))
    return QueriesOfPass(one.of_queries(query), one.of_queries(grad_out), one.of_queries(out), hidden, call.scale)


def attention_forward(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    beside: Callable[[Pass, RunningAttention], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, S, E] and log-sum-exp [B, H, S], pass by pass; `beside` attends to further keys in each."""
    if sinks is None and beside is None and (band := only_block(call, query, key, value)) is not None:
        out, lse = call.kernel.forward(query, key, value, band=band, scale=call.scale, terms=None)
        return out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse
    batch, heads, length, _ = query.shape
    # [B, S, H, E] in memory: models join the heads of a token next.
    out = query.new_empty((batch, length, heads, value.shape[3])).transpose(1, 2)
    lse = query.new_empty((batch, heads, length), dtype=accumulation_dtype(query.dtype))
    ahead = gathered(call, key, value)
    for one in call.passes:
        running = RunningAttention(one.of_queries(out), one.of_queries(lse))
        for tiles, keys, values, terms in blocks(call, one, key, value, ahead):
            attend(call.kernel, tiles, one.of_queries(query), keys, values, running, call.scale, terms)
        if beside is not None:
            beside(one, running)
        if sinks is not None:
            running.add_sinks(sinks[one.q_heads])
        running.finish()
    return out, lse


def blocks(
    call: AttentionCall, one: Pass, key: Tensor, value: Tensor, ahead: Iterator[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Sequence[Tile], Tensor, Tensor, Terms | None]]:
    """Tiles, the keys and values that they are of, and these keys' terms, as the keys come."""
    if isinstance(one.schedule, GatherSchedule):
        yield (one.schedule.tiles, *next(ahead), one.gathered_terms())
        return
    for step, keys, values in around(call.group, one.schedule, one.of_keys(key), one.of_keys(value)):
        yield step.tiles, keys, values, one.terms_of_step(step)


def _sink_gradient(sinks: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """A sink is a key whose value is 0: the gradient of its score is −p · Σ grad_out · out, summed over the queries."""
    delta_BHS = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weight_BHS = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    return -(weight_BHS * delta_BHS).sum((0, 2)).to(sinks.dtype)
