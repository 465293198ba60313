"""Activation checkpointing without a second ring in forward: attention is kept, what is around it is recomputed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from torch import Tensor

_Kept = tuple[Tensor, ...]


class _Here(threading.local):
    """What the calling thread does with attention: keep it in a list, take it from one, or neither."""

    keep_in: list[_Kept] | None = None
    take_from: Iterator[_Kept] | None = None


_here = _Here()


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint.checkpoint(…, use_reentrant=False, context_fn=keep_attention)`.

    Output and log-sum-exp of every `ring_attention` in the checkpointed function stay in memory, [B, H, S, D + 1], so
    that recomputation neither attends nor communicates again. In Hugging Face models:
    `gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention})`.
    """
    kept: list[_Kept] = []
    return _Keeping(kept), _Taking(kept)


def attention_once(attention: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of `attention`, or in a recomputation those of the first time.

    Raises:
        RuntimeError: there is more attention than the first time.
    """
    out, lse = once(attention)
    return out, lse


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
    if _here.keep_in is not None:
        _here.keep_in.append(tuple(one.detach() for one in found))
    return found


class _Keeping:
    def __init__(self, kept: list[_Kept]) -> None:
        self._kept = kept

    def __enter__(self) -> None:
        self._before, _here.keep_in = _here.keep_in, self._kept

    def __exit__(self, *_: object) -> None:
        _here.keep_in = self._before


class _Taking:
    """Entered anew, from the first, for each backward through the same graph."""

    def __init__(self, kept: list[_Kept]) -> None:
        self._kept = kept

    def __enter__(self) -> None:
        self._before, _here.take_from = _here.take_from, iter(self._kept)

    def __exit__(self, *_: object) -> None:
        _here.take_from = self._before
