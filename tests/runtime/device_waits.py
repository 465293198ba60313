"""Counts what a program does to a GPU, on a machine without one: launches by operator, and where the host waits.

Tensors on the meta device stand for those on a GPU: the runtime takes the same kernels for them and the same ways as
everywhere but on CPUs, and operators give shapes. (torch's fake tensors on `cuda` stop at the first copy or gradient
where torch was built without CUDA.) Whatever the host would wait for has no value there: it is named, and fails.
"""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = {
    "aten._local_scalar_dense",
    "aten.is_nonzero",
    "aten.equal",
    "aten.nonzero",
    "aten.bincount",
    "aten.masked_select",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten.repeat_interleave.Tensor",
}
"""Operators whose result, or its shape, the host has to know: it waits until the device has computed it."""


class DeviceCounter(TorchDispatchMode):
    """Within it operators on the meta device are counted; `waits` are those for which the host stops, with their place.

    `on` names another type of devices.
    """

    def __init__(self, on: str = "meta") -> None:
        super().__init__()
        self._type = on
        self.launches: Counter[str] = Counter()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        if any(one.device.type == self._type for one in tensors):
            name = str(func._schema.name).replace("::", ".")
            self.launches[name] += 1
            to_host = func is torch.ops.aten._to_copy.default and _goes_to_host(kwargs)
            by_mask = name.startswith("aten.index") and any(
                isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
                for argument in args[1:2]
                if isinstance(argument, (list, tuple))
                for index in argument
            )
            if name in WAITING or to_host or by_mask:
                self.waits.append(f"{name}: {_place()}")
        return func(*args, **kwargs)


def _goes_to_host(options: dict[str, Any]) -> bool:
    device = options.get("device")
    return device is not None and torch.device(device).type == "cpu" and not options.get("non_blocking", False)


def _place() -> str:
    """The innermost line of the program that is neither torch's nor a dispatcher's."""
    frames = reversed(traceback.extract_stack())
    place = next((one for one in frames if not any(part in one.filename for part in _PASSED_THROUGH)), None)
    return "torch" if place is None else f"{place.filename}:{place.lineno} {place.line}"


_PASSED_THROUGH = "/site-packages/torch/", "device_waits.py", "/preflight/", "contextlib.py"
