"""Runs a function on several live ranks (gloo on loopback) and returns what each of them returned."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
# Importing these takes seconds; the fork server does it once for all ranks of all tests.
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "transformers.models.auto", "deepspeed"])

os.environ.setdefault("DS_ACCELERATOR", "cpu")


class RankError(AssertionError):
    """A rank raised, died or did not finish; the message holds the traceback of the first one."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def launcher_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 180) -> list[Any]:
    """`function(rank, *args)` on every rank, each in its own process, with a launcher's environment."""
    port = free_port()
    processes, pipes = [], []
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        environment = launcher_environment(rank, world_size, port)
        process = _CONTEXT.Process(target=_main, args=(sender, environment, rank, function, args), daemon=True)
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        return _collect(pipes, timeout)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(set(range(len(pipes))) - results.keys())
            raise RankError(f"ranks {missing} did not finish within {timeout:.0f} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                failure, packed = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if failure:
                raise RankError(f"rank {rank}:\n{failure}")
            results[rank] = torch.load(io.BytesIO(packed), weights_only=True)
    return [results[rank] for rank in range(len(pipes))]


def _main(sender: Connection, environment: dict[str, str], rank: int, function: Callable[..., Any], args: Any) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        # Saved to bytes: a tensor that is sent as it is would be shared memory of a process that has ended.
        packed = io.BytesIO()
        torch.save(function(rank, *args), packed)
        sender.send(("", packed.getvalue()))
    except BaseException:
        sender.send((traceback.format_exc(), None))
    finally:
        sender.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
