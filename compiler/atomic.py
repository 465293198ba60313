"""Files that are written whole or not at all, alone and as a set.

A set of files in a folder is replaced in one step where the folder holds nothing else: the new folder is written beside
the old one, and the two change places. Where the folder holds other things too (checkpoints, say), the new files wait
in `.parcompile-new` until all of them are there, and are then moved into place. After a crash a reader finds the rest
of the new set there (`locate`), and the next writer finishes the move (`recover`). Either way a reader of ours sees the
old set or the new one, never a mixture.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

_PENDING = ".parcompile-new"
"""Holds a set of files on its way into a folder that holds other things too."""
_COMPLETE = ".complete"
"""Lies in it when all its files are there; its lines name files that go away."""
_MARK = ".parcompile-"
_AT_FDCWD, _EXCHANGE = -100, 2


def write_file(path: Path, content: str | bytes) -> None:
    """Writes one file: beside its destination first, then renamed over it. Links are followed, permissions kept.

    Raises:
        OSError: it cannot be written; what was there before is still there.
    """
    path = Path(os.path.realpath(path))
    data = content.encode("utf-8") if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_set(files: Mapping[str, bytes], folder: Path, *, executable: Collection[str], gone: Collection[str]) -> None:
    """Makes `files` the files of a folder, and removes `gone`; everything else in the folder stays.

    Args:
        files: contents by name, relative to the folder, with slashes.
        folder: made where it is missing.
        executable: names that get permission to execute.
        gone: names of files that an earlier set left.

    Raises:
        OSError: something cannot be written; the folder is as it was.
    """
    folder = Path(os.path.realpath(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    recover(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(20, "is a file, not a folder", str(folder))
    for name in files:
        if (folder / name).is_dir():
            raise IsADirectoryError(21, "is a folder, not a file", str(folder / name))
    if folder.exists() and _foreign(folder, {*files, *gone}):
        _move_in(files, folder, executable, gone)
    else:
        _swap(files, folder, executable)


def locate(folder: Path, name: str) -> Path:
    """Where a file of a set is to be read, also while the set is on its way into the folder."""
    waiting = folder / _PENDING / name
    return waiting if waiting.is_file() and (folder / _PENDING / _COMPLETE).is_file() else folder / name


def recover(folder: Path) -> None:
    """Finishes or drops what an interrupted `write_set` left in a folder.

    Raises:
        OSError: the folder cannot be changed.
    """
    pending = folder / _PENDING
    complete = pending / _COMPLETE
    if not pending.is_dir():
        return
    if complete.is_file():
        for name in complete.read_text(encoding="utf-8").splitlines():
            (folder / name).unlink(missing_ok=True)
        for file in sorted(pending.rglob("*")):
            if file.is_file() and file != complete:
                target = folder / file.relative_to(pending)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
        sync_folder(folder)
    shutil.rmtree(pending)


def _foreign(folder: Path, known: Collection[str]) -> bool:
    """Whether a folder holds anything but these files."""
    for file in folder.rglob("*"):
        if not file.is_dir() or file.is_symlink():
            if file.relative_to(folder).as_posix() not in known:
                return True
        elif not any(file.iterdir()):
            return True
    return False


def _swap(files: Mapping[str, bytes], folder: Path, executable: Collection[str]) -> None:
    """Writes a new folder beside the old one, and exchanges the two."""
    new = folder.with_name(f".{folder.name}{_MARK}{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    try:
        _fill(new, files, executable)
        if folder.exists():
            new.chmod(stat.S_IMODE(folder.stat().st_mode))
            _exchange(new, folder)
        else:
            new.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _exchange(new: Path, old: Path) -> None:
    """Lets two folders change places: in one step on Linux, where the file system can, else in two."""
    with contextlib.suppress(OSError, AttributeError):
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        if rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _EXCHANGE) == 0:
            return
    aside = new.with_name(f"{new.name}-old")
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    aside.rename(new)


def _move_in(files: Mapping[str, bytes], folder: Path, executable: Collection[str], gone: Collection[str]) -> None:
    """Writes the files into the folder's `.parcompile-new`, declares them complete, and moves them into place."""
    pending = folder / _PENDING
    try:
        _fill(pending, files, executable)
        write_file(pending / _COMPLETE, "".join(f"{name}\n" for name in gone))
        sync_folder(pending)
    except BaseException:
        shutil.rmtree(pending, ignore_errors=True)
        raise
    recover(folder)


def _fill(folder: Path, files: Mapping[str, bytes], executable: Collection[str]) -> None:
    folder.mkdir()
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if name in executable:
            file.chmod(0o777 & ~_umask())


def _sweep(folder: Path) -> None:
    """Removes what processes that are no more have left beside a folder."""
    for left in folder.parent.glob(f".{folder.name}{_MARK}*"):
        pid = left.name.rpartition(_MARK)[2].removesuffix("-old")
        if pid.isdigit() and not _alive(int(pid)):
            if left.name.endswith("-old") and not folder.exists():
                left.rename(folder)  # the second of two renames never came
            else:
                shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder last; nothing where folders cannot be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
