"""Is a checkpoint as it was saved?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parcompile.runtime.errors import RunError

from .manifest import Note, damages, read_note, strange_contents
from .reading import SavedRun, check_trusted


def verify(folder: str | Path) -> list[str]:
    """What is wrong with a checkpoint (or the last one in a folder of them), one sentence each; empty: nothing.

    The files in the folder, in the note and of the plan are compared before any is opened. Sizes and hashes have to be
    the note's, pickled files may ask for nothing but DeepSpeed's own classes, and they have to hold every weight and
    every state of the optimizer, as large as the plan says.

    Raises:
        RunError: there is no checkpoint, or its note cannot be read.
    """
    return _wrong(read_note(Path(folder)))


def whole_note(folder: str | Path) -> Note:
    """The note of a checkpoint whose files are as they were saved.

    Raises:
        RunError: there is none, or something is wrong with it, as `verify` says.
    """
    note = read_note(Path(folder))
    refuse_damaged(note, _wrong(note))
    return note


def _wrong(note: Note) -> list[str]:
    return strange_contents(note) or wrong_files(note, sorted(note.files)) or unreadable(SavedRun(note))


def unreadable(saved: SavedRun) -> list[str]:
    """What of a checkpoint's tensors the files do not hold, though they are as they were saved."""
    try:
        saved.check()
    except RunError as error:
        return [str(error)]
    return []


def refuse_damaged(note: Note, wrong: Sequence[str]) -> None:
    """One error for what is wrong with a checkpoint, if anything is.

    Raises:
        RunError: something is.
    """
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise RunError(f"the checkpoint {note.folder} cannot be used: {'; '.join(wrong[:3])}{more}", everywhere=True)


def wrong_files(note: Note, names: Sequence[str]) -> list[str]:
    """What is wrong with these files of a checkpoint; its contents are those of the note."""
    found = damages(note, names)
    for name in names:
        if name.endswith(".pt") and not any(name in sentence for sentence in found):
            try:
                check_trusted(note.folder / name)
            except RunError as error:
                found.append(str(error))
    return found
