"""One job at a time saves into a folder of checkpoints, which is whole at every moment.

`.parcompile-lock` in the folder names the host and the process that saves there. Its time of change is the heartbeat of
that process. A job that is gone does not keep the folder: on the same machine its process is looked for, and a process
of another machine is gone when its heartbeat has stopped. `flock` only guards the moment of writing the file.

A checkpoint is written as `unfinished-step-N` and renamed to `step-N` when everything in it is on the disk; `latest`
moves after that. Where `step-N` exists already, it becomes `replaced-step-N` for the moment between two renames. After
a crash, readers find it there (`manifest.locate`), and the next writer puts it back (`recover`).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from parcompile.atomic import sync_folder, write_file
from parcompile.runtime.errors import RunError
from parcompile.runtime.liveness.watchdog import process_fields

from .manifest import LATEST, NOTE, REPLACED, Note, leave_script, read_note

LOCK = ".parcompile-lock"
HEARTBEAT_SECONDS = 10.0
DEAD_SECONDS = 60.0
"""A heartbeat that has stopped for so long belongs to a dead job."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told from any other one, also from one that gets its number later."""

    host: str
    pid: int
    machine: str
    """The boot of the machine and the namespace of process numbers; empty where the system does not say."""
    started: str
    """When the process began, in ticks of the machine; empty where the system does not say."""

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), _machine(), _process(os.getpid())[1])


_held: dict[Path, Owner] = {}


def hold(folder: Path) -> None:
    """Makes this process the one that saves into a folder, until it ends or calls `release`.

    Raises:
        RunError: another job saves there.
        OSError: the folder cannot be written.
    """
    path, me = Path(os.path.realpath(folder)) / LOCK, Owner.me()
    other = _take(path, me, None)
    if other is not None and _is_gone(other, path):
        other = _take(path, me, other)
    if other is not None:
        raise RunError(
            f"process {other.pid} on {other.host} saves into {folder}: end that job, or choose another folder for this "
            "one"
        )
    if _held.get(path) != me:
        _held[path] = me
        threading.Thread(target=_beat, args=(path, me), name="heartbeat of a folder", daemon=True).start()


def holds(folder: Path) -> bool:
    """Whether this process is the one that saves into a folder: it took it, and nobody has taken it since."""
    path, me = Path(os.path.realpath(folder)) / LOCK, Owner.me()
    try:
        return _held.get(path) == me and _parsed(path.read_text(encoding="utf-8")) == me
    except (OSError, UnicodeDecodeError):
        return False


def release(folder: Path) -> None:
    """Lets other jobs save into a folder that this process held."""
    _release(Path(os.path.realpath(folder)) / LOCK)


def _release(path: Path) -> None:
    me = _held.pop(path, None)
    if me is None or me.pid != os.getpid():
        return
    with contextlib.suppress(OSError), path.open("r+", encoding="utf-8") as stream, _guarded(stream.fileno()):
        if _parsed(stream.read()) == me:
            stream.seek(0)
            stream.truncate()


@atexit.register
def _release_all() -> None:
    for path in list(_held):
        _release(path)


def _take(path: Path, me: Owner, gone: Owner | None) -> Owner | None:
    """Writes the lock, unless a process holds it that is not known to be gone: that one is returned."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with os.fdopen(handle, "r+", encoding="utf-8") as stream, _guarded(handle):
        found = _parsed(stream.read())
        if found == me:
            return None
        if found is not None and found != gone:
            return found
        stream.seek(0)
        stream.truncate()
        stream.write(json.dumps(asdict(me)) + "\n")
        stream.flush()
        os.fsync(handle)
    return None


@contextlib.contextmanager
def _guarded(handle: int) -> Iterator[None]:
    with contextlib.suppress(OSError):  # a file system without locks has no guard for this moment
        fcntl.flock(handle, fcntl.LOCK_EX)
    yield


def _parsed(text: str) -> Owner | None:
    """The process that a lock names; None for one that is free or cannot be read."""
    with contextlib.suppress(ValueError, TypeError):
        found = Owner(**json.loads(text))
        return found if isinstance(found.pid, int) else None
    return None


def _is_gone(owner: Owner, path: Path) -> bool:
    if owner.machine and owner.machine == _machine():
        state, started = _process(owner.pid)
        return state in ("", "Z", "X") or started != owner.started
    beat, deadline = path.stat().st_mtime_ns, time.monotonic() + DEAD_SECONDS
    while (_now(path.parent) - beat) / 1e9 < DEAD_SECONDS and time.monotonic() < deadline:
        time.sleep(min(1.0, DEAD_SECONDS / 10))
        if path.stat().st_mtime_ns != beat:
            return False
    return path.stat().st_mtime_ns == beat


def _now(folder: Path) -> int:
    """The time by the clock that stamps the files of a folder, in ns."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".parcompile-clock-") as probe:
        return os.fstat(probe.fileno()).st_mtime_ns


