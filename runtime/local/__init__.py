"""All ranks of a world on this machine: spawned processes, gloo on loopback, one thread each.

For teaching, debugging and tests: real ranks and real collectives, without a launcher or a cluster.

    def add_up(rank: int) -> float:
        total = torch.tensor(float(rank))
        torch.distributed.all_reduce(total)
        return float(total)

    if __name__ == "__main__":
        print(run_local(4, add_up))  # [6.0, 6.0, 6.0, 6.0]

`parcompile local PLAN` runs a whole plan this way: see `comparison`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from parcompile.runtime.errors import LOST_PEER
from parcompile.runtime.settings import HEARTBEAT

MAX_RANKS = 16
"""More processes than this on one machine show nothing that fewer do not, and may exhaust it."""

_GRACE_SECONDS = 1.0
"""How long to look for the rank that failed when another only says that it lost its connection."""


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time; the message holds the traceback of the first one that did."""


def run_local(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
    """Call `function(rank, *args)` on every rank of a world on this machine and return what the ranks return.

    The default process group (gloo) is there when `function` starts; `parcompile.runtime.join` uses it. Arguments and
    results travel by pickle, tensors by value. `function` belongs to a module, and a script that calls this needs
    `if __name__ == "__main__":`, since the ranks import it again. Whatever happens, no process is left behind.

    Raises:
        RankError: A rank failed, or `timeout` seconds passed.
    """
    with LocalWorld(world_size) as world:
        return world.run(function, *args, timeout=timeout)


class LocalWorld:
    """Ranks that stay alive between calls.

    Args:
        size: Number of ranks, each a process of its own.
        process_group: Whether each rank has the default process group from the start; without it only a launcher's
            environment is there (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, …), for code that initialises by itself.
        start_method: Of multiprocessing. "spawn" works everywhere; "forkserver" starts faster where `preload` helps.
        preload: Modules that the fork server imports once, for all ranks.
    """

    def __init__(
        self, size: int, *, process_group: bool = True, start_method: str = "spawn", preload: Sequence[str] = ()
    ) -> None:
        if not 1 <= size <= MAX_RANKS:
            raise ValueError(f"{size} ranks on this machine: from 1 to {MAX_RANKS} are possible")
        self.size = size
        # The store lives in this process: no rank has to find a free port, so none can lose it to another program.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        context: Any = multiprocessing.get_context(start_method)
        if preload:
            context.set_forkserver_preload(list(preload))
        try:
            for rank in range(size):
                pipe, theirs = context.Pipe()
                self._pipes.append(pipe)
                # The fork server keeps the environment of its own start.
                environment = {**os.environ, **launcher_environment(rank, size, self._store.port)}
                process = context.Process(
                    target=_serve, args=(theirs, environment, process_group), name=f"rank {rank}", daemon=True
                )
                process.start()
                theirs.close()
                self._processes.append(process)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 180.0, what: str = "") -> list[Any]:
        """Call `function(rank, *args)` on every rank; see `run_local`. After a failure the world is closed.

        Args:
            function: called on every rank.
            args: its further arguments.
            timeout: seconds for all ranks.
            what: what the ranks do, in messages; by default the function's name.

        Raises:
            RankError: A rank failed, or `timeout` seconds passed.
        """
        if not self._pipes:
            raise RankError("this world is closed")
        call, name = _pack((function, args)), what or getattr(function, "__name__", "function")
        try:
            for pipe in self._pipes:
                with contextlib.suppress(BrokenPipeError):  # it died: looking for its answer will tell
                    pipe.send_bytes(call)
            return self._collect(name, timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process. Nothing more runs in it: one that saw its pipe close first would end as after its work."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []

    def _collect(self, name: str, timeout: float) -> list[Any]:
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        results: dict[int, Any] = {}
        failures: list[tuple[int, str]] = []
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                failure, result = self._answer(rank, pipe)
                if not failure:
                    results[rank] = result
                elif any(sign in failure for sign in LOST_PEER):
                    failures.append((rank, failure))
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                else:
                    raise RankError(f"{name}: rank {rank} of {self.size} failed\n{failure}")
        if failures:
            rank, failure = failures[0]
            raise RankError(f"{name}: rank {rank} of {self.size} failed\n{failure}")
        if waiting:
            silent = sorted(waiting.values())
            raise RankError(f"{name}: no answer from rank(s) {silent} of {self.size} within {timeout:g} s")
        return [results[rank] for rank in range(self.size)]

    def _answer(self, rank: int, pipe: Connection) -> tuple[str, Any]:
        try:
            failure, result = _unpack(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_GRACE_SECONDS)
            return f"the process ended with exit code {self._processes[rank].exitcode}", None
        return failure, result


def launcher_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher on this machine sets for a CPU rank; the store at `port` is there already."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        HEARTBEAT: "0",  # the parent watches its processes
    }


def _serve(pipe: Connection, environment: dict[str, str], process_group: bool) -> None:
    """What a rank does: answer calls until the pipe is closed."""
    # Nothing that is imported by now is garbage. Going through it all, the first collection of a forked rank copies it
    # page by page: that took longer than a step of a small model.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends these
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended this world
        while True:
            pipe.send_bytes(_carry_out(pipe.recv_bytes(), int(environment["RANK"]), process_group))


def _carry_out(call: bytes, rank: int, process_group: bool) -> bytes:
    try:
        if process_group and not dist.is_initialized():
            dist.init_process_group("gloo")
        function, args = _unpack(call)
        return _pack(("", function(rank, *args)))
    except BaseException:  # a SystemExit too is an answer that the parent has to hear
        return _pack((traceback.format_exc(), None))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _pack(value: object) -> bytes:
    # By value: multiprocessing would send a tensor as shared memory of a process that may have ended.
    packed = io.BytesIO()
    torch.save(value, packed, pickle_module=pickle)
    return packed.getvalue()


def _unpack(packed: bytes) -> Any:
    # Only what this program's own processes have packed is read.
    return torch.load(io.BytesIO(packed), weights_only=False)


__all__ = ["MAX_RANKS", "LocalWorld", "RankError", "launcher_environment", "run_local"]
