"""The launcher's store, around which ranks meet, and the world of all ranks that begins there."""

from __future__ import annotations

import atexit
import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from parcompile.runtime.errors import RunError
from parcompile.runtime.liveness import has_failed
from parcompile.runtime.liveness.watchdog import Requests, TimedStore, Unanswered, within
from parcompile.runtime.settings import COLLECTIVE_TIMEOUT, HANDSHAKE_TIMEOUT

from .environment import Environment, backend_of
from .registration import register

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_GRACE_SECONDS = 2.0
"""Beyond the time-out of a connection, which ends by itself where the other side is silent from the start."""

_left = 0
"""How many plans this process has left.

It is part of the keys in the store, so that a handshake never reads the messages of an earlier one.
"""
_stores: dict[tuple[str, int], Store] = {}
"""The launcher's store, kept while the process lives: in rank 0 for the others, and for the next plan."""


def store_of_world() -> Store | None:
    """The store of the default process group; None where there is no such group yet."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def name_of_job() -> str:
    """Of the plan that this process joins now; the same on all ranks, and another one after each `leave_world`."""
    return f"job-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{_left}"


def start_world(store: Store, environment: Environment, device: torch.device) -> None:
    """The default process group, of all ranks around the launcher's store.

    It is not bound to a device: torch would then make a communicator of the whole world, and split every further group
    from it, in which all ranks of the world have to take part.
    """
    collective_timeout = timedelta(seconds=COLLECTIVE_TIMEOUT.seconds())
    dist.init_process_group(
        backend_of(device),
        store=dist.PrefixStore("parcompile/world", store),  # type: ignore[attr-defined]
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=collective_timeout,
    )
    if device.type != "cpu":
        atexit.register(abandon)


def abandon() -> None:
    """Where the job has failed, aborts the communicators: at its end Python would wait for messages that never come."""
    if has_failed() and dist.is_initialized():
        with contextlib.suppress(RuntimeError, dist.DistError):
            dist.distributed_c10d._abort_process_group()


def leave_world() -> None:
    """Ends the default process group, so that another can begin around the same store."""
    global _left
    _left += 1
    if dist.is_initialized():
        dist.destroy_process_group()


def launcher_store(environment: Environment, seconds: float | None = None) -> Store:
    """The launcher's rendezvous. It does not wait for all ranks: the handshake does, and can name who is missing.

    Raises:
        RunError: rank 0, which keeps it, cannot be reached within the time-out, another program answers, or another
            job: this rank, which came later, is refused there and leaves nothing.
    """
    if not environment.launched:
        # DeepSpeed insists on this variable, which a launcher would have set.
        os.environ.setdefault("LOCAL_RANK", "0")
        return dist.HashStore()  # type: ignore[attr-defined]
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _port()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if (host, port) not in _stores:
        _stores[host, port] = _meet(environment, host, port, attempt, seconds or HANDSHAKE_TIMEOUT.seconds())
    return dist.PrefixStore(f"attempt-{attempt}/{_left}", _stores[host, port])  # type: ignore[attr-defined]


def _port() -> int:
    text = os.environ.get("MASTER_PORT", "29500")
    if not text.strip().isdecimal() or not 0 < int(text) < 2**16:
        raise RunError(f"the environment variable MASTER_PORT is {text!r}: a launcher sets it to a port, 1 to 65535")
    return int(text)


def _meet(environment: Environment, host: str, port: int, attempt: str, seconds: float) -> Store:
    """Connects, and registers this rank before anything else is said. In a thread: the port may never answer."""
    requests = Requests()

    def meet() -> Store:
        with requests.one():
            store = _connect(environment, host, port, seconds)
        register(TimedStore(store, requests), environment, f"{host}:{port}", f"registered-{attempt}", seconds)
        return store

    who = f"rank {environment.rank} cannot reach the other ranks through {host}:{port}"
    try:
        return within(seconds + _GRACE_SECONDS, requests, meet)
    except Unanswered:
        raise RunError(
            f"{who}: something listens there and has not answered as a rendezvous store within {seconds:.0f} s. Either "
            "rank 0 or the launcher, which keeps the store, is stopped or hangs; or the port is another program's: "
            "choose one with --master_port"
        ) from None
    except RunError:
        raise
    except (RuntimeError, dist.DistError) as error:
        text = str(error).splitlines()[0]
        if "EADDRINUSE" in text:
            text = f"port {port} of this host is taken, by another job or program: choose one with --master_port"
        raise RunError(f"{who}: {text}") from error


def _connect(environment: Environment, host: str, port: int, seconds: float) -> Store:
    # torchrun's agent keeps the store itself; otherwise it lives in rank 0.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        environment.world_size,
        is_master=environment.rank == 0 and not agent,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )
    store.check(["parcompile"])
    return store
