"""What `torch.cuda` answers for one GPU that is not there: Python functions in place of those of a build with CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from parcompile.machines.accelerator import find_accelerator


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as programs ask for it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


def card_of(accelerator: str) -> Card | None:
    """The GPU of a preset; None where it is none of NVIDIA's."""
    found = find_accelerator(find_accelerator(accelerator).like)
    if found.compute_capability is None or found.memory_bytes is None:
        return None
    major, minor = map(int, found.compute_capability.split("."))
    return Card(found.title, (major, minor), found.memory_bytes)


class Stream:
    """The one stream: work on it is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = self.stream_id = self.device_index = 0
        self.device_type = 1

    def wait_stream(self, stream: Any) -> None:
        """Nothing is under way."""

    def wait_event(self, event: Any) -> None:
        """Nothing is under way."""

    def record_event(self, event: Any = None) -> Any:
        """An event of this stream."""
        return event or Event()

    def query(self) -> bool:
        """Everything has ended."""
        return True

    def synchronize(self) -> None:
        """The host waits."""
        _waits("Stream.synchronize")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """A point of the stream, which has always been reached."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Marks the stream."""

    def wait(self, *_: Any) -> None:
        """A stream waits, not the host."""

    def query(self) -> bool:
        """It has been reached."""
        return True

    def synchronize(self) -> None:
        """The host waits."""
        _waits("Event.synchronize")

    def elapsed_time(self, _: Event) -> float:
        """No time passes."""
        return 0.0


_heard: list[Callable[[str], None]] = []


def _waits(what: str) -> None:
    for hear in _heard:
        hear(what)


CUDNN = 91900
"""The version of cuDNN that torch is taken to have: that of a build for CUDA 13."""


@contextlib.contextmanager
def torch_cuda_of(card: Card, waits: Callable[[str], None]) -> Iterator[None]:
    """Within it `torch.cuda` answers for this card; `waits` is told of each call for which the host would wait."""
    stream = Stream()
    properties = SimpleNamespace(
        name=card.name, major=card.capability[0], minor=card.capability[1], total_memory=card.memory_bytes, warp_size=32
    )

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value  # a function of its own each time: torch.compile tells them apart by identity

    answers: dict[str, Any] = {
        "is_available": always(True),
        "is_initialized": always(True),
        "is_bf16_supported": always(card.capability >= (8, 0)),
        "is_current_stream_capturing": always(False),
        "device_count": always(1),
        "current_device": always(0),
        "current_stream": always(stream),
        "default_stream": always(stream),
        "stream": lambda _: contextlib.nullcontext(),
        "device": lambda _: contextlib.nullcontext(),
        "get_device_capability": always(card.capability),
        "get_device_name": always(card.name),
        "get_device_properties": always(properties),
        "get_arch_list": always([f"sm_{card.capability[0]}{card.capability[1]}"]),
        "mem_get_info": always((card.memory_bytes, card.memory_bytes)),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "memory_stats": lambda *_: {},
        "synchronize": lambda *_: _waits("torch.cuda.synchronize"),
        "Stream": Stream,
        "Event": Event,
    }
    silent = "init _lazy_init set_device set_stream manual_seed manual_seed_all set_rng_state empty_cache"
    silent += " reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached"
    answers |= {name: always(None) for name in silent.split()}
    sizes = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached"
    answers |= {name: always(0) for name in sizes.split()}
    _heard.append(waits)
    try:
        with contextlib.ExitStack() as entered:
            for name, answer in answers.items():
                entered.enter_context(mock.patch.object(torch.cuda, name, answer, create=True))
            entered.enter_context(mock.patch.object(torch.backends.cudnn, "version", always(CUDNN)))
            for name in ("range_push", "range_pop", "mark"):
                entered.enter_context(mock.patch.object(torch.cuda.nvtx, name, always(0)))
            yield
    finally:
        _heard.remove(waits)
