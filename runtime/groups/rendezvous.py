"""The launcher's store, around which ranks meet, and the world of all ranks that begins there."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from parcompile.runtime.errors import RunError

from .environment import Environment, backend_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

HANDSHAKE_TIMEOUT = timedelta(seconds=float(os.environ.get("PARCOMPILE_HANDSHAKE_TIMEOUT", "120")))
COLLECTIVE_TIMEOUT = timedelta(minutes=30)

_left = 0
"""How many plans this process has left.

It is part of the keys in the store, so that a handshake never reads the messages of an earlier one.
"""
_stores: dict[tuple[str, int], Store] = {}
"""The launcher's store, kept while the process lives: in rank 0 for the others, and for the next plan."""


def store_of_world() -> Store | None:
    """The store of the default process group; None where there is no such group yet."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def start_world(store: Store, environment: Environment, device: torch.device) -> None:
    """The default process group, of all ranks around the launcher's store."""
    dist.init_process_group(
        backend_of(device),
        store=dist.PrefixStore("parcompile/world", store),  # type: ignore[attr-defined]
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def leave_world() -> None:
    """Ends the default process group, so that another can begin around the same store."""
    global _left
    _left += 1
    if dist.is_initialized():
        dist.destroy_process_group()


def launcher_store(environment: Environment, timeout: timedelta = HANDSHAKE_TIMEOUT) -> Store:
    """The launcher's rendezvous. It does not wait for all ranks: the handshake does, and can name who is missing.

    Raises:
        RunError: rank 0, which keeps it, cannot be reached within the time-out.
    """
    if not environment.launched:
        # DeepSpeed insists on this variable, which a launcher would have set.
        os.environ.setdefault("LOCAL_RANK", "0")
        return dist.HashStore()  # type: ignore[attr-defined]
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    # torchrun's agent keeps the store itself; otherwise it lives in rank 0.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = _stores.get((host, port)) or dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            environment.world_size,
            is_master=environment.rank == 0 and not agent,
            timeout=timeout,
            wait_for_workers=False,
        )
    except (RuntimeError, dist.DistError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(
            f"rank {environment.rank} cannot reach the other ranks through {host}:{port}: {reason}"
        ) from error
    _stores[host, port] = store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt-{attempt}/{_left}", store)  # type: ignore[attr-defined]
