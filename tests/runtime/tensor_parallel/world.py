"""Live ranks for tests: a world is spawned once and then runs one check after the other."""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from parcompile.runtime import transport


class World:
    """`size` gloo processes on this machine, each with one thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._directory = tempfile.TemporaryDirectory(prefix="parcompile-test-")
        self._started = 0
        self._ranks: list[tuple[multiprocessing.Process, multiprocessing.connection.Connection]] = []

    def run(self, check, *args, timeout_seconds: float = 90.0) -> list:
        """Call `check(*args)` on every rank, with the default group as the world; return what the ranks return.

        `check` is a function of a module. The first rank that raises is shown; after a failure or a time-out the next
        call gets a fresh world.
        """
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send((check, args))
        deadline = time.monotonic() + timeout_seconds
        results, waiting = [None] * self.size, {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(deadline - time.monotonic(), 0.0))
            if not ready:
                self.close()
                silent = sorted(waiting.values())
                raise AssertionError(f"{check.__name__}: no answer from ranks {silent} in {timeout_seconds} s")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    failed, result = connection.recv()
                except EOFError:
                    failed, result = True, "the process died"
                if failed:
                    self.close()
                    raise AssertionError(f"{check.__name__}: rank {rank} of {self.size} failed\n{result}")
                results[rank] = result
        return results

    def close(self) -> None:
        """End every process."""
        for _, connection in self._ranks:
            connection.close()
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._started += 1
        store = Path(self._directory.name) / f"store-{self._started}"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size, str(store)), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def _serve(connection: multiprocessing.connection.Connection, rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    while True:
        try:
            check, args = connection.recv()
            connection.send(_answer(check, args))
        except (EOFError, BrokenPipeError):  # the test has ended this world
            return


def _answer(check, args) -> tuple[bool, object]:
    try:
        return False, check(*args)
    except Exception:
        return True, traceback.format_exc()


def each_transport() -> Iterator[str]:
    """Once with gloo's own collectives, once with exchanges, whatever the size of the tensors."""
    usual = transport.EXCHANGE_BYTES
    try:
        for name, transport.EXCHANGE_BYTES in (("collectives", 2**62), ("exchanges", 0)):
            yield name
    finally:
        transport.EXCHANGE_BYTES = usual


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} ≠ {tuple(expected.shape)}"
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-300))
