"""The folder of checkpoints, looked at from every rank."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists: the rest is made when the first checkpoint is written.

    Raises:
        OSError: it cannot be looked at.
    """
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def disk_of(folder: Path) -> tuple[str, int | None, str]:
    """Where checkpoints would be written, the free bytes there, and why it cannot be written (empty when it can)."""
    try:
        place = existing(folder)
        if not place.is_dir():
            return str(place), None, f"{place} is not a folder"
        refused = "" if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"
        return str(place), free_bytes(place), refused
    except OSError as error:
        return str(folder), None, f"{folder}: {error.strerror}"


def free_bytes(folder: Path) -> int:
    """Bytes that a user may still write there.

    Raises:
        OSError: it cannot be looked at.
    """
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


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
