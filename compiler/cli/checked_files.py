"""The files that `parcompile check` is given, each checked and mended."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parcompile.backends.kinds import Certainty, named_files
from parcompile.pipeline import Checked, check_any, check_read
from parcompile.text import SourceError, SourceText, parse

from .options import Selection

if TYPE_CHECKING:
    from parcompile.lint.deepspeed.usage import UsageOptions

_ROUNDS = 100


@dataclass
class Run:
    """What the files of one call gave."""

    files: list[str] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    fixed: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    """Files of kinds that have no checker."""
    why_unread: dict[str, str] = field(default_factory=dict)
    """Those of them whose text makes no sense: where, and why."""
    untouched: dict[str, str] = field(default_factory=dict)
    """Files that --fix leaves alone, because it is not certain what they are."""

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each file that was checked."""
        return {one.text.file: one.kind for one in self.checked}

    @property
    def texts(self) -> list[SourceText]:
        """The texts of the files that were checked."""
        return [one.text for one in self.checked]


@dataclass(frozen=True, slots=True)
class Mending:
    """Which findings are mended: those that are selected, by safe fixes or by any."""

    chosen: Selection
    unsafe: bool


def expanded(specs: Sequence[str]) -> list[str]:
    """Files in the order given, patterns replaced by what they match, each file once."""
    files: dict[str, None] = {}
    for spec in specs:
        if spec == "-" or not glob.has_magic(spec) or Path(spec).exists():
            files[spec] = None
            continue
        matches = sorted(match for match in glob.glob(spec, recursive=True) if Path(match).is_file())  # noqa: PTH207
        if not matches:
            raise click.UsageError(f"no file matches {spec}")
        files.update(dict.fromkeys(matches))
    return list(files)


def checked_files(
    files: list[str], targets: tuple[str, ...], kind: str | None, mending: Mending | None, usage: UsageOptions | None
) -> Run:
    """Files and those that they name, each checked, and mended where that is asked for."""
    run, waiting = Run(), list(files)
    for file in waiting:
        checked = _check_one(run, file, targets, kind, None if file == "-" or Path(file).is_dir() else mending, usage)
        if checked is not None and checked.document is not None and file != "-" and not Path(file).is_dir():
            followed = named_files(checked.kind, checked.document.tree, Path(file))
            waiting += [name for name in followed if name not in waiting]
    return run


def _check_one(
    run: Run, file: str, targets: tuple[str, ...], kind: str | None, mending: Mending | None, usage: UsageOptions | None
) -> Checked | None:
    try:
        checked = check_any(file, targets, kind=kind, usage=usage)
        if checked.is_skipped:
            run.skipped[file] = checked.kind
            if checked.why_unread:
                run.why_unread[file] = checked.why_unread
            return checked
        if mending and checked.certainty is not Certainty.CERTAIN:
            run.untouched[file] = checked.kind
        elif mending:
            checked, count = _fixed(checked, targets, mending, usage)
            run.fixed += count
    except SourceError as error:
        run.unreadable.append(str(error))
    except OSError as error:
        run.unreadable.append(f"{file} cannot be written: {error.strerror}")
    else:
        run.files.append(checked.text.file)
        run.checked.append(checked)
        return checked
    return None


def _fixed(
    checked: Checked, targets: tuple[str, ...], mending: Mending, usage: UsageOptions | None
) -> tuple[Checked, int]:
    """The file after its fixes, one at a time, each tried on what the one before has left."""
    from parcompile.text.fixes import apply_fixes, chosen_fix, save

    count, unsafe, before = 0, mending.unsafe, checked.document
    for _ in range(_ROUNDS):
        document = checked.document
        if document is None:
            break
        done = None
        for one in mending.chosen.of(checked.diagnostics):
            if chosen_fix(one, unsafe=unsafe):
                done = apply_fixes(document, [one], unsafe=unsafe)
                if done.applied:
                    break
        if done is None or not done.applied:
            break
        count += 1
        # Read again as a whole: what is wrong with the text itself is still wrong.
        again = done.document
        read = parse(again.text, again.file, again.format, bom=again.source.bom)
        checked = check_read(read, Path(again.file).resolve().parent, targets, kind=checked.kind, usage=usage)
    if count and checked.document and before:
        save(checked.document, before)
    return checked, count
