"""Live ranks for tests: a world is started once and then runs one check after the other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from ranks import forked_world
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parcompile.runtime import transport
from parcompile.runtime.local import LocalWorld, RankError
from parcompile.runtime.tensor_parallel import even_range, take_ranges
from parcompile.runtime.transport import gloo


class World:
    """`size` gloo processes on this machine, each with one thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: LocalWorld | None = None

    def run(self, check, *args, timeout_seconds: float = 600.0) -> list:
        """Call `check(*args)` on every rank, with the default group as the world; return what the ranks return.

        `check` is a function of a module. The first rank that raises is shown; after a failure or a time-out the next
        call gets a fresh world.
        """
        if self._ranks is None:
            self._ranks = forked_world(self.size)
        try:
            test = os.environ.get("PYTEST_CURRENT_TEST", "")
            return self._ranks.run(_without_rank, check, args, test, timeout=timeout_seconds)
        except RankError as error:
            self._ranks = None
            raise AssertionError(f"{check.__name__}: {error}") from None

    def close(self) -> None:
        """End every process."""
        if self._ranks is not None:
            self._ranks.close()


def _without_rank(_: int, check, args, test: str):
    os.environ["PYTEST_CURRENT_TEST"] = test  # for records of margins; the world is older than the test
    return check(*args)


def shard_weight(tensor: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    """An equal slice along `dim`."""
    return take_ranges(tensor, dim, [even_range(tensor.shape[dim], rank, world)])


def each_transport() -> Iterator[str]:
    """Once as small tensors travel and once as large ones do, whatever the size of the tensors."""
    usual = gloo.EXCHANGE_BYTES, gloo.SWAP_BYTES
    try:
        for name, gloo.EXCHANGE_BYTES, gloo.SWAP_BYTES in (("small", 2**62, 2**62), ("large", 0, 0)):
            yield name
    finally:
        gloo.EXCHANGE_BYTES, gloo.SWAP_BYTES = usual


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """Messages of the CPU go the way of those of a GPU: by the backend's own collectives, in pieces."""
    usual = transport.PIECE_BYTES
    gloo._DEVICE_TYPES.discard("cpu")
    transport.PIECE_BYTES = 1
    try:
        yield
    finally:
        gloo._DEVICE_TYPES.add("cpu")
        transport.PIECE_BYTES = usual


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} ≠ {tuple(expected.shape)}"
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-300))


class Float32Watch(TorchDispatchMode):
    """Within it: the bytes of the largest storage in float32 that an operator gives."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32:
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out
