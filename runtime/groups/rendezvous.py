"""Where this process stands in the job, and the launcher's store, around which the ranks of a job meet.

Rank 0 leaves the name of its job and its number of ranks. Every other rank compares them with its own, and enters
itself under its number, where nobody else may stand. Whoever does not fit ends before it has left anything, and the
job whose store it is goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parcompile.runtime.errors import RunError, everywhere, first_line
from parcompile.runtime.liveness import has_failed
from parcompile.runtime.liveness.monitor import say
from parcompile.runtime.liveness.watchdog import Requests, TimedStore, Unanswered, within
from parcompile.runtime.settings import COLLECTIVE_TIMEOUT, HANDSHAKE_TIMEOUT


@dataclass(frozen=True, slots=True)
class Environment:
    """What the launcher (deepspeed, torchrun) says through the environment."""

    rank: int
    world_size: int
    local_rank: int
    launched: bool

    @classmethod
    def read(cls) -> Environment:
        """Reads RANK, WORLD_SIZE and LOCAL_RANK; without RANK there is no launcher.

        Raises:
            RunError: a value is no number, or the rank does not lie in the world.
        """
        if "RANK" not in os.environ:
            return cls(0, 1, 0, launched=False)
        rank, world_size = _number("RANK"), _number("WORLD_SIZE", 1)
        if rank >= world_size:
            raise RunError(f"RANK is {rank}, WORLD_SIZE is {world_size}: ranks count from 0 to WORLD_SIZE - 1")
        return cls(rank, world_size, _number("LOCAL_RANK", rank), launched=True)


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal():
        raise RunError(f"the environment variable {name} is {text!r}: a launcher sets it to a whole number from 0 on")
    return int(text)


def device_of(environment: Environment) -> torch.device:
    """The device of this rank: its GPU where DeepSpeed's accelerator is one, else the CPU.

    A process that sees one GPU takes that one, whatever its LOCAL_RANK is: so Slurm starts tasks (`--gpus-per-task 1`).
    DeepSpeed and Hugging Face choose a device by LOCAL_RANK, which is then set to 0.

    Raises:
        RunError: the process sees no GPU, or fewer than its LOCAL_RANK asks for.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    visible, index = accelerator.device_count(), environment.local_rank
    if visible == 1 and index:
        index = 0
        os.environ["LOCAL_RANK"] = "0"
    if index >= visible:
        raise RunError(
            f"rank {environment.rank} has LOCAL_RANK {index}, and sees {visible} GPU(s): LOCAL_RANK {index} + 1 = "
            f"{index + 1} > {visible}. Start as many ranks on a node as it has GPUs, let every process see "
            "all of them or exactly one of its own (CUDA_VISIBLE_DEVICES), or set "
            "DS_ACCELERATOR=cpu to train without GPUs"
        )
    # Before the first collective: NCCL uses the current device, and a tensor on another would hang or fail there.
    accelerator.set_device(index)
    return torch.device(accelerator.device_name(index))


def backend_of(device: torch.device) -> str:
    """The communication backend for a device. gloo serves CPUs: DeepSpeed's own choice there would need a compiler."""
    if device.type == "cpu":
        return "gloo"
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().communication_backend_name())


if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


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


_waits = 0
"""How often this process has waited for the others in `wait_for_all`: a part of the keys in the store."""


def wait_for_all(why: str, call: str, then: str = "call it on every rank, not under `if rank == 0`") -> None:
    """Waits until every rank makes a call, as long as at the start of a job.

    Args:
        why: all have to make it, the beginning of the message about a rank that does not.
        call: what the user called, the same on all ranks.
        then: what to do about it.

    Raises:
        RunError: some have not come in time; the message names them.
    """
    global _waits
    _waits += 1
    store, seconds, pause = store_of_world(), HANDSHAKE_TIMEOUT.seconds(), 0.01
    assert store is not None
    place, ranks = f"parcompile/whole-{_waits}", dist.get_world_size()
    store.set(f"{place}/{dist.get_rank()}", "")
    if store.compare_set(f"{place}/call", "", call).decode() != call:
        store.set(f"{place}/other", call)
    store.add(f"{place}/count", 1)
    deadline = monotonic() + seconds
    # Not `wait`, which would keep heartbeats from the store meanwhile.
    while store.add(f"{place}/count", 0) < ranks:
        if monotonic() > deadline:
            missing = [str(rank) for rank in range(ranks) if not store.check([f"{place}/{rank}"])]
            raise RunError(
                f"{why}, and rank {', '.join(missing)} has not called it within {seconds:.0f} s: {then} "
                f"({HANDSHAKE_TIMEOUT.name} sets the time)"
            )
        sleep(pause)
        pause = min(2 * pause, 0.5)
    if store.check([f"{place}/other"]):
        calls = sorted({store.get(f"{place}/{one}").decode() for one in ("call", "other")})
        raise everywhere(f"ranks make different calls at a time: {', '.join(calls)}")


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
    _await_name(environment, host, who, seconds)
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
        text = first_line(error)
        if "EADDRINUSE" in text:
            text = f"port {port} of this host is taken, by another job or program: choose one with --master_port"
        raise RunError(f"{who}: {text}") from error


def _await_name(environment: Environment, host: str, who: str, seconds: float) -> None:
    """Waits until the name of rank 0's node is known here: clusters of containers publish names after they start them.

    Raises:
        RunError: it is not known within the time-out.
    """
    deadline, is_said = monotonic() + seconds, environment.local_rank != 0
    while True:
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            why = f"MASTER_ADDR is {host!r}, and no name that host {socket.gethostname()} knows ({first_line(error)})"
        else:
            return
        if monotonic() > deadline:
            raise RunError(f"{who}: {why}. Write the name or the address of rank 0's node")
        if not is_said:
            say(f"rank {environment.rank} waits up to {seconds:.0f} s: {why}")
            is_said = True
        sleep(0.5)


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
