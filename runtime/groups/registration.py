"""The first word of a rank in the launcher's store: which job it belongs to. Another job's rank on the port is refused.

Rank 0 leaves the name of its job and its number of ranks. Every other rank compares them with its own, and enters
itself under its number, where nobody else may stand. Whoever does not fit ends before it has left anything, and the
job whose store it is goes on.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import torch.distributed as dist

from parcompile.runtime.errors import RunError

from .environment import Environment

_IDS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""What names a job the same on all of its nodes. DeepSpeed's launcher sets none of its own."""
_SEVERAL_SLURM_JOBS = "SLURM_HET_SIZE"
"""Set where one job consists of several, each with an id of its own."""
_REQUESTS = 8
"""Into which a long wait is split: one that is unanswered tells that the store is stopped."""
_DEEPSPEED_LAUNCHER = b"deepspeed.launcher.launch"


def register(store: Any, environment: Environment, place: str, prefix: str, seconds: float) -> None:
    """Enters this rank in the store of its job.

    Args:
        store: of the launcher.
        environment: of this rank.
        place: host and port of the store, for messages.
        prefix: of the keys; another one for each start of the ranks around the same store.
        seconds: to wait for rank 0.

    Raises:
        RunError: the store is another job's, or this rank's number is taken; or rank 0 does not come.
    """
    rank, key = environment.rank, f"parcompile/{prefix}"
    me = {"host": socket.gethostname(), "pid": os.getpid(), "id": uuid.uuid4().hex}
    ids = job_ids()
    advice = f"Is the port of {place} taken by another job? Choose another one with --master_port"
    if rank == 0:
        mine = json.dumps({"world": environment.world_size, "job": ids, **me})
        theirs = json.loads(store.compare_set(f"{key}/job", "", mine))
    elif await_keys(store, [f"{key}/job"], timedelta(seconds=seconds)):
        theirs = json.loads(store.get(f"{key}/job"))
    else:
        raise RunError(f"rank {rank} heard nothing from rank 0 within {seconds:.0f} s. {advice}")
    whose = f"of rank 0 on host {theirs['host']} (process {theirs['pid']})"
    if theirs["world"] != environment.world_size:
        raise RunError(
            f"rank {rank} is of a job of {environment.world_size} ranks (WORLD_SIZE), the store at {place} belongs to "
            f"one of {theirs['world']}, {whose}. {advice}"
        )
    for name, value in ids.items():
        if theirs["job"].get(name, value) != value:
            raise RunError(
                f"rank {rank} is of another job than the store at {place}, {whose}: {name} is {value} here and "
                f"{theirs['job'][name]} there. {advice}"
            )
    first = theirs if rank == 0 else json.loads(store.compare_set(f"{key}/{rank}", "", json.dumps(me)))
    if first["id"] != me["id"]:
        raise RunError(
            f"rank {rank} has come to the store at {place} before, as process {first['pid']} on host {first['host']}; "
            f"this is process {me['pid']} on host {me['host']}. {advice}"
        )


def job_ids() -> dict[str, str]:
    """What tells this job from others: two ranks of one job have the same value of what both know."""
    found = {name: value for name in _IDS if (value := os.environ.get(name))}
    if _SEVERAL_SLURM_JOBS in os.environ:
        found.pop("SLURM_JOB_ID", None)
    # Each node of a job has a launcher of its own, and several nodes may be one host.
    if os.environ.get("LOCAL_SIZE") == os.environ.get("WORLD_SIZE") and (launcher := _deepspeed_launcher()) is not None:
        found[f"the launcher on host {socket.gethostname()}"] = f"process {launcher}"
    return found


def _deepspeed_launcher() -> int | None:
    """The process of DeepSpeed's launcher on this host that has started this rank."""
    parent = os.getppid()
    try:
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return None
    return parent if _DEEPSPEED_LAUNCHER in command.split(b"\0") else None


def await_keys(store: Any, keys: Sequence[str], timeout: timedelta) -> bool:
    """Whether the keys are there in time."""
    end = timeout.total_seconds() + monotonic()
    while (left := end - monotonic()) > 0:
        try:
            store.wait(list(keys), timedelta(seconds=min(left, timeout.total_seconds() / _REQUESTS)))
        except dist.DistStoreError:
            continue  # not in that time
        return True
    return False
