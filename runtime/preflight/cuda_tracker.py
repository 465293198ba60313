"""Follows what a rank does on `cuda` without a GPU: fake tensors there, real ones on the host, and every wait between.

Tensors of the host have values, which plans of routes and indices need; those of the device have none. An operator
that mixes both fails as on a GPU. Copies from pages that may move, and whatever needs a value of the device, make the
host wait.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from parcompile.machines import find_accelerator
from parcompile.machines.attention_kernels import CUDA_CUDNN, CUDA_EFFICIENT
from parcompile.runtime import loss
from parcompile.runtime.groups import Mesh
from parcompile.runtime.ring_attention import blockwise, execution
from parcompile.runtime.ring_attention.kernels.kernel import Kernel

from .counting import tensors_in
from .cuda_host import card_of, torch_cuda_of
from .stand_in import CUDA, MetaTracker
from .waits import asks_for_values, operator_name

_aten = torch.ops.aten
_FUSED = {
    "aten._scaled_dot_product_flash_attention": "flash attention",
    "aten._scaled_dot_product_efficient_attention": "memory-efficient attention",
    "aten._scaled_dot_product_cudnn_attention": "cuDNN attention",
}
"""What `scaled_dot_product_attention` becomes where a model calls it itself."""
OWN = (CUDA_CUDNN, CUDA_EFFICIENT)
"""Kernels of ours that call these operators."""


class CudaTracker(MetaTracker):  # type: ignore[no-untyped-call]
    """As `MetaTracker`, on `cuda`: also what the host waits for, and which kernels are taken."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        card = card_of(mesh.plan.spec.cluster.accelerator)
        assert card is not None, find_accelerator(mesh.plan.spec.cluster.accelerator)
        self._card = card
        self._fake = _fake_mode()
        self._pinned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._everything_is_fake = False
        self._inside: list[str] = []
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._entered.enter_context(torch_cuda_of(self._card, self.waits_for))
        self._entered.enter_context(_MadeOnHost())
        self._entered.enter_context(mock.patch.object(nn.Module, "_apply", _apply))
        # Of memory that nobody gives away, to a stream that is none of torch's.
        self._entered.enter_context(mock.patch.object(Tensor, "record_stream", lambda *_: None))
        # A loss that is being summed is a tensor of a class of its own, which a fake one cannot become.
        self._entered.enter_context(mock.patch.object(loss, "_of", lambda whole, *_: whole))
        for module in (blockwise, execution):
            self._entered.enter_context(
                mock.patch.object(module, "select_kernel", self._selected(module.select_kernel))
            )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.close()

    def building(self) -> contextlib.AbstractContextManager[Any]:
        """Within it tensors of the host have no memory either."""
        return mock.patch.object(self, "_everything_is_fake", True)

    def place(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Exchanges parameters and buffers for others on the device: fake tensors cannot be moved in place."""
        moved: dict[int, Tensor] = {}

        def move(tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = make(tensor)
            return moved[id(tensor)]

        def parameter(old: Tensor) -> Tensor:
            new = nn.Parameter(torch.empty_like(old, dtype=dtype, device=CUDA), requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__ if not isinstance(old, FakeTensor) else {})
            return new

        for module in model.modules():
            for name, old in module._parameters.items():
                if old is not None:
                    module._parameters[name] = move(old, parameter)  # type: ignore[assignment]
        self._move_buffers(model, move)
        return model

    def injected(self, model: nn.Module) -> None:
        """Buffers go to the device; a tensor that is neither buffer nor parameter stays on the host, as in training."""
        self._move_buffers(model, lambda tensor, make: make(tensor))
        held = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        for module in model.modules():
            for name, value in vars(module).items():
                is_loose = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
                if is_loose and self.is_here(value) and value.untyped_storage()._cdata not in held:
                    vars(module)[name] = torch.empty_like(value, device="cpu")

    def _move_buffers(self, model: nn.Module, move: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> None:
        for module in model.modules():
            for name, old in module._buffers.items():
                if old is not None and not self.is_here(old):
                    module._buffers[name] = move(old, lambda tensor: torch.empty_like(tensor, device=CUDA))

    def name_layers(self, model: nn.Module) -> None:
        """From here on kernels are told by the module that takes them."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(self._enter, name))
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str, *_: Any) -> None:
        self._inside.append(name)

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def _selected(self, select: Callable[..., Kernel]) -> Callable[..., Kernel]:
        def selected(*args: Any, **options: Any) -> Kernel:
            kernel = select(*args, **options)
            self._takes(kernel.name, getattr(kernel, "reason", ""))
            return kernel

        return selected

    @property
    def _layer(self) -> str:
        return self._inside[-1] if self._inside else "the model"

    def _takes(self, kernel: str, reason: str = "") -> None:
        taken = self.attention.setdefault(self._layer, [])
        if (kernel, reason) not in taken:
            taken.append((kernel, reason))

    def has_no_value(self, tensor: Tensor) -> bool:
        """A fake tensor, unless it was made of a number."""
        return isinstance(tensor, FakeTensor) and tensor.constant is None

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator: for the device without values, for the host with them."""
        if func is _aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func is _aten._pin_memory.default:
            return self._pin(args[0].clone() if not isinstance(args[0], FakeTensor) else torch.empty_like(args[0]))
        if kwargs.get("pin_memory"):
            return self._pin(self.run(func, args, {**kwargs, "pin_memory": False}))
        given = tensors_in((args, kwargs))
        here, target = any(map(self.is_here, given)), kwargs.get("device")
        goes_there = target is not None and torch.device(target).type == "cuda"
        name = operator_name(func)
        if here and asks_for_values(func, args, kwargs):
            self.waits_for(name)
        if name in _FUSED and not any(kernel.startswith(OWN) for kernel, _ in self.attention.get(self._layer, ())):
            self._takes(f"torch's {_FUSED[name]}")
        elif name.startswith("transformers.grouped_mm_fallback"):
            self.slower["a loop over experts (transformers' grouped_mm_fallback)"] += 1
        if given:
            self._copies_between(func, args, kwargs, goes_there)
        if func is _aten.copy_.default and self.has_no_value(args[1]) and not isinstance(args[0], FakeTensor):
            return args[0]  # values that are not there, on the host
        for_optimizer = self.is_for_optimizer(func, given, kwargs)
        if for_optimizer or self._everything_is_fake or goes_there or any(isinstance(one, FakeTensor) for one in given):
            args, kwargs = tree_map_only(Tensor, self._without_values, (args, kwargs))
            with self._fake:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _without_values(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _copies_between(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], goes_there: bool) -> None:
        """The host waits for copies to the device from pages that may move, and for those to it that are not told."""
        if func is _aten._to_copy.default:
            source, waits = args[0], not kwargs.get("non_blocking", False)
            if goes_there and source.device.type == "cpu" and (waits or not self._is_pinned(source)):
                self.waits_for("a copy to the device")
            stays = kwargs.get("device") is None or goes_there
            if self.is_here(source) and not stays and torch.device(kwargs["device"]).type == "cpu" and waits:
                self.waits_for("a copy to the host")
        elif func is _aten.copy_.default:
            into, source = args[:2]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if self.is_here(into) and source.device.type == "cpu" and (waits or not self._is_pinned(source)):
                self.waits_for("a copy to the device")
            if self.is_here(source) and into.device.type == "cpu" and (waits or not self._is_pinned(into)):
                self.waits_for("a copy to the host")

    def _pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned


@functools.cache
def _fake_mode() -> FakeTensorMode:
    """One for the process: what the runtime keeps for later layers and runs has to be of the same mode."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` without exchanging what parameters hold, which fake tensors refuse."""
    for child in module.children() if recurse else ():
        child._apply(function)  # type: ignore[no-untyped-call]
    for name, old in module._parameters.items():
        if old is not None:
            with torch.no_grad():
                new = function(old)
            if (new.device, new.dtype) != (old.device, old.dtype):
                module._parameters[name] = nn.Parameter(new, old.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


class _MadeOnHost(TorchFunctionMode):
    """`torch.tensor([...], device="cuda")` makes a tensor of the host and copies it, below what a tracker can see."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Makes it on the host and copies it where a tracker sees that."""
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = torch.device(kwargs.pop("device"))
            if device.type == "cuda" and not (args and isinstance(args[0], Tensor)):
                wants = kwargs.pop("requires_grad", False)
                made = func(*args, **kwargs, device="cpu").to(device)
                return made.requires_grad_() if wants else made
            kwargs["device"] = device
        return func(*args, **kwargs)


def tracker_of(mesh: Mesh) -> MetaTracker:
    """What follows a rank on the device of its mesh."""
    return MetaTracker(mesh) if mesh.device.type == "meta" else CudaTracker(mesh)
