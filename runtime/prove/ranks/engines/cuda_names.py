"""Megatron-Core names CUDA devices, streams and types everywhere: here these names answer for the CPU."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

SHIM = "names of torch.cuda answer for the CPU, and groups are gloo's"


def install() -> None:
    """In this process, before Megatron-Core is asked for anything."""
    cuda, cpu = cast(Any, torch.cuda), torch.device("cpu")
    for owner in (torch.Tensor, nn.Module):
        setattr(owner, "cuda", lambda self, *_, **__: self)  # noqa: B010 -- a method of another class
    for name, value in {
        **dict.fromkeys(("is_available", "is_initialized"), True),
        "_is_in_bad_fork": False,
        "device_count": dist.get_world_size(),
        "current_device": cpu,
        "get_device_capability": (8, 0),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), 0),
        **dict.fromkeys(("set_device", "synchronize", "empty_cache")),
    }.items():
        setattr(cuda, name, _always(value))
    for name in ("FloatTensor", "BFloat16Tensor", "HalfTensor", "DoubleTensor", "IntTensor", "LongTensor"):
        setattr(cuda, name, getattr(torch, name))
    for owner in (cuda, cuda.random):
        owner.manual_seed = torch.manual_seed
        owner.get_rng_state = lambda *_, **__: torch.get_rng_state()
        owner.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.default_generators = defaultdict(lambda: torch.default_generator)  # by a device, or its number
    cuda._lazy_call = lambda call, **_: call()
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    kind = torch.Tensor.type

    def type_of(self: Any, *given: Any, **named: Any) -> Any:
        return kind(self, *given, **named) if given or named else f"torch.cuda.{kind(self).split('.')[-1]}"

    torch.Tensor.type = type_of  # type: ignore[method-assign]
    group, exchange = cast(Any, dist.new_group), cast(Any, dist.all_to_all_single)

    def new_group(ranks: Any = None, timeout: Any = None, *_: Any, **named: Any) -> Any:
        named = {name: value for name, value in named.items() if name not in ("backend", "pg_options")}
        return group(ranks, **({"timeout": timeout} if timeout else {}), **named)

    def all_to_all_single(*given: Any, **named: Any) -> Any:
        """Sizes become numbers on their way from the device to the host, which is none here."""
        for name, value in named.items():
            named[name] = value.tolist() if name.endswith("_sizes") and hasattr(value, "tolist") else value
        return exchange(*given, **named)

    dist.new_group, dist.all_to_all_single = new_group, all_to_all_single
    torch._dynamo.config.disable = True  # where triton is installed it asks these names for more than they know
    mode: Any = _OnCpu()
    mode.__enter__()


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class _Stream:
    """A stream or an event: all is done in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("wait_stream", "wait_event", "wait", "synchronize", "record"):
            return _always(None)
        if name == "record_event":
            return _always(self)
        raise AttributeError(name)


class _OnCpu(TorchFunctionMode):
    """`device="cuda"` is the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.device:
            args = tuple(_cpu(value) for value in args)
        return func(*args, **{name: _cpu(value) for name, value in (kwargs or {}).items()})


def _cpu(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value
