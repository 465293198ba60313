"""Counts what a program does to a GPU, on a machine without one: launches by operator, and where the host waits.

Tensors on the meta device stand for those on a GPU: the runtime takes the same kernels for them and the same ways as
everywhere but on CPUs, and operators give shapes. Whatever the host would wait for has no value there: it is named,
and fails. `test_cuda_host.py` does the same on `cuda`, in processes of its own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parcompile.runtime.preflight.waits import asks_for_values, operator_name, place


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
            name = operator_name(func)
            self.launches[name] += 1
            to_host = func is torch.ops.aten._to_copy.default and _goes_to_host(kwargs)
            if to_host or asks_for_values(func, args, kwargs):
                self.waits.append(f"{name}: {place()}")
        return func(*args, **kwargs)


def _goes_to_host(options: dict[str, Any]) -> bool:
    device = options.get("device")
    return device is not None and torch.device(device).type == "cpu" and not options.get("non_blocking", False)
