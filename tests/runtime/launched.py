"""Ranks that a test starts one by one, without a launcher that would end them: each with its output, all forked."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ranks import PRELOAD, free_port

from parcompile.runtime import report_errors


class Ranks:
    """`function(folder, *args)` on every rank, within `report_errors`, in a process of its own.

    Heartbeats are on, and rank 0 keeps the store. Ranks of `behind_proxy` reach it through a process each.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        function: Callable[..., None],
        *args: Any,
        port: int | None = None,
        behind_proxy: Collection[int] = (),
        **more: str,
    ) -> None:
        self.folder, self.port, self.size = folder, port or free_port(), size
        folder.mkdir(parents=True, exist_ok=True)
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self.processes = []
        self.proxies: dict[int, Any] = {}
        for rank in range(size):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": self.port}
            environment = {name: str(value) for name, value in numbers.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu", **more}
            if rank in behind_proxy:
                environment["MASTER_PORT"] = str(free_port())
                ports = int(environment["MASTER_PORT"]), self.port
                self.proxies[rank] = context.Process(target=_forward, args=ports, daemon=True)
                self.proxies[rank].start()
            call = (environment, folder, function, args)
            self.processes.append(context.Process(target=_run, args=call, daemon=True))
            self.processes[-1].start()

    def text(self, rank: int) -> str:
        """What a rank has written so far."""
        file = self.folder / f"output-{rank}"
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    @property
    def said(self) -> list[str]:
        """The messages of all ranks."""
        return [line for rank in range(self.size) for line in self.text(rank).splitlines() if "parcompile:" in line]

    def wait_for(self, name: str, seconds: float = 120) -> None:
        """Until every rank has left a file of that name with its number."""
        end = time.monotonic() + seconds
        while not all((self.folder / f"{name}-{rank}").exists() for rank in range(self.size)):
            assert time.monotonic() < end, [self.text(rank) for rank in range(self.size)]
            assert all(one.is_alive() for one in self.processes), [self.text(rank) for rank in range(self.size)]
            time.sleep(0.02)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to one rank."""
        os.kill(self.processes[rank].pid, number)

    def end(self, *ranks: int, within: float) -> list[int]:
        """The exit codes of these ranks, or of all."""
        deadline = time.monotonic() + within
        for rank in ranks or range(self.size):
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
            assert not self.processes[rank].is_alive(), f"rank {rank} goes on after {within} s: {self.text(rank)}"
        return [self.processes[rank].exitcode for rank in ranks or range(self.size)]

    def kill(self) -> None:
        """Ends what is left."""
        for one in [*self.processes, *self.proxies.values()]:
            with contextlib.suppress(ProcessLookupError):
                one.kill()
            one.join()


def leave(folder: Path, name: str, text: str = "") -> None:
    """Leaves a file for `wait_for`."""
    (folder / f"{name}-{os.environ['RANK']}").write_text(text, encoding="utf-8")


def run_script(_: Path, script: str, *arguments: str) -> None:
    """For `Ranks`: a script as its launcher starts it."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def run_forked(folder: Path, size: int, script: Path, *arguments: str) -> tuple[list[int], str]:
    """The exit codes of a script's ranks, and what all of them have written."""
    ranks = Ranks(folder, size, run_script, str(script), *arguments)
    try:
        return ranks.end(within=600), "".join(map(ranks.text, range(size)))
    finally:
        ranks.kill()


def _forward(port: int, to: int) -> None:
    """Passes bytes on, in both directions, for as long as it runs. Where nobody listens yet, it waits for them."""
    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            ends = server.accept()[0], _reach(to)
            for one, other in (ends, ends[::-1]):
                threading.Thread(target=_copy, args=(one, other), daemon=True).start()


def _reach(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.05)


def _copy(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while content := one.recv(2**16):
            other.sendall(content)
        other.shutdown(socket.SHUT_WR)


def _run(environment: dict[str, str], folder: Path, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    gc.freeze()
    os.environ.update(environment)
    os.environ.setdefault("PARCOMPILE_HEARTBEAT", "1")
    output = os.open(folder / f"output-{environment['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    with report_errors():
        function(folder, *args)
    sys.exit(0)
