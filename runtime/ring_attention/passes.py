"""Attention over many ranks, pass by pass, and recomputation of what is around it without a second ring.

A pass has some rows of the batch and some heads: buffers of messages and fp32 sums have only that fraction of the
tensors' size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.sequence import heads_per_pass
from parcompile.runtime.ring_attention.route import GatherSchedule
from parcompile.runtime.transport import gloo

from .kernels.kernel import Kernel, Terms, accumulation_dtype
from .route import RingStep


@dataclass(frozen=True, slots=True)
class Pass:
    """Some rows of the batch and some heads, and how their keys and values come: around the ring or all at once."""

    rows: slice
    q_heads: slice
    kv_heads: slice
    schedule: tuple[RingStep, ...] | GatherSchedule
    terms: Terms | None = None
    """Those of all keys, rank after rank; None is the usual case."""

    def of_queries(self, tensor: Tensor) -> Tensor:
        """Its part of query, output or log-sum-exp."""
        return tensor[self.rows, self.q_heads]

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Its part of key or value."""
        return tensor[self.rows, self.kv_heads]

    def terms_of_step(self, step: RingStep) -> Terms | None:
        """The terms of the keys at hand in a step of the ring."""
        if self.terms is None:
            return None
        length = self.terms.queries.shape[0]
        return self.terms.part(slice(None), slice(step.source * length, (step.source + 1) * length))

    def gathered_terms(self) -> Terms | None:
        """The terms of the keys as they are gathered."""
        if self.terms is None:
            return None
        assert isinstance(self.schedule, GatherSchedule)
        by_rank = torch.split(self.terms.keys, self.terms.queries.shape[0])
        sources = self.schedule.sources
        keys = torch.cat([by_rank[sources[piece.part]][piece.keys] for piece in self.schedule.pieces])
        return replace(self.terms, keys=keys)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention over ranks, apart from its tensors."""

    group: dist.ProcessGroup | None
    kernel: Kernel
    scale: float
    passes: tuple[Pass, ...]

    def biased(self, bias: Tensor | None) -> AttentionCall:
        """With another bias, or without one: what autograd keeps holds none, whose memory recomputation gives back."""
        passes = (
            one if one.terms is None else replace(one, terms=one.terms.biased(bias, one.rows, one.q_heads))
            for one in self.passes
        )
        return replace(self, passes=tuple(passes))


def head_groups(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> list[tuple[slice, slice]]:
    """Query heads and the key/value heads they read, for each pass; equal on every rank. One rank has one pass."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if ranks == 1:
        return [(slice(0, heads), slice(0, kv_heads))]
    share = heads // kv_heads
    size = heads_per_pass(
        kv_heads,
        (key[:, 0].numel() + value[:, 0].numel()) * key.element_size(),
        query.shape[0] * share * query.shape[2],
        fills_device=not gloo.stands_for_cpu(query.device),
    )
    return [
        (slice(start * share, (start + size) * share), slice(start, start + size)) for start in range(0, kv_heads, size)
    ]


def zeroed_sum_for(target: Tensor) -> Tensor:
    """Where to sum up what `target` will hold: the tensor itself where its dtype is exact enough."""
    dtype = accumulation_dtype(target.dtype)
    return (target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)).zero_()


def keep(total: Tensor, target: Tensor) -> None:
    """Put a finished sum where it belongs."""
    if total is not target:
        target.copy_(total)


_Kept = tuple[Tensor, ...]


class _Here(threading.local):
    """What the calling thread does with attention: keep it, take what was kept, or neither."""

    keep: Callable[[_Kept], None] | None = None
    take_from: Iterator[_Kept] | None = None


_here = _Here()


def keep_attention(
    pack: Callable[[Tensor], Any] = Tensor.detach, unpack: Callable[[Any], Tensor] = Tensor.detach
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint.checkpoint(…, use_reentrant=False, context_fn=keep_attention)`.

    Output and log-sum-exp of every `ring_attention` in the checkpointed function stay in memory, [B, H, S, D + 1], so
    that recomputation neither attends nor communicates again. In Hugging Face models:
    `gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention})`. `pack` puts a tensor
    elsewhere, and `unpack` gives it back.
    """
    kept: list[tuple[Any, ...]] = []
    return (
        _Set("keep", lambda: lambda found: kept.append(tuple(pack(one) for one in found))),
        _Set("take_from", lambda: (tuple(unpack(one) for one in each) for each in kept)),
    )


def once(exchange: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What ranks compute together by `exchange`, or in a recomputation what it gave the first time.

    Raises:
        RuntimeError: ranks exchange more often than the first time.
    """
    if _here.take_from is not None:
        kept = next(_here.take_from, None)
        if kept is None:
            raise RuntimeError("the recomputation exchanges more often between ranks than the function did at first")
        return tuple(one.detach() for one in kept)
    found = exchange()
    if _here.keep is not None:
        _here.keep(tuple(one.detach() for one in found))
    return found


class _Set:
    """Within it the calling thread does one thing with attention; entered anew for each backward through a graph."""

    def __init__(self, name: str, value: Callable[[], Any]) -> None:
        self._name, self._value = name, value

    def __enter__(self) -> None:
        self._before = getattr(_here, self._name)
        setattr(_here, self._name, self._value())

    def __exit__(self, *_: object) -> None:
        setattr(_here, self._name, self._before)
