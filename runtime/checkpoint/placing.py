"""Puts a finished checkpoint in place, in a folder of checkpoints that is whole at every moment.

A checkpoint is written as `unfinished-step-N` and renamed to `step-N` when everything in it is on the disk; `latest`
moves after that. Where `step-N` exists already, it becomes `replaced-step-N` for the moment between two renames. After
a crash, readers find it there (`manifest.locate`), and the next writer puts it back (`recover`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from parcompile.atomic import sync_folder, write_file
from parcompile.runtime.errors import RunError

from .manifest import LATEST, NOTE, REPLACED, Note, read_note
from .universal import leave_script

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
