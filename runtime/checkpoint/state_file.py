"""Writes one of torch's files, says its size and hash, and keeps the random generators of a rank."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import IO, Any, cast

import torch

from parcompile.runtime.errors import RunError

# Writes one of torch's files, and says its size and hash without reading it again.

_PIECE_BYTES = 1 << 24


class StateFile:
    """A file on its way to the disk. `put` takes the content, `finish` brings it to the disk.

    Args:
        path: where it is written.
        memory: keeps the content until `finish`, which another thread may call; it grows as needed. None: the content
            goes to the disk at once.
    """

    def __init__(self, path: Path, memory: bytearray | None = None) -> None:
        self.path = path
        self._memory, self._filled = memory, 0
        self._stream: Any = None
        self._hash, self._size = hashlib.sha256(), 0
        self._error: OSError | None = None

    def put(self, state: Any) -> None:
        """Serialises the content as it is now."""
        options = torch.serialization
        checked = options.get_crc32_options()
        options.set_crc32_options(False)  # the note has a SHA-256 of the file
        try:
            torch.save(state, cast(IO[bytes], self))
        finally:
            options.set_crc32_options(checked)

    def write(self, data: Any) -> int:
        """For torch, whose writer ends the process when a stream raises: an error waits for `finish`."""
        view = memoryview(data).cast("B")
        if self._memory is None:
            self._write(view)
            return len(view)
        end = self._filled + len(view)
        if end > len(self._memory):
            self._memory.extend(bytes(end - len(self._memory)))
        self._memory[self._filled : end] = view
        self._filled = end
        return len(view)

    def flush(self) -> None:
        """For torch."""

    def finish(self) -> tuple[int, str]:
        """Brings the content to the disk; returns its size in bytes and its SHA-256.

        Raises:
            OSError: it could not be written.
        """
        if self._memory is not None:
            with memoryview(self._memory) as kept:
                for start in range(0, self._filled, _PIECE_BYTES):
                    self._write(kept[start : min(start + _PIECE_BYTES, self._filled)])
        if self._stream is not None:
            try:
                self._stream.flush()
                os.fsync(self._stream.fileno())
            except OSError as error:
                self._error = self._error or error
            finally:
                self.close()
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self.path))
        return self._size, self._hash.hexdigest()

    def close(self) -> None:
        """Lets the file go, also half-written."""
        if self._stream is not None:
            try:
                self._stream.close()
            except OSError as error:
                self._error = self._error or error
        self._stream = None

    def _write(self, view: memoryview) -> None:
        if self._error is not None:
            return
        try:
            if self._stream is None:
                self._stream = self.path.open("wb", buffering=1 << 20)
            self._stream.write(view)
        except OSError as error:
            self._error = error
        self._hash.update(view)
        self._size += len(view)


def write_state(path: Path, state: Any) -> tuple[int, str]:
    """Writes a file at once; returns its size in bytes and its SHA-256.

    Raises:
        OSError: it could not be written.
    """
    file = StateFile(path)
    try:
        file.put(state)
        return file.finish()
    finally:
        file.close()


# The random generators of a rank, saved and restored.


def random_file(rank: int) -> str:
    """The file of a rank's state."""
    return f"random_rank_{rank:05d}.pt"


def random_state() -> dict[str, Any]:
    """Torch's generators (of this process's device too) and Python's, as they are."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def load_random_state(folder: Path, rank: int) -> None:
    """Continues where the saved generators stopped.

    Raises:
        RunError: the file is damaged.
    """
    file = folder / random_file(rank)
    try:
        state = torch.load(file, weights_only=True)
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except Exception as error:
        raise RunError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
