"""CUDA on a host without a GPU: torch's dispatch for it, what `torch.cuda` answers, and what a rank does there.

The library for that is built once with the host's compiler, and kept in a cache; it is never built or loaded on import.
Where it cannot be had, one sentence says why. `torch.cuda` answers by Python functions in place of those of a build
with CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from parcompile.machines import find_accelerator


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


def _nothing(*_: Any) -> None:
    """Nothing is under way."""


def _reached(*_: Any) -> bool:
    """Everything has ended."""
    return True


class Stream:
    """The one stream: work on it is done when it is asked for."""

    wait_stream = wait_event = _nothing
    query = _reached

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = self.stream_id = self.device_index = 0
        self.device_type = 1

    def record_event(self, event: Any = None) -> Any:
        """An event of this stream."""
        return event or Event()

    def synchronize(self) -> None:
        """The host waits."""
        _waits("Stream.synchronize")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """A point of the stream, which has always been reached."""

    record = wait = _nothing
    query = _reached

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

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


def always(value: Any) -> Callable[..., Any]:
    """What answers so, a function of its own each time: torch.compile tells them apart by identity."""
    return lambda *_, **__: value


CUDNN = 91900
"""The version of cuDNN that torch is taken to have: that of a build for CUDA 13."""


@contextlib.contextmanager
def torch_cuda_of(card: Card, waits: Callable[[str], None]) -> Iterator[None]:
    """Within it `torch.cuda` answers for this card; `waits` is told of each call for which the host would wait."""
    stream = Stream()
    properties = SimpleNamespace(
        name=card.name, major=card.capability[0], minor=card.capability[1], total_memory=card.memory_bytes, warp_size=32
    )

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


SOURCE = Path(__file__).with_name("cuda_host.cpp")
KNOWN_TORCH = ("2.13",)
"""Releases of torch whose guard and hooks the source was written for."""
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O0", "-std=c++20", "-shared", "-fPIC")


class NoCudaHostError(Exception):
    """Why this process gets no CUDA without a GPU: one sentence."""


_ONE_KERNEL = ("silu_backward", "mish_backward")
"""Operators of one kernel on GPUs, which a build without CUDA takes apart into several with tensors in between."""


@contextlib.contextmanager
def cuda_without_gpu() -> Iterator[None]:
    """Within it tensors of `FakeTensorMode` on `cuda` take torch's own ways for CUDA.

    Raises:
        NoCudaHostError: that is not possible here.
    """
    library = _loaded()
    library.parcompile_cuda_install()
    try:
        with torch.library._scoped_library("aten", "IMPL") as kernels:
            for name in _ONE_KERNEL:
                kernels.impl(name, lambda _, given: torch.empty_like(given), "CUDA")
            _check_backward()
            yield
    finally:
        library.parcompile_cuda_remove()


def _loaded() -> ctypes.CDLL:
    check_torch()
    path = built_library()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoCudaHostError(f"the library {path} cannot be loaded: {error}") from None


def check_torch() -> None:
    """Refuses a torch that has CUDA, or another release than those known.

    Raises:
        NoCudaHostError: which one it is.
    """
    version = str(torch.__version__)
    if (own := torch.version.cuda or torch.version.hip) is not None:
        raise NoCudaHostError(
            f"torch {version} is built with CUDA or ROCm {own}: only a CPU build of torch can be given both"
        )
    release = ".".join(version.split(".")[:2])
    if release not in KNOWN_TORCH:
        raise NoCudaHostError(
            f"torch {version} is another release than {', '.join(KNOWN_TORCH)}, whose CUDA hooks are known"
        )
    if sys.platform != "linux":
        raise NoCudaHostError(f"the library is for Linux, and this is {sys.platform}")


@functools.cache
def built_library() -> Path:
    """The library for this torch and this source, from the cache or built into it.

    Raises:
        NoCudaHostError: there is no compiler, it fails, or the cache cannot be written.
    """
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = cache_folder() / f"cuda_host-torch{torch.__version__}-{digest}.so"
    if target.exists():
        return target
    compiler = find_compiler()
    root = Path(torch.__file__).parent
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            command = [compiler, *_FLAGS, f"-I{root / 'include'}", str(SOURCE), "-o", str(made)]
            command += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or ["without a message"]
                raise NoCudaHostError(f"the compiler {compiler} does not build it: {lines[0].strip()[:200]}")
            made.replace(target)  # another process may have built it meanwhile: the same
    except OSError as error:
        raise NoCudaHostError(f"the library cannot be kept in {target.parent}: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise NoCudaHostError(f"the compiler {compiler} took more than 300 s") from None
    return target


def cache_folder() -> Path:
    """Where built libraries are kept.

    Raises:
        NoCudaHostError: the user has no home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parcompile"
    except RuntimeError:
        raise NoCudaHostError("there is no home folder to keep the library in: set XDG_CACHE_HOME") from None


def find_compiler() -> str:
    """The compiler that `CXX` names, or the first of the usual ones.

    Raises:
        NoCudaHostError: there is none.
    """
    named = os.environ.get("CXX")
    for name in (named,) if named else _COMPILERS:
        if (path := shutil.which(name)) is not None:
            return path
    looked = f"CXX is {named!r}, which is not on the PATH" if named else f"none of {', '.join(_COMPILERS)} on the PATH"
    raise NoCudaHostError(f"there is no C++ compiler: {looked}")


def _check_backward() -> None:
    """Torch starts the threads of its devices in a process's first backward pass: before it, ours has to be there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            torch.empty(1, device="cuda", requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise NoCudaHostError("a backward pass has run in this process before: start a new one") from None
