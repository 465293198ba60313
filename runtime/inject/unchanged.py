"""A model that is run for a look at it, and is afterwards as it was before."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import Tensor, nn

_OF_TORCH = frozenset(vars(nn.Module())) - {"training", "_non_persistent_buffers_set"}
"""What torch keeps about a module: its parameters, modules and hooks. Buffers are looked at by themselves."""


@contextlib.contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it `model` may run forward and backward; then it is as before, and so is what is drawn at random next.

    Buffers, gradients, and what its modules keep beside them (cached lengths, counts, whether they train) are put back.

    Args:
        model: the model.
        device: where it runs.
    """
    modules = list(model.modules())
    buffers = [{name: (one, _copied(one)) for name, one in module._buffers.items()} for module in modules]
    others = [
        {name: (one, _copied(one)) for name, one in vars(module).items() if name not in _OF_TORCH} for module in modules
    ]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = [device] if device.type not in ("cpu", "meta") else []
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, of_torch, own in zip(modules, buffers, others, strict=True):
            _put_back(module._buffers, of_torch, set())
            _put_back(vars(module), own, _OF_TORCH)


def _copied(value: Any) -> Any:
    """A copy of what may be written to; None for what is only replaced."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else None


@torch.no_grad()
def _put_back(now: dict[str, Any], before: dict[str, tuple[Any, Any]], other: Set[str]) -> None:
    for name in now.keys() - before.keys() - other:
        del now[name]
    for name, (value, content) in before.items():
        now[name] = value
        if content is None:
            continue
        if isinstance(value, Tensor):
            value.copy_(content)
        elif isinstance(value, list):
            value[:] = content
        else:
            value.clear()
            value.update(content)
