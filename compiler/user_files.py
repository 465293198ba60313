"""Reads files that users name, or that their files name: regular ones, up to a size.

A path in a spec may be /dev/zero, a pipe that nobody writes to, or a disk image. What is no regular file is not opened,
and what is larger than its kind ever is is not read. Every read of such a file in the compiler and in what the runtime
reads beside it goes through here (`tests/test_reads.py`). So does every data file that is installed with the package.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import pkgutil
import stat
from typing import Any

from .units import MIB

MAX_BYTES = 8 * MIB
"""Specs, configurations and coefficients have a few kilobytes; the plan of 16,384 ranks has 62."""
MAX_TABLE_BYTES = 8 * MIB
"""A table of measurements: about 10,000 rows."""
MAX_INDEX_BYTES = 64 * MIB
"""Which file holds which tensor: that of the largest published model has 9 MB."""


def read_bytes(path: str | os.PathLike[str], limit: int = MAX_BYTES, *, follow: bool = True) -> bytes:
    """The content of a regular file.

    Args:
        path: of the file.
        limit: how many bytes it may have.
        follow: whether the file itself may be a link.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger. `strerror` says which, also for a name that no
            file can have.
    """
    content, size = read_start(path, limit + 1, follow=follow)
    if size > limit or len(content) > limit:
        raise OSError(errno.EFBIG, f"it has {max(size, len(content)):,} bytes; at most {limit:,} are read", str(path))
    return content


def read_text(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> str:
    """The content of a regular file as UTF-8, without a byte order mark's removal and with its own line ends.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: it is not UTF-8. It is a ValueError, as what `json.loads` raises.
    """
    return read_bytes(path, limit).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """What a JSON text of a user holds.

    Raises:
        ValueError: it is none, or is nested too deep to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_start(path: str | os.PathLike[str], count: int, *, follow: bool = True) -> tuple[bytes, int]:
    """Up to `count` bytes from the start of a regular file, and the size that it has.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    name = os.fspath(path)
    try:
        # Opening a pipe may wait and opening a device may do something: what it is, is asked for before.
        check_regular(os.stat(name, follow_symlinks=follow), name)  # noqa: PTH116 -- a name may hold a NUL: ValueError
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        handle = os.open(name, flags | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    except ValueError as error:
        raise OSError(errno.EINVAL, f"no file can have this name: {error}", name) from None
    with os.fdopen(handle, "rb") as stream:
        status = os.fstat(handle)
        check_regular(status, name)
        return stream.read(count), status.st_size


def check_regular(status: os.stat_result, name: str) -> None:
    """Lets a regular file pass.

    Raises:
        OSError: what a status describes is a folder, a link, a pipe or a device.
    """
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "this is a directory, not a file", name)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "this is a link", name)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "this is no regular file but a pipe or a device", name)


@functools.cache
def shipped(package: str, name: str) -> Any:
    """The JSON tree of a data file beside the modules of `package`, decoded once: nobody changes it."""
    return json.loads(shipped_text(package, name))


@functools.cache
def shipped_text(package: str, name: str) -> str:
    """The text of such a file."""
    content = pkgutil.get_data(package, name)  # in half the time of importlib.resources
    assert content is not None
    return content.decode("utf-8")
