"""What DeepSpeed's engine saves and loads through, while `save` and `load` are at work.

DeepSpeed's engine names files and leaves them to a checkpoint engine (`deepspeed.runtime.checkpoint_engine`, 0.19.8).
Its own unpickles whatever a glob finds, and raises on one rank while the others wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from parcompile.runtime.errors import RunError

from .expert_weights import with_experts
from .manifest import Note
from .reading import load_trusted
from .state_file import StateFile


class _Engine(CheckpointEngine):  # type: ignore[misc]
    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def commit(self, info: CheckpointCommitInfo) -> bool:  # noqa: ARG002 -- DeepSpeed's
        return True

    def save(self, state_dict: Any, path: str) -> None:  # noqa: ARG002 -- DeepSpeed's
        raise RunError(f"DeepSpeed would write {path} while a checkpoint is loaded")

    def load(self, path: str, map_location: Any = None) -> Any:  # noqa: ARG002 -- DeepSpeed's
        raise RunError(f"DeepSpeed would load {path} while a checkpoint is saved")


class Writer(_Engine):
    """Takes what is to be saved, into files that `finish` brings to the disk.

    Args:
        folder: where the files will lie.
        memories: host memory for the content of each file by its name, used again by the next save. None: contents go
            to the disk at once.
    """

    def __init__(self, folder: Path, memories: dict[str, bytearray] | None) -> None:
        super().__init__()
        self._folder, self._memories = folder, memories
        self._files: list[StateFile] = []
        self._error: Exception | None = None

    def save(self, state_dict: Any, path: str) -> None:
        """An error waits for `finish`: other ranks are on their way to a collective."""
        name = Path(path).name
        memory = None if self._memories is None else self._memories.setdefault(name, bytearray())
        file = StateFile(self._folder / name, memory)
        self._files.append(file)
        try:
            file.put(state_dict)
        except Exception as error:  # what cannot be pickled raises what it likes
            self._error = self._error or error

    def finish(self) -> dict[str, tuple[int, str]]:
        """Size in bytes and SHA-256 of each file, which is on the disk then.

        Raises:
            RunError: something cannot be pickled.
            OSError: something cannot be written.
        """
        try:
            if self._error is not None:
                raise RunError(f"the state cannot be saved: {type(self._error).__name__}: {self._error}")
            return {file.path.name: file.finish() for file in self._files}
        finally:
            for file in self._files:
                file.close()


class Reader(_Engine):
    """Opens the files of a note, whose contents have been compared, and no other; what they hold is data alone.

    Args:
        note: of the checkpoint.
        experts: files of experts by the file of weights that they are read with. DeepSpeed opens files of other ranks,
            too, to look at them; these are read as they are.
    """

    def __init__(self, note: Note, experts: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__()
        self._note, self._experts = note, experts

    def load(self, path: str, map_location: Any = None) -> Any:  # noqa: ARG002 -- DeepSpeed's
        """The content of a file, mapped.

        Raises:
            RunError: the file is not of the checkpoint, or is not what it was.
        """
        name = Path(path).name
        if name not in self._note.files or Path(path).parent.resolve() != self._note.folder.resolve():
            raise RunError(f"{path} is not of the checkpoint {self._note.folder}: not loaded")
        content = load_trusted(self._note.folder / name)
        if name not in self._experts:
            return content
        return with_experts(content, load_trusted(self._note.folder / self._experts[name]))
