"""Follows what a rank does on the meta device, operator by operator.

It sees which messages are sent, which storages live at the same time, and which slice of which weight is copied where.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parcompile.runtime.groups import Mesh

from .counting import MessageCounter
from .stand_in import META


class MetaTracker(MessageCounter):  # type: ignore[no-untyped-call]
    """Follows what a rank does without memory: its messages, its live bytes, and which slices are copied where."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh.groups, mesh.lanes.values())
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_before_reduction: int | None = None
        """The peak when gradients were reduced for the first time since `restart_peak`."""
        self._storages: dict[int, tuple[Any, int]] = {}
        self._copies: dict[int, list[tuple[int, Tensor]]] = {}
        self.keep_copies = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator; one that would read a value returns zero instead."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # Norms and overflow are asked for: zeros let DeepSpeed take its step.
            return 0.0 if args[0].is_floating_point() else 0
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cpu" and args and _any_meta(args):
            kwargs = {**kwargs, "device": META}
        if self.keep_copies and func is torch.ops.aten.copy_.default and args[0].is_meta:
            self._copies.setdefault(args[0].untyped_storage()._cdata, []).append((args[0].storage_offset(), args[1]))
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(found, Tensor):
            self._see(found)
        elif isinstance(found, tuple | list):
            for leaf in tree_leaves(found):
                if isinstance(leaf, Tensor):
                    self._see(leaf)
        return found

    def record(self, func: Any, args: tuple[Any, ...]) -> str | None:
        """Counts a message; the first over dp and cp begins the reduction of gradients."""
        group = super().record(func, args)
        if group == "dp-cp" and self.peak_before_reduction is None:
            self.peak_before_reduction = self.peak_bytes
        return group

    def copies_into(self, tensor: Tensor) -> list[tuple[int, Tensor]]:
        """What was copied into a tensor while `keep_copies` was set: where to (as offset), and what from."""
        return self._copies.get(tensor.untyped_storage()._cdata, [])

    def forget_copies(self) -> None:
        """Let go of what was copied."""
        self._copies.clear()

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors: they hold shapes only, and would be on meta on a real device too."""
        for tensor in tensors:
            self._free(tensor.untyped_storage()._cdata)

    def restart_peak(self) -> int:
        """Look for the peak from here on; returns what is live now."""
        self.peak_bytes, self.peak_before_reduction = self.live_bytes, None
        return self.live_bytes

    def _see(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        self._storages[key] = weakref.ref(storage, functools.partial(self._freed, key)), size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int, _: object) -> None:
        self._free(key)

    def _free(self, key: int) -> None:
        found = self._storages.pop(key, None)
        if found is not None:
            self.live_bytes -= found[1]
            self._copies.pop(key, None)


def _any_meta(args: tuple[Any, ...]) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(args))