def _beat(path: Path, me: Owner) -> None:
    while True:
        time.sleep(HEARTBEAT_SECONDS)
        with contextlib.suppress(OSError):
            if _held.get(path) != me:
                return
            if _parsed(path.read_text(encoding="utf-8")) != me:
                _held.pop(path, None)  # it was taken while this process stood still
                return
            os.utime(path)


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process(pid: int) -> tuple[str, str]:
    """State and start of a process, as Linux gives them; empty when there is none."""
    fields = process_fields(pid)
    return (fields[0], fields[19]) if fields else ("", "")


_UNFINISHED = "unfinished-"


def unfinished(place: Path) -> Path:
    """Where the checkpoint `place` is written."""
    return place.with_name(_UNFINISHED + place.name)


def begin(place: Path) -> Path:
    """An empty folder for a checkpoint that will be put at `place`; what interrupted writers left is cleared away.

    Raises:
        OSError: the folder cannot be written.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    recover(place.parent)
    folder = unfinished(place)
    folder.mkdir()
    return folder


def recover(folder: Path) -> None:
    """Clears away what interrupted writers left in a folder of checkpoints; a checkpoint that they had moved returns.

    Raises:
        OSError: the folder cannot be changed.
    """
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)
    for aside in folder.glob(f"{REPLACED}*"):
        place = folder / aside.name.removeprefix(REPLACED)
        if place.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(place)
            sync_folder(folder)


def put_in_place(note: Note, *, same: bool) -> None:
    """Makes the files that wait for it the checkpoint `note.folder`, and `latest` name it.

    Args:
        note: with all files.
        same: this very checkpoint is in place already. Otherwise one that is there gives way.

    Raises:
        OSError: the folder cannot be changed; the checkpoint that `latest` named is still there.
    """
    place, new = note.folder, unfinished(note.folder)
    if same:
        shutil.rmtree(new)
        point_to(place)
        return
    write_file(new / NOTE, json.dumps(note.to_json(), indent=1) + "\n")
    sync_folder(new)
    leave_script(place.parent)
    aside = place.with_name(REPLACED + place.name)
    if place.exists():
        place.rename(aside)
    new.rename(place)
    point_to(place)
    shutil.rmtree(aside, ignore_errors=True)


def is_noted_there(note: Note) -> bool:
    """Whether a checkpoint with this very note is in place; its files are to be compared still."""
    try:
        there = read_note(note.folder) if (note.folder / NOTE).is_file() else None
    except RunError:
        return False
    return there is not None and json.dumps(there.to_json()) == json.dumps(note.to_json())


def point_to(place: Path) -> None:
    """Lets `latest` name a checkpoint that is on the disk.

    Raises:
        OSError: it cannot be written.
    """
    sync_folder(place.parent)
    write_file(place.parent / LATEST, place.name)
    sync_folder(place.parent)


def forget(newest: Path, keep: int | None) -> None:
    """Removes the oldest checkpoints of a folder but `keep`, the newest included; None keeps all."""
    if keep is None:
        return
    old = [found for found in newest.parent.glob("step-*") if found != newest and (found / NOTE).is_file()]
    old.sort(key=lambda found: (found / NOTE).stat().st_mtime)
    for found in old[: max(0, len(old) + 1 - max(1, keep))]:
        # Without its note it is no checkpoint any more, also when the rest is still there after a crash.
        (found / NOTE).unlink(missing_ok=True)
        shutil.rmtree(found, ignore_errors=True)
