"""Is a checkpoint as it was saved?"""

from __future__ import annotations

from pathlib import Path

from parcompile.runtime.errors import RunError

from .manifest import damages, read_note
from .trusted import check_trusted


def verify(folder: str | Path) -> list[str]:
    """What is wrong with a checkpoint (or the last one in a folder of them), one sentence each; empty: nothing.

    Sizes and hashes are compared with the note, and pickled files may ask for nothing but DeepSpeed's own classes.

    Raises:
        RunError: there is no checkpoint, or its note cannot be read.
    """
    note = read_note(Path(folder))
    found = damages(note, sorted(note.files))
    for name in sorted(note.files):
        if name.endswith(".pt") and not any(name in sentence for sentence in found):
            try:
                check_trusted(note.folder / name)
            except RunError as error:
                found.append(str(error))
    return found
