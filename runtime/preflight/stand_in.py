"""This process as one rank of any world: a fake process group, an accelerator without memory, and what it does there.

Shapes, types and storages of tensors are real there, values are not. DeepSpeed runs as it does in training. A plan for
NVIDIA GPUs runs on `cuda` where this host can have it without a GPU (`cuda_host`), and any other on the meta device.

Follows what a rank does, operator by operator.

It sees which messages are sent, which storages live at the same time, and which slice of which weight is copied where.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parcompile.plan import Plan
from parcompile.runtime.deepspeed_patches.engine import forbid_jit_builds, forget_groups
from parcompile.runtime.deepspeed_patches.optimizer_state import without_values
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh, create_groups
from parcompile.runtime.transport import gloo

from .counting import MessageCounter, tensors_in
from .cuda_host import NoCudaHostError, always, card_of, cuda_without_gpu
from .waits import place

_ATEN = torch.ops.aten
META = torch.device("meta")
CUDA = torch.device("cuda", 0)


@contextlib.contextmanager
def device_of_plan(plan: Plan) -> Iterator[tuple[torch.device, str]]:
    """The device that stands for the plan's, while it can be had, and why it is not `cuda` where it is not."""
    accelerator = plan.spec.cluster.accelerator
    if card_of(accelerator) is None:
        yield META, "" if accelerator == "cpu" else f"{accelerator} is no GPU of NVIDIA's"
        return
    with contextlib.ExitStack() as entered:
        found = CUDA, ""
        try:
            entered.enter_context(cuda_without_gpu())
        except NoCudaHostError as error:
            found = META, str(error)
        yield found


def default_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """For modules that make tensors on the default device: meta. On `cuda` they are the host's, as in training."""
    return device if device.type == "meta" else contextlib.nullcontext()


