"""Files that are written whole or not at all, alone and as a set.

**One file** is written beside its destination and renamed over it.

**A set of files** belongs to a folder, and has one writer at a time: `.parcompile-writing` in the folder is locked. A
folder that holds nothing else is replaced in one step: the new folder is filled beside it, and the two change places.
Where the folder holds other things too (checkpoints, say), or its parent cannot be written, the files wait in
`.parcompile-new.INODE` inside it. `.complete`, renamed into it last, lists them; from then on they count, and are moved
into place one by one. Whoever is killed before leaves the old set, and the next writer drops what waits; whoever is
killed after leaves the new set, part of it still waiting, and the next writer finishes the move (`recover`).

**A reader** asks `locate` for the place of one file. `read_set` reads several of one generation: it looks before and
after which file is plan.json. Each generation has another one, and a move keeps it. Who reads the folder without us
compares the files with the hashes in parcompile.lock.json.

**What others left** is not believed. INODE is the folder's own: a copied or cloned folder has another, and a writer
refuses what waits there by its name. Names are checked however they came (`is_plain`), links inside the folder are
never followed, and nothing outside it is touched. The folder itself may be a link.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .user_files import MAX_INDEX_BYTES, check_regular, parse_json, read_bytes

fcntl: Any = None
with contextlib.suppress(ImportError):  # Windows has none
    fcntl = importlib.import_module("fcntl")

_LOCK = ".parcompile-writing"
_PENDING = ".parcompile-new"
"""Begins the name of the folder that holds a set on its way into a folder that holds other things too."""
_COMPLETE = ".complete"
"""Lies in it when all its files are there: their names, and hashes of files that go away, by name."""
_BESIDE = ".parcompile-"
"""Stands in the name of a new folder beside the one that it replaces."""
_AT_FDCWD, _EXCHANGE = -100, 2
WAIT_SECONDS = 60.0
"""How long a writer waits for another one."""
_CLOSING_SECONDS = 1.0
"""How long a program that has a file open gets to close it."""
_TRIES = 200
"""How often a reader begins again because a writer was faster."""
Found = TypeVar("Found")
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


def write_file(path: Path, content: str | bytes, *, expected: bytes | None = None) -> None:
    """Writes one file: beside its destination first, then renamed over it. Links are followed, permissions kept.

    A byte of a file's name that is not UTF-8 is written as its escape. Where the file has to hold `expected`, the two
    change places, and change back if it turns out that another program wrote to it meanwhile.

    Raises:
        OSError: it cannot be written, the file that is there may not be, or it is a folder, a pipe or a device, which a
            rename would replace; what was there before is still there.
    """
    path = Path(os.path.realpath(path))
    if os.path.lexists(path):
        check_regular(path.stat(), str(path))  # of a link that leads to itself there is no status
        if not (path.stat().st_mode & 0o222 and os.access(path, os.W_OK)):
            raise PermissionError(errno.EACCES, "the file is read-only", str(path))
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    except OSError as error:
        error.filename = str(path)
        raise
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_umask())
        if expected is None:
            temporary.replace(path)
        else:
            _replace(path, temporary, expected, data)
            temporary.unlink(missing_ok=True)
    except BaseException as error:
        if not isinstance(error, _KeptError):
            temporary.unlink(missing_ok=True)
        raise


class _KeptError(OSError):
    """Both files were written to by others: none is removed."""


def _replace(path: Path, new: Path, expected: bytes, data: bytes) -> None:
    """Puts `new`, which holds `data`, into the place of a file that holds `expected`; `new` is then what was there."""
    if read_bytes(path) != expected:
        raise _changed(path)
    if not _exchange(new, path):
        new.replace(path)
        return
    # Who opened the file before may write to it still.
    if _settled(new) == expected:
        return
    _exchange(new, path)
    if _settled(new) != data:
        said = f"it was changed while it was checked; what was written to it then is in {new}"
        raise _KeptError(errno.EBUSY, said, str(path))
    raise _changed(path)


def _changed(path: Path) -> OSError:
    return OSError(errno.EBUSY, "it was changed while it was checked; check it again", str(path))


def _settled(path: Path) -> bytes | None:
    """The content of a file that nobody has open to write, which a lease tells on Linux; None if somebody still has."""
    with path.open("rb") as stream:
        end = time.monotonic() + _CLOSING_SECONDS
        while _is_open_elsewhere(stream.fileno()):
            if time.monotonic() > end:
                return None
            time.sleep(0.005)
        return read_bytes(path)


def _is_open_elsewhere(handle: int) -> bool:
    try:
        # Who opens the file now is told to us by a signal, which ends a process unless it is another one.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except (OSError, AttributeError):
        return False  # no leases here
    return False


def write_set(
    files: Mapping[str, bytes],
    folder: Path,
    *,
    executable: Collection[str] = (),
    gone: Callable[[], Collection[str]] = tuple,
) -> None:
    """Makes `files` the files of a folder, and removes those that `gone` names; everything else in the folder stays.

    Args:
        files: contents by name, relative to the folder, with slashes.
        folder: made where it is missing.
        executable: names that get permission to execute.
        gone: asked for names of files that an earlier set left, when no other writer is at work.

    Raises:
        OSError: something cannot be written, another writer does not end, or what is there is not ours; the folder is
            as it was.
        ValueError: a name is not plain.
    """
    for name in files:
        if not is_plain(name):
            raise ValueError(f"{name!r} names no file inside a folder")
    folder = Path(os.path.realpath(folder))
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file, not a folder", str(folder))
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder) as held:
            recover(folder, alone=bool(held))
            old = {name for name in gone() if is_inside(folder, name)} - set(files)
            if held:
                _sweep(folder)
            for name in files:
                _check_place(folder, name)
            if _foreign(folder, {*files, *old}) or not _swap(files, folder, executable, old, held):
                _move_in(files, folder, executable, old)
                recover(folder, alone=True)
    except BaseException:
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def is_plain(name: str) -> bool:
    """Whether a name is that of a file inside a folder on any machine, written with slashes, and none of this module's.

    `os.path` is asked for nothing: a name that came from another machine means the same on all of them.
    """
    parts = name.split("/")
    return all(
        part not in ("", ".", "..")
        and part.isprintable()
        and not set(part) & set('\\:*?"<>|')
        and not part.startswith((_PENDING, _LOCK))
        and part == part.strip()
        and not part.endswith(".")
        and not _RESERVED.fullmatch(part)
        and len(part.encode("utf-8", "surrogatepass")) <= 255
        for part in parts
    ) and (len(parts) > 1 or name != _COMPLETE)


def is_inside(folder: Path, name: str) -> bool:
    """Whether a name is that of a regular file of a folder, reached without a link."""
    if not is_plain(name):
        return False
    try:
        _check_place(folder, name)
        return stat.S_ISREG((folder / name).lstat().st_mode)
    except OSError:
        return False


def locate(folder: Path, name: str) -> Path:
    """Where a file of a set is to be read, also while the set is on its way into the folder."""
    try:
        pending = _pending(folder)
        waits = _has(pending, name) and _has(pending, _COMPLETE)
    except (OSError, ValueError):
        waits = False
    return pending / name if waits else folder / name


def read_set(folder: Path, names: Collection[str]) -> dict[str, bytes | None]:
    """Files of one generation of a set by their names; None for those that it lacks.

    Raises:
        OSError: one cannot be read, or writers never rest.
    """
    for turn in range(_TRIES):
        before = _generation(folder)
        found = {name: _of_file(folder, name, read_bytes) for name in names}
        if before == _generation(folder):
            return found
        time.sleep(0.001 * min(turn, 50))
    raise OSError(errno.EAGAIN, "its files change all the time", str(folder))


def _of_file(folder: Path, name: str, what: Callable[[Path], Found]) -> Found | None:
    """What is asked of a file of a set, wherever it is at this moment; None where there is no such file."""
    for _ in range(_TRIES):
        place = locate(folder, name)
        try:
            return what(place)
        except FileNotFoundError:
            if locate(folder, name) == place:
                return None
    raise OSError(errno.EAGAIN, "it moves all the time", str(folder / name))


def _generation(folder: Path) -> tuple[int, int] | None:
    """Which file stands for the set: a rename keeps both numbers, and a new file has others."""
    status = _of_file(folder, "plan.json", Path.stat)
    return None if status is None else (status.st_ino, status.st_mtime_ns)


def recover(folder: Path, *, alone: bool = True) -> None:
    """Finishes or drops what an interrupted `write_set` left in a folder.

    Args:
        folder: locked by the caller.
        alone: whether the lock holds; without it nobody knows whether another writer still works.

    Raises:
        OSError: the folder cannot be changed, or what waits there is not this folder's.
    """
    pending = _pending(folder)
    for found in sorted(folder.glob(f"{_PENDING}*")):
        if found != pending or found.is_symlink() or not found.is_dir():
            raise FileExistsError(
                errno.EEXIST, "was not left by a compilation into this folder: look at it and remove it", str(found)
            )
        if not alone:
            raise FileExistsError(
                errno.EEXIST, "is left by a compilation that was killed, or is still at work: remove it", str(found)
            )
    if not pending.is_dir():
        return
    if _has(pending, _COMPLETE):
        files, gone = _listed(pending)
        for name, digest in gone.items():
            if is_inside(folder, name) and _digest(folder / name) == digest:
                (folder / name).unlink()
        for name in files:
            if not is_inside(pending, name):
                continue  # moved before the interruption
            _check_place(folder, name)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (pending / name).replace(folder / name)
        sync_folder(folder)
    shutil.rmtree(pending)


def _listed(pending: Path) -> tuple[list[str], dict[str, str]]:
    """The files that wait, and those that go away with their hashes."""
    try:
        tree = parse_json(read_bytes(pending / _COMPLETE, MAX_INDEX_BYTES, follow=False))
        files, gone = list(tree["files"]), dict(tree["gone"])
        fine = all(isinstance(name, str) and is_plain(name) for name in (*files, *gone))
    except (ValueError, KeyError, TypeError):
        fine = False
    if not fine:
        raise FileExistsError(errno.EEXIST, "is damaged: look at its folder and remove that", str(pending / _COMPLETE))
    return files, gone


def _pending(folder: Path) -> Path:
    return folder / f"{_PENDING}.{folder.stat().st_ino}"


def _has(folder: Path, name: str) -> bool:
    """Whether a folder that is no link holds a regular file, reached without a link."""
    if folder.is_symlink():
        return False
    if name != _COMPLETE:
        return is_inside(folder, name)
    try:
        return stat.S_ISREG((folder / name).lstat().st_mode)
    except FileNotFoundError:
        return False


def _check_place(folder: Path, name: str) -> None:
    """Sees to it that a file can take its place in a folder without leaving it.

    Raises:
        OSError: a folder on the way is a link or a file, or the place itself is a folder, a pipe or a device.
    """
    for parent in reversed(Path(name).parents):
        with contextlib.suppress(FileNotFoundError):
            mode = (folder / parent).lstat().st_mode if parent.parts else stat.S_IFDIR
            if stat.S_ISLNK(mode):
                raise OSError(errno.ELOOP, "is a link, and nothing is written through it", str(folder / parent))
            if not stat.S_ISDIR(mode):
                raise NotADirectoryError(errno.ENOTDIR, "is a file, not a folder", str(folder / parent))
    with contextlib.suppress(FileNotFoundError):
        mode = (folder / name).lstat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", str(folder / name))
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise OSError(errno.EINVAL, "is a pipe or a device, not a file", str(folder / name))


def _foreign(folder: Path, known: Collection[str]) -> bool:
    """Whether a folder holds anything but these files."""
    for at, folders, files in os.walk(folder, onerror=_raise):
        here = Path(at).relative_to(folder)
        links = [name for name in folders if (folder / here / name).is_symlink()]
        found = {(here / name).as_posix() for name in (*files, *links)} - {_LOCK}
        if not found <= set(known) or (here.parts and not folders and not files):
            return True
    return False


def _raise(error: OSError) -> None:
    raise error


def _swap(
    files: Mapping[str, bytes], folder: Path, executable: Collection[str], gone: Collection[str], held: list[int]
) -> bool:
    """Fills a new folder beside the old one, and exchanges the two; False where that cannot be done in one step."""
    try:
        number = folder.stat().st_ino
        new = Path(tempfile.mkdtemp(prefix=f".{folder.name[:100]}{_BESIDE}{number}.", dir=folder.parent))
    except OSError:
        return False
    try:
        _fill(new, files, executable)
        new.chmod(stat.S_IMODE(folder.stat().st_mode))
        if held:
            held.append(_open_lock(new))  # the next writer waits until the old folder is gone
            _try_lock(held[-1])
        if not _exchange(new, folder):
            return False
        if _foreign(new, {*files, *gone}):
            _exchange(new, folder)  # somebody put a file there meanwhile
            return False
        sync_folder(folder.parent)
        return True
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Lets two folders change places in one step: on Linux, where the file system can."""
    with contextlib.suppress(OSError, AttributeError):
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0)
    return False


