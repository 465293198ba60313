"""The library that gives this process CUDA without a GPU: built once with the host's compiler, and kept in a cache.

It is never built or loaded on import. Where it cannot be had, one sentence says why.
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
from collections.abc import Iterator
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("cuda_host.cpp")
KNOWN_TORCH = ("2.13",)
"""Releases of torch whose guard and hooks the source was written for."""
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O0", "-std=c++20", "-shared", "-fPIC")


class NoCudaHostError(Exception):
    """Why this process gets no CUDA without a GPU: one sentence."""


@contextlib.contextmanager
def cuda_without_gpu() -> Iterator[None]:
    """Within it tensors of `FakeTensorMode` on `cuda` take torch's own ways for CUDA.

    Raises:
        NoCudaHostError: that is not possible here.
    """
    library = _loaded()
    library.parcompile_cuda_install()
    try:
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
    own = torch.version.cuda or torch.version.hip
    if own is not None:
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
        path = shutil.which(name)
        if path is not None:
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
