"""Before the first collective: do all ranks run the same plan with the same versions?

A collective between ranks that disagree hangs or computes nonsense. So every rank says through the rendezvous store
what it runs, rank 0 compares, and all ranks read its verdict. Nothing here waits longer than the time-out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parcompile.runtime.errors import RunError
from parcompile.runtime.liveness.watchdog import Requests, TimedStore, Unanswered, within

from .registration import await_keys

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PREFIX = "parcompile/handshake"


def statement(plan_hash: str) -> dict[str, str]:
    """What this rank runs: the plan's hash and the versions that have to agree."""
    import deepspeed

    from parcompile import __version__

    return {
        "plan": plan_hash,
        "parcompile": __version__,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        # torch counts them in the names of further ones: where they differ, groups would never meet.
        "process groups before": str(len(dist.distributed_c10d._world.pg_names)),
    }


def agree(store: Store, rank: int, world_size: int, mine: Mapping[str, str], timeout: timedelta) -> None:
    """Returns when every rank has made the same statement.

    Raises:
        RunError: on every rank alike, when statements differ (who differs, and in what) or a rank is missing (which);
            or rank 0 answers nothing.
    """
    requests = Requests()
    try:
        verdict = within(
            timeout.total_seconds(),
            requests,
            lambda: _exchange(TimedStore(store, requests), rank, world_size, mine, timeout),
        )
    except Unanswered:
        raise RunError(
            f"rank {rank} got no answer from the store, which rank 0 or the launcher keeps at {store_place()}, for "
            f"{timeout.total_seconds():.0f} s: its process is stopped, hangs, or cannot be reached"
        ) from None
    except (RuntimeError, dist.DistError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"rank {rank} lost its connection to the store at {store_place()}: rank 0 has ended") from error
    if verdict:
        raise RunError(verdict, everywhere=True)


def store_place() -> str:
    """Host and port of the launcher's store, for messages."""
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '29500')}"


def _exchange(store: Any, rank: int, world_size: int, mine: Mapping[str, str], timeout: timedelta) -> str:
    """The verdict, after every rank has read it if it is not empty."""
    store.set(f"{_PREFIX}/{rank}", json.dumps(dict(mine)))
    if rank == 0:
        store.set(f"{_PREFIX}/verdict", _verdict(store, world_size, mine, timeout))
    # Rank 0 itself waits for the others that long; its verdict comes after.
    if not await_keys(store, [f"{_PREFIX}/verdict"], timeout * 2):
        raise RunError(f"rank {rank} heard nothing from rank 0 within {(timeout * 2).total_seconds():.0f} s")
    verdict: str = store.get(f"{_PREFIX}/verdict").decode()
    if verdict:
        _let_all_read(store, rank, world_size)
    return verdict


def _let_all_read(store: Any, rank: int, world_size: int) -> None:
    """Keeps rank 0, in whose process the store may live, until the others have read why the run ends."""
    store.set(f"{_PREFIX}/read/{rank}", "")
    if rank == 0:
        await_keys(store, [f"{_PREFIX}/read/{other}" for other in range(world_size)], timedelta(seconds=10))


def _verdict(store: Any, world_size: int, mine: Mapping[str, str], timeout: timedelta) -> str:
    """Empty when all agree."""
    keys = [f"{_PREFIX}/{rank}" for rank in range(world_size)]
    if not await_keys(store, keys, timeout):
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        return f"rank {', '.join(missing)} of {world_size} did not report within {timeout.total_seconds():.0f} s"
    differing: dict[tuple[str, str], list[int]] = {}
    for rank, key in enumerate(keys):
        try:
            theirs = dict(json.loads(store.get(key)))
        except (ValueError, TypeError):
            return (
                f"what stands in the store for rank {rank} is no statement of parcompile: is the store another job's?"
            )
        for name, value in mine.items():
            if theirs.get(name) != value:
                differing.setdefault((name, str(theirs.get(name))), []).append(rank)
    if not differing:
        return ""
    parts = [
        f"rank {', '.join(map(str, ranks))} has {name} {value}, rank 0 has {mine[name]}"
        for (name, value), ranks in differing.items()
    ]
    return "the ranks do not run the same: " + "; ".join(parts)