def _move_in(files: Mapping[str, bytes], folder: Path, executable: Collection[str], gone: Collection[str]) -> None:
    """Writes the files into the folder's pending one, and declares them complete."""
    pending = _pending(folder)
    pending.mkdir()
    try:
        _fill(pending, files, executable)
        listed = {"files": list(files), "gone": {name: _digest(folder / name) for name in sorted(gone)}}
        write_file(pending / _COMPLETE, json.dumps(listed))
        sync_folder(pending)
    except BaseException:
        shutil.rmtree(pending, ignore_errors=True)
        raise


def _fill(folder: Path, files: Mapping[str, bytes], executable: Collection[str]) -> None:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if name in executable:
            file.chmod(0o777 & ~_umask())


def _digest(file: Path) -> str:
    return hashlib.sha256(read_bytes(file, MAX_INDEX_BYTES, follow=False)).hexdigest()


def _sweep(folder: Path) -> None:
    """Removes what killed writers of this folder have left beside it: it has the number of this folder, or its own."""
    for left in folder.parent.glob(f".{glob.escape(folder.name[:100])}{_BESIDE}*.*"):
        with contextlib.suppress(OSError):
            numbers = {str(folder.stat().st_ino), str(left.lstat().st_ino)}
            if left.is_dir() and not left.is_symlink() and left.name.rpartition(_BESIDE)[2].split(".")[0] in numbers:
                shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[list[int]]:
    """Makes this process the only writer of a folder; yields open files that hold the lock, none where none can.

    Raises:
        OSError: another writer does not end, or the folder cannot be written.
    """
    held: list[int] = []
    try:
        end = time.monotonic() + WAIT_SECONDS
        while not held:
            handle = _open_lock(folder)
            try:
                locked = _try_lock(handle)
                if locked is None:
                    break
                if locked and _is_file_of(handle, folder / _LOCK):
                    held.append(handle)
                    handle = -1
            finally:
                if handle >= 0:
                    os.close(handle)
            if not held and time.monotonic() > end:
                raise BlockingIOError(
                    errno.EAGAIN, f"another compilation has been writing for {WAIT_SECONDS:g} s", str(folder)
                )
            if not held:
                time.sleep(0.01)
        try:
            yield held
        finally:
            with contextlib.suppress(OSError):
                (folder / _LOCK).unlink()
    finally:
        for handle in held:
            os.close(handle)


def _open_lock(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return os.open(folder / _LOCK, flags | getattr(os, "O_CLOEXEC", 0), 0o666)


def _try_lock(handle: int) -> bool | None:
    """Whether an open file is locked for this process now; None where the file system or the system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES, errno.EINTR) else None
    return True


def _is_file_of(handle: int, path: Path) -> bool:
    """Whether a path still names an open file: a writer before may have removed it, or its folder."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except OSError:
        return False


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