@contextlib.contextmanager
def older_objects_left_alone() -> Iterator[None]:
    """Steps collect garbage several times. Going through all that torch and DeepSpeed hold took half of a preflight.

    Objects that were frozen before, by whoever calls, stay so, and those that came since are looked through.
    """
    import_module("deepspeed")  # what it brings is older, too
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def stand_in(plan: Plan, rank: int, device: torch.device = META) -> Iterator[Mesh]:
    """This rank's place in the plan's world, with every process group that the runtime gives it; undone at the end.

    Raises:
        RunError: this process is in a real world already.
    """
    if dist.is_initialized():
        raise RunError("this process has joined other ranks: preflight needs one of its own")
    from deepspeed.accelerator import get_accelerator, set_accelerator

    before, variables = get_accelerator(), {"RANK": str(rank), "WORLD_SIZE": str(plan.world_size), "LOCAL_RANK": "0"}
    from torch.testing._internal.distributed.fake_pg import FakeStore

    try:
        with (
            mock.patch.dict(os.environ, variables, MASTER_ADDR="127.0.0.1", MASTER_PORT="1"),
            _quiet(),
            older_objects_left_alone(),
            contextlib.ExitStack() as entered,
        ):
            forbid_jit_builds()
            set_accelerator(_accelerator(device))
            backends = f"{device.type}:fake,cpu:fake" if device.type == "meta" else "cuda:fake,meta:fake,cpu:fake"
            entered.enter_context(without_values())
            dist.init_process_group(backends, store=FakeStore(), rank=rank, world_size=plan.world_size)
            if plan.spec.cluster.accelerator == "cpu":
                entered.enter_context(gloo.stands_in_for(META))
            if device.type == "meta":
                entered.enter_context(_products_of_experts())
            yield create_groups(plan, rank, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_groups()
        set_accelerator(before)


def _products_of_experts() -> contextlib.AbstractContextManager[Any]:
    """On meta torch's grouped product knows bf16 only; transformers' own stands in for it in other types."""
    try:
        from transformers.integrations import moe
    except ImportError:
        return contextlib.nullcontext()
    possible = getattr(moe, "_can_use_grouped_mm", None)
    if possible is None:
        return contextlib.nullcontext()

    def can_use(given: Tensor, weight: Tensor, offsets: Tensor) -> bool:
        return weight.dtype is torch.bfloat16 and bool(possible(given, weight, offsets))

    return mock.patch.object(moe, "_can_use_grouped_mm", can_use)


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


def _accelerator(device: torch.device) -> Any:
    """DeepSpeed's of a device whose memory costs nothing and whose messages are those of the fake process group."""
    answers: dict[str, Any] = {"communication_backend_name": "fake"}
    if device.type != "meta":  # everything else is asked of `torch.cuda`
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator as Base
    else:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator as Base

        answers |= {"device_name": "meta", "current_device_name": "meta", "available_memory": 2**62}
        answers |= {"on_accelerator": True, "is_fp16_supported": True, "total_memory": 2**62}
        for memory in ("memory_allocated", "memory_cached", "memory_reserved"):
            answers |= {memory: 0, f"max_{memory}": 0}
    return type("Nowhere", (Base,), {name: always(value) for name, value in answers.items()})()


class MetaTracker(MessageCounter):  # type: ignore[no-untyped-call]
    """Follows what a rank does without memory: its messages, its live bytes, and which slices are copied where."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh.groups, mesh.lanes.values())
        self.mesh, self.device = mesh, mesh.device
        self.live_bytes = 0
        self.peak_bytes = 0
        self.host_bytes = 0
        """What was moved to the host and is there, as torch takes page-locked memory."""
        self.peak_before_reduction: int | None = None
        """The peak when gradients were reduced for the first time since `restart_peak`."""
        self.waits: dict[str, Counter[str]] = {}
        """By phase, for what the host waits for the device and where, and how often."""
        self.attention: dict[str, list[tuple[str, str]]] = {}
        """By layer, its kernels of attention, each with why it is not a fused one."""
        self.slower: Counter[str] = Counter()
        """Other kernels that are slower than those that there are, by name."""
        self._storages: dict[int, tuple[Any, int]] = {}
        self._copies: dict[int, list[tuple[int, Tensor]]] = {}
        self.keep_copies = False
        self._host: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._offloads = False

    def offloading(self) -> contextlib.AbstractContextManager[Any]:
        """Within it an engine is made whose optimizer or weights are on the host: what it makes there has no memory."""
        spec = self.mesh.plan.spec
        return mock.patch.object(
            self, "_offloads", spec.offload_optimizer is not None or spec.offload_param is not None
        )

    def is_for_optimizer(self, func: Any, given: Iterable[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a tensor is made on the host, of zeros or of nothing, while an engine is."""
        made = func in (_ATEN.zeros.default, _ATEN.empty.memory_format, _ATEN.full.default)
        device = kwargs.get("device")
        there = device is None or torch.device(device).type == "cpu"
        floats = (kwargs.get("dtype") or torch.get_default_dtype()).is_floating_point
        return self._offloads and made and there and floats and not any(isinstance(one, Tensor) for one in given)

    def move_to_host(self, tensors: Iterable[Tensor]) -> None:
        """Says that tensors are the host's, and with them whatever is made of them alone; on `cuda` they are."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._free(storage._cdata)
            self._host[storage._cdata] = storage

    def building(self) -> contextlib.AbstractContextManager[Any]:
        """Within it a model is built as the host does before it moves to the device, without memory."""
        return default_device(self.device)

    def place(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Moves a model that was built to the device."""
        model = model.to(self.device)  # some classes draw parameters on the CPU,
        for parameter in model.parameters():  # or write them in fp32, whatever they are told
            parameter.data = parameter.data.to(dtype)
        return model

    def injected(self, model: nn.Module) -> None:
        """What moving an injected model to the device does to what injection has added."""

    def name_layers(self, model: nn.Module) -> None:
        """From here on kernels are told by the module that takes them."""

    def is_here(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type == self.device.type

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether it is there and not the host's."""
        return self.is_here(tensor) and tensor.untyped_storage()._cdata not in self._host

    def waits_for(self, what: str) -> None:
        """The host waits."""
        self.waits.setdefault(self.phase, Counter())[f"{what} at {place()}"] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator; one that would read a value returns zero instead."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and self.has_no_value(args[0]):
            if self.is_here(args[0]):
                self.waits_for("a value is read")
            # Norms and overflow are asked for: zeros let DeepSpeed take its step.
            return 0.0 if args[0].is_floating_point() else 0
        if self.keep_copies and func is torch.ops.aten.copy_.default and self.is_here(args[0]):
            self._copies.setdefault(args[0].untyped_storage()._cdata, []).append((args[0].storage_offset(), args[1]))
        if func.namespace == "c10d":
            self.record(func, args)
        found = self.run(func, args, kwargs)
        if func is _ATEN.empty_like.default and kwargs.get("device") == torch.device("cpu") and self.is_here(args[0]):
            self._see_on_host(found, is_pinned=bool(kwargs.get("pin_memory")))
            return found
        if self._host:
            given = [one for one in tensors_in((args, kwargs)) if one.dim()]
            if given and all(one.untyped_storage()._cdata in self._host for one in given):
                self.move_to_host(tensors_in(found))
                return found
        if isinstance(found, Tensor):
            self._see(found)
        elif isinstance(found, tuple | list):
            for leaf in tensors_in(found):
                self._see(leaf)
        return found

    def has_no_value(self, tensor: Tensor) -> bool:
        """Whether there is nothing to read."""
        return tensor.is_meta

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator; what would go to the CPU stays, since meta tensors cannot be copied to it."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cpu" and any(one.is_meta for one in tensors_in(args)):
            kwargs = {**kwargs, "device": META}
        if self.is_for_optimizer(func, tree_leaves(args), kwargs):
            found = func(*args, **{**kwargs, "device": META})
            self.move_to_host([found])
            return found
        return func(*args, **kwargs)

    def record(self, func: Any, args: tuple[Any, ...]) -> str | None:
        """Counts a message; the first over dp and cp begins the reduction of gradients."""
        group = super().record(func, args)
        if group == "dp-cp":
            self.begin_reduction()
        return group

    def begin_reduction(self) -> None:
        """From here on gradients are reduced, or copied to be."""
        if self.peak_before_reduction is None:
            self.peak_before_reduction = self.peak_bytes

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

    def _see_on_host(self, tensor: Tensor, *, is_pinned: bool) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        size = 1 << (size - 1).bit_length() if is_pinned else size
        self._host[storage._cdata] = storage
        self.host_bytes += size
        weakref.finalize(storage, self._freed_on_host, size)

    def _freed_on_host(self, size: int) -> None:
        self.host_bytes -= size

    def _see(self, tensor: Tensor) -> None:
        if not self.is_on_device(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        self._storages[key] = weakref.ref(storage, lambda _: self._free(key)), size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key: int) -> None:
        if (found := self._storages.pop(key, None)) is not None:
            self.live_bytes -= found[1]
            self._copies.pop(key, None)
