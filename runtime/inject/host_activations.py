"""What recomputed layers keep for their backward pass lies in the host's memory, and comes back one layer ahead.

A layer that is computed again keeps its inputs, and what ranks have computed together, as the output of attention. On
CUDA a stream of its own copies these to page-locked memory while the layer computes; the next layer waits for that and
lets go of them. In backward each layer has those of the layer before it brought, and waits for its own. On a CPU the
same is done without streams. Weights, views of them and small tensors stay where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parcompile.layout.shards import page_locked_pieces
from parcompile.runtime.errors import everywhere
from parcompile.runtime.micro_batch import MicroBatch, current

SMALL_BYTES = 1024
"""Tensors below stay: as torchtune's and TRL's `min_offload_size`."""


class HostActivations:
    """Of the layers of a rank: which of them computed last, and the stream of the copies."""

    def __init__(self) -> None:
        self.shared: weakref.WeakValueDictionary[int, _Moved] = weakref.WeakValueDictionary()
        """By storage, what was moved: what several layers keep is moved once."""
        self._last: weakref.ref[_Layer] | None = None
        self._batch: MicroBatch | None = None
        self._stream: Any = None

    def checkpoint(self, function: Any, *args: Any, context_fn: Any, **options: Any) -> Any:
        """`torch.utils.checkpoint.checkpoint` of a layer; `context_fn` is called with `pack` and `unpack`.

        Without gradients nothing is kept or moved.
        """
        if not torch.is_grad_enabled():
            return checkpoint(function, *args, use_reentrant=False, **options)
        layer = self._begin(args)
        with torch.autograd.graph.saved_tensors_hooks(layer.pack, layer.unpack):
            contexts = partial(context_fn, pack=layer.pack, unpack=layer.unpack)
            return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **options)

    def settle(self) -> None:
        """Waits for the copies of the layer that computed last, and lets go of what it keeps here."""
        last = self._last() if self._last is not None else None
        if last is not None:
            last.let_go()

    def _begin(self, args: tuple[Any, ...]) -> _Layer:
        self.settle()
        batch = current()
        before = self._last if self._batch is batch else None
        layer = _Layer(self, before, {_key(one) for one in args if isinstance(one, Tensor) and _is_weight(one)})
        self._last, self._batch = weakref.ref(layer), batch
        return layer

    def copying(self, device: torch.device) -> AbstractContextManager[Any]:
        """Within it copies are made on their own stream, behind all that was computed so far."""
        if device.type != "cuda":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)

    def copied(self, device: torch.device) -> Any:
        """A point behind the copies so far; None where they are made at once."""
        return self._stream.record_event() if device.type == "cuda" else None

    def leave(self, tensor: Tensor) -> None:
        """Memory of a tensor is not given away before the copies so far are made."""
        if tensor.device.type == "cuda":
            tensor.record_stream(self._stream)


class _Moved:
    """The memory of a tensor, as one row of numbers: on the host, and here while a layer uses it or is about to."""

    def __init__(self, host: HostActivations, row: Tensor, storage: Any) -> None:
        self._host, self._source, self._device = host, (weakref.ref(storage), row._version, row.dtype), row.device
        self._here: Tensor | None = row
        self._version = row._version
        pinned, sizes = row.device.type == "cuda", page_locked_pieces(row.numel())
        parts = torch.split(row, sizes) if len(sizes) > 1 else (row,)
        self._there = [torch.empty_like(part, device="cpu", pin_memory=pinned) for part in parts]
        with host.copying(row.device):
            self._copy(parts, self._there)
        self._copied = host.copied(row.device)

    @staticmethod
    def _copy(given: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        for part, place in zip(given, into, strict=True):
            place.copy_(part, non_blocking=True)

    def let_go(self) -> None:
        """Lets go of it here, when the copy is made.

        Raises:
            RunError: it was written to since.
        """
        if self._here is not None:
            self._wait()
            if self._here._version != self._version:
                raise everywhere(
                    "training.activation_offloading: a layer writes to what it or a layer before it keeps for the "
                    "backward pass: set the key to false"
                )
        self._here = None

    def bring(self) -> None:
        """Begins to bring it back."""
        if self._here is None:
            sizes, dtype = [part.numel() for part in self._there], self._there[0].dtype
            self._here = torch.empty(sum(sizes), dtype=dtype, device=self._device)
            parts = torch.split(self._here, sizes) if len(sizes) > 1 else (self._here,)
            with self._host.copying(self._device):
                self._copy(self._there, parts)
            self._version = self._here._version
            self._copied = self._host.copied(self._device)

    def take(self) -> Tensor:
        """It here, for the caller alone."""
        self.bring()
        self._wait()
        row, self._here = self._here, None
        assert row is not None, "it was brought"
        return row

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def is_of(self, storage: Any, row: Tensor) -> bool:
        """Whether it is what is in a storage now, in this row."""
        source, version, dtype = self._source
        return source() is storage and (version, dtype) == (row._version, row.dtype)

    def __del__(self) -> None:
        if self._here is not None:  # a layer below which nothing trains
            self._host.leave(self._here)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor in the memory that was moved."""

    moved: _Moved
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Layer:
    """What one call of a layer keeps."""

    def __init__(self, host: HostActivations, before: weakref.ref[_Layer] | None, weights: set[int]) -> None:
        self._host, self._before, self._weights = host, before, weights
        self._moved: list[_Moved] = []
        self._brought = False

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        """Moves a tensor, unless it stays."""
        stays = tensor.layout is not torch.strided or tensor.nbytes < SMALL_BYTES
        if stays or _key(tensor) in self._weights or 0 in tensor.stride():
            return tensor
        storage, detached = tensor.untyped_storage(), tensor.detach()
        if storage.nbytes() != tensor.nbytes:  # of a larger one, a part
            part = detached.contiguous()
            return _Kept(self._move(part.view(-1)), tensor.shape, part.stride(), 0)
        row = detached.as_strided((tensor.numel(),), (1,), 0)
        return _Kept(self._move(row, storage), tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: Tensor | _Kept) -> Tensor:
        """The tensor again; the first of a layer has all others brought, and those of the layer before it."""
        if isinstance(kept, Tensor):
            return kept
        if not self._brought:
            self._brought = True
            self._bring()
            before = self._before() if self._before is not None else None
            if before is not None:
                before._bring()
        return kept.moved.take().as_strided(kept.shape, kept.stride, kept.offset)

    def let_go(self) -> None:
        """Waits for its copies and lets go of what they are of."""
        for one in self._moved:
            one.let_go()

    def _bring(self) -> None:
        for one in self._moved:
            one.bring()

    def _move(self, row: Tensor, storage: Any = None) -> _Moved:
        known = None if storage is None else self._host.shared.get(storage._cdata)
        if known is None or not known.is_of(storage, row):
            known = _Moved(self._host, row, row.untyped_storage())
        if storage is not None:
            self._host.shared[storage._cdata] = known
        if known not in self._moved:
            self._moved.append(known)
        return known


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
