"""This process as one rank of any world: a fake process group, a meta accelerator, and what it does there.

Shapes, types and storages of tensors are real there, values are not. DeepSpeed runs as it does in training.

Follows what a rank does on the meta device, operator by operator.

It sees which messages are sent, which storages live at the same time, and which slice of which weight is copied where.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parcompile.plan import Plan
from parcompile.runtime.deepspeed_patches.engine import forbid_jit_builds, forget_groups
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh, create_groups
from parcompile.runtime.transport import gloo

from .counting import MessageCounter

# This process as one rank of any world: torch's fake process group, and an accelerator whose tensors are on meta.

META = torch.device("meta")


@contextlib.contextmanager
def stand_in(plan: Plan, rank: int) -> Iterator[Mesh]:
    """This rank's place in the plan's world, with every process group that the runtime gives it; undone at the end.

    Raises:
        RunError: this process is in a real world already.
    """
    if dist.is_initialized():
        raise RunError("this process has joined other ranks: preflight needs one of its own")
    from deepspeed.accelerator import get_accelerator, set_accelerator

    before, environment = get_accelerator(), dict(os.environ)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(plan.world_size), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    forbid_jit_builds()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    try:
        with _quiet(), contextlib.ExitStack() as entered:
            set_accelerator(_accelerator())
            dist.init_process_group("meta:fake,cpu:fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
            if plan.spec.cluster.accelerator == "cpu":
                entered.enter_context(gloo.stands_in_for(META))
            entered.enter_context(_products_of_experts())
            yield create_groups(plan, rank, META)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_groups()
        set_accelerator(before)
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def _products_of_experts() -> Iterator[None]:
    """On meta torch's grouped product knows bf16 only; transformers' own stands in for it in other types."""
    try:
        from transformers.integrations import moe
    except ImportError:
        yield
        return
    possible = getattr(moe, "_can_use_grouped_mm", None)
    if possible is None:
        yield
        return

    def can_use(given: Tensor, weight: Tensor, offsets: Tensor) -> bool:
        return weight.dtype is torch.bfloat16 and bool(possible(given, weight, offsets))

    with mock.patch.object(moe, "_can_use_grouped_mm", can_use):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed reports memory and settings of a machine that is not there."""
    from deepspeed.utils import logger

    level, said = logger.level, io.StringIO()
    logger.setLevel("CRITICAL")
    try:
        with contextlib.redirect_stdout(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _accelerator() -> Any:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Nowhere(CPU_Accelerator):  # type: ignore[misc]
        """A device whose memory costs nothing."""

        def device_name(self, device_index: int | None = None) -> str:  # noqa: ARG002
            return "meta"

        def current_device_name(self) -> str:
            return "meta"

        def communication_backend_name(self) -> str:
            return "fake"

        def on_accelerator(self, tensor: Tensor) -> bool:  # noqa: ARG002
            return True

        def available_memory(self, device_index: int | None = None) -> int:  # noqa: ARG002
            return 2**62

        def total_memory(self, device_index: int | None = None) -> int:  # noqa: ARG002
            return 2**62

        def memory_allocated(self, device_index: int | None = None) -> int:  # noqa: ARG002
            return 0

        def is_fp16_supported(self) -> bool:
            return True

        max_memory_allocated = memory_cached = max_memory_cached = memory_allocated
        memory_reserved = max_memory_reserved = memory_allocated

    return Nowhere()


# Follows what a rank does on the meta device, operator by operator.


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
