"""Work in which all ranks succeed, or all of them fail with one message."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from parcompile.runtime.errors import RunError

T = TypeVar("T")

SEEN_SECONDS = 30.0
"""How long a shared file system may take to show one rank what another has written; NFS caches that long."""


def on_all_ranks(work: Callable[[], T], group: Any = None) -> list[T]:
    """What `work` returns on every rank, in the order of ranks. What one of them finds wrong, every rank raises.

    Args:
        work: takes part in no collective.
        group: of all ranks; None is the default group.

    Raises:
        RunError: `work` raised a RunError or an OSError on some rank; the message says on which.
    """
    mine: tuple[Any, str | None]
    try:
        mine = work(), None
    except (RunError, OSError) as error:
        mine = None, one_line(error)
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, mine, group=group)
    failed = {rank: text for rank, (_, text) in enumerate(outcomes) if text is not None}
    if failed:
        raise RunError(_told(failed, len(outcomes)), everywhere=True)
    return [result for result, _ in outcomes]


def on_rank_0(work: Callable[[], T], group: Any = None) -> T:
    """What `work` returns on rank 0, on every rank.

    Raises:
        RunError: as `on_all_ranks`.
    """
    return cast(T, on_all_ranks(lambda: work() if dist.get_rank() == 0 else None, group)[0])


def one_line(error: Exception) -> str:
    """An error of the system names its file; others say what they say."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]


def await_seen(folder: Path, sizes: dict[str, int] | None = None) -> None:
    """Waits until this process sees a folder, and in it files of these sizes in bytes.

    Raises:
        RunError: it does not in time.
    """
    deadline, pause = time.monotonic() + SEEN_SECONDS, 0.01
    while missing := _unseen(folder, sizes or {}):
        if time.monotonic() > deadline:
            raise RunError(f"{missing} is not seen here: every rank needs the same folder, on a shared file system")
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _unseen(folder: Path, sizes: dict[str, int]) -> Path | None:
    if not folder.is_dir():
        return folder
    return next((folder / name for name, size in sizes.items() if not _has_size(folder / name, size)), None)


def _has_size(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except OSError:
        return False


def _told(failed: dict[int, str], ranks: int) -> str:
    if len(failed) == ranks and len(set(failed.values())) == 1:
        return failed[0]
    texts = [f"rank {rank}: {text}" for rank, text in failed.items()]
    more = f"; and {len(texts) - 3} more ranks" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more
