"""The note in each checkpoint: what it is of and how it was laid out, and which files it has.

Which files a checkpoint has: what its plan requires, what its note lists and what lies in its folder are the same.

That is compared before a file is opened. A file that nobody asked for is never read, whatever its name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parcompile.plan import Plan, digest, plan_tree, spec_from_tree
from parcompile.plan.holding import expert_places, further_ep_ranks, model_parallel_places
from parcompile.runtime.errors import RunError
from parcompile.spec import Precision
from parcompile.text.typed import Reader, integer, list_of
from parcompile.user_files import MAX_INDEX_BYTES, read_text

from .state_file import experts_file, random_file, shard_file, weights_file

# The note in each checkpoint: what it is of, how it was laid out, and the size and hash of every file.

NOTE = "parcompile.json"
"""The note's name, inside the folder of a checkpoint. It is written last: a folder with it is complete."""
LATEST = "latest"
"""The file that names the checkpoint to resume, beside the checkpoints."""
REPLACED = "replaced-"
"""Precedes the name of a checkpoint while another of the same name takes its place."""

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Note:
    """What a checkpoint is of. `files` holds the size in bytes and the SHA-256 of every other file."""

    folder: Path
    step: int
    plan: Plan
    layout: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]
    adapters: Mapping[str, Any] | None = None
    """Configuration of peft, and rank and scale by linear."""
    groups: Sequence[Sequence[int]] | None = None
    """How many parameters the optimizer's groups have, by stage of the pipeline."""

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "step": self.step,
            "plan_hash": self.plan.plan_hash,
            "layout": dict(self.layout),
            "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()},
            **({"adapters": dict(self.adapters)} if self.adapters else {}),
            **({"groups": [list(sizes) for sizes in self.groups]} if self.groups else {}),
            "plan": plan_tree(self.plan),
        }


def locate(folder: Path) -> Path:
    """The checkpoint itself: `folder`, or the one in it that `latest` names.

    Raises:
        RunError: there is none.
    """
    if (folder / NOTE).is_file():
        return folder
    try:
        tag = read_text(folder / LATEST).strip()
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise RunError(f"{folder / LATEST} is no text", everywhere=True) from None
        raise RunError(
            f"there is no checkpoint to resume in {folder}: {error.strerror} ({error.filename})", everywhere=True
        ) from None
    if not tag or Path(tag).name != tag:
        raise RunError(f"{folder / LATEST} names no checkpoint beside it: {tag!r}", everywhere=True)
    if not (folder / tag / NOTE).is_file() and (folder / (REPLACED + tag) / NOTE).is_file():
        return folder / (REPLACED + tag)  # a save ended between two renames
    if not (folder / tag / NOTE).is_file():
        raise RunError(f"{folder / LATEST} names {tag}, but {folder / tag / NOTE} is missing", everywhere=True)
    return folder / tag


def read_note(folder: Path) -> Note:
    """The note of a checkpoint, or of the last one in a folder of them.

    Raises:
        RunError: there is none, or it is damaged.
    """
    place = locate(folder)
    try:
        tree = json.loads(read_text(place / NOTE, MAX_INDEX_BYTES))
        return _note(place, Reader(tree))
    except OSError as error:
        raise RunError(f"{place / NOTE} cannot be read: {error.strerror}", everywhere=True) from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        message = f"the note of the checkpoint in {place} is damaged: {NOTE}: {error}"
        raise RunError(message, everywhere=True) from None


def _note(place: Path, read: Reader) -> Note:
    written, adapters = read.mapping("plan"), read.maybe("adapters")
    if digest({key: value for key, value in written.tree.items() if key != "plan_hash"}) != written.word("plan_hash"):
        raise ValueError("its plan is not the one that it was saved with")
    files = {name: (one.integer("bytes", least=0), one.word("sha256")) for name, one in read.mapping("files").items()}
    plan = Plan(spec_from_tree(written.tree), written.word("spec_hash"), written.word("plan_hash"))
    plan_tree(plan)  # what follows from its values can be computed
    layout = read.mapping("layout").tree
    groups = None if read.tree.get("groups") is None else read.list_of("groups", _sizes)
    step = read.integer("step", least=0)
    return Note(place, step, plan, layout, files, None if adapters is None else adapters.tree, groups)


def _sizes(value: object, name: str) -> list[int]:
    return list_of(integer, value, name)


def digest_of(file: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file."""
    found, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            found.update(chunk)
            size += len(chunk)
    return size, found.hexdigest()


def damages(note: Note, names: Iterable[str], *, hashes: bool = True) -> list[str]:
    """What is wrong with these files of a checkpoint, one sentence each. Without `hashes` only sizes are compared."""
    found = []
    for name in names:
        file, (size, expected) = note.folder / name, note.files[name]
        try:
            live = file.stat().st_size
            if live != size:
                found.append(f"{file} has {live} bytes, it was saved with {size}")
            elif hashes and digest_of(file)[1] != expected:
                found.append(f"{file} is damaged: its SHA-256 is not the one it was saved with")
        except OSError as error:
            found.append(f"{file} cannot be read: {error.strerror}")
    return found


# Which files a checkpoint has: what its plan requires, what its note lists and what lies in its folder are the same.


def tensor_files(plan: Plan) -> set[str]:
    """The files of weights and of optimizer states."""
    parallelism, bf16 = plan.spec.parallelism, plan.spec.training.precision is Precision.BF16
    places = list(enumerate(model_parallel_places(plan)))
    model_parallel_ranks = range(len(places))
    weights = {weights_file(rank) for rank in model_parallel_ranks}
    shards = {
        shard_file(shard, rank, bf16=bf16) for rank in model_parallel_ranks for shard in range(len(expert_places(plan)))
    }
    further = [further_ep_ranks(plan, tp_rank) for tp_rank in range(parallelism.tp)]
    experts = {experts_file(ep_rank, rank) for rank, place in places for ep_rank in further[place.tp]}
    return weights | experts | shards


def random_files(plan: Plan) -> set[str]:
    """The files of random states. A checkpoint of a run has all of them, a converted or an imported one has none."""
    return {random_file(rank) for rank in range(plan.world_size)}


def check_listed(plan: Plan, names: Collection[str]) -> None:
    """Refuses a list of files that is not that of a checkpoint of the plan.

    Raises:
        RunError: a file is missing, or one is more than the plan requires.
    """
    wrong = list(_differences(plan, names))
    if wrong:
        raise RunError("; ".join(wrong[:3]))


def strange_contents(note: Note) -> list[str]:
    """Where the files of plan, note and folder are not the same, one sentence each. No file is opened.

    Files of the note that are missing in the folder are left to `damages`.
    """
    found = [f"{note.folder / NOTE}: {wrong}" for wrong in _differences(note.plan, note.files)]
    try:
        with os.scandir(note.folder) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                if entry.name != NOTE and entry.name not in note.files:
                    found.append(f"{note.folder / entry.name} is not of this checkpoint: remove it")
                elif not entry.is_file():
                    found.append(f"{note.folder / entry.name} is not a file")
    except OSError as error:
        found.append(f"{note.folder} cannot be read: {error.strerror}")
    return found


def _differences(plan: Plan, names: Collection[str]) -> Iterator[str]:
    tensors, random = tensor_files(plan), random_files(plan)
    required = tensors | random if random.intersection(names) else tensors
    if missing := sorted(required.difference(names)):
        yield f"it does not list {_some(missing)}, which the plan requires"
    if strange := sorted(set(names) - required):
        yield f"it lists {_some(strange)}, which the plan does not require"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
