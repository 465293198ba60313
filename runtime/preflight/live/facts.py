"""What a rank knows of itself before it speaks to the others, and what it can write to the folder of checkpoints."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from parcompile import __version__
from parcompile.backends.artefacts import variables
from parcompile.plan import Plan
from parcompile.runtime.deepspeed_patches import cpu_adam
from parcompile.runtime.errors import first_line
from parcompile.runtime.groups.rendezvous import Environment, device_of
from parcompile.runtime.model.text_head import TORCH_DTYPES
from parcompile.spec import Precision


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists: the rest is made when the first checkpoint is written.

    Raises:
        OSError: it cannot be looked at.
    """
    place = folder.absolute()
    return next(one for one in (place, *place.parents) if one.exists())


def disk_of(folder: Path) -> tuple[str, int | None, str]:
    """Where checkpoints would be written, the free bytes there, and why it cannot be written (empty when it can)."""
    try:
        place = existing(folder)
        if not place.is_dir():
            return str(place), None, f"{place} is not a folder"
        refused = "" if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"
        return str(place), shutil.disk_usage(place).free, refused
    except OSError as error:
        return str(folder), None, f"{folder}: {error.strerror}"


@contextlib.contextmanager
def marker_in(folder: Path, *, wanted: bool) -> Iterator[str]:
    """For a while, a file by which others see whether they share the folder; its path, or nothing where there is none.

    A folder that cannot be written gives none: every rank reports that by itself.
    """
    marker = None
    if wanted:
        with contextlib.suppress(OSError):
            marker = existing(folder) / f".parcompile-live-{uuid.uuid4().hex[:12]}"
            marker.touch(exist_ok=False)
    try:
        yield "" if marker is None or not marker.exists() else str(marker)
    finally:
        if marker is not None:
            with contextlib.suppress(OSError):
                marker.unlink(missing_ok=True)


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- it is looked at, nothing is written


@dataclass(frozen=True, slots=True)
class Facts:
    """One rank, as it reports to rank 0. None stands for what cannot be known on this system."""

    rank: int
    world_size: int
    node: str
    plan: str
    """The plan's hash, or why it cannot be read."""
    versions: dict[str, str]
    dtypes: list[str]
    """Precisions in which a product on the device was finite."""
    device: str
    device_free_bytes: int | None
    """None on a CPU, whose memory is the host's."""
    host_free_bytes: int | None
    shared_free_bytes: int | None
    disk_folder: str
    """The folder of checkpoints, or the nearest one above it that exists."""
    disk_free_bytes: int | None
    disk_failure: str
    """Why nothing can be written there; empty when it can."""
    variables: dict[str, str | None]
    """What the plan's environment variables are set to here."""
    failure: str = ""
    """Why this rank cannot take part."""
    cpu_adam: bool | None = None
    """Whether DeepSpeedCPUAdam is compiled here; None: the plan does not take it."""
    cpu_adam_failure: str = ""
    """Why it cannot be."""

    def of_another(self, tree: Mapping[str, Any]) -> Facts:
        """The facts that another rank sent.

        A field that another version of this program does not send is this rank's: the versions still tell them apart.
        """
        return replace(self, **{name: tree[name] for one in fields(self) if (name := one.name) in tree})


def local_facts(environment: Environment, plan: Plan | None, unread: str, checkpoints: Path) -> Facts:
    """What this process finds out about itself. It never raises: what goes wrong is a fact."""
    failure, device, name, free, dtypes = "", None, "none", None, []
    try:
        device = device_of(environment)
        on_device = None if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0])
        name, free, dtypes = device_name(device), on_device, usable_dtypes(device)
    except (RuntimeError, AssertionError, ValueError) as error:
        failure = f"its device cannot be used: {first_line(error)}"
    folder, disk, refused = disk_of(checkpoints)
    return Facts(
        rank=environment.rank,
        world_size=environment.world_size,
        node=node_name(),
        plan=unread or (plan.plan_hash if plan is not None else ""),
        versions=versions(device),
        dtypes=dtypes,
        device=name,
        device_free_bytes=free,
        host_free_bytes=host_memory(),
        shared_free_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        disk_folder=folder,
        disk_free_bytes=disk,
        disk_failure=refused,
        variables={one.name: os.environ.get(one.name) for one in (() if plan is None else variables(plan))},
        failure=failure,
        **_cpu_adam(plan),
    )


def _cpu_adam(plan: Plan | None) -> dict[str, Any]:
    if plan is None or not plan.spec.takes_cpu_adam:
        return {}
    why = cpu_adam.what_is_missing()
    return {"cpu_adam": not why and cpu_adam.is_built(), "cpu_adam_failure": why}


def node_name() -> str:
    """By which ranks know that they share a node."""
    return socket.gethostname()


def versions(device: torch.device | None) -> dict[str, str]:
    """Of everything that has to be the same on all ranks."""
    import deepspeed

    found = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "parcompile": __version__,
    }
    with contextlib.suppress(ImportError):
        import transformers

        found["transformers"] = transformers.__version__
    if device is not None and device.type == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_name(device))


def usable_dtypes(device: torch.device) -> list[str]:
    """The precisions that DeepSpeed's accelerator allows and in which a small product comes out right."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    allowed = {
        Precision.FP32: True,
        Precision.BF16: accelerator.is_bf16_supported(),
        Precision.FP16: accelerator.is_fp16_supported(),
    }
    found = []
    for precision, may in allowed.items():
        if may:
            x = torch.full((16, 16), 0.5, dtype=TORCH_DTYPES[precision], device=device)
            with contextlib.suppress(RuntimeError):
                if bool((x @ x == 4.0).all()):
                    found.append(precision.value)
    return found


def host_memory() -> int | None:
    """Bytes of memory that this node can still give: what Linux calls available, or less where a cgroup ends before."""
    found = None
    with contextlib.suppress(OSError):
        kib = _figure(Path("/proc/meminfo"), "MemAvailable")
        found = None if kib is None else kib * 1024
    for folder in _cgroups():
        with contextlib.suppress(OSError, ValueError):
            limit = (folder / "memory.max").read_text(encoding="utf-8").strip()
            if limit != "max":
                used = int((folder / "memory.current").read_text(encoding="utf-8"))
                # Pages of files are given back when they are needed.
                used -= _figure(folder / "memory.stat", "inactive_file") or 0
                left = max(0, int(limit) - used)
                found = left if found is None else min(found, left)
    return found


def _cgroups() -> list[Path]:
    """This process's cgroup (version 2) and those above it."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    names = [line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")]
    own = root / names[0] if names else root
    return [own, *(one for one in own.parents if one.is_relative_to(root))]


def _figure(file: Path, name: str) -> int | None:
    """The number behind a name, in a file with one of both a line."""
    found = re.search(rf"^{name}:?\s+(\d+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) if found else None
