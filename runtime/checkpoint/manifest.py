"""The note in each checkpoint: what it is of and how it was laid out, and which files it has.

Which files a checkpoint has: what its plan requires, what its note lists and what lies in its folder are the same.

That is compared before a file is opened. A file that nobody asked for is never read, whatever its name.

What DeepSpeed's own tools need to know of a checkpoint: how tensor-parallel ranks cut each parameter.

`ds_to_universal` puts slices together by `universal_checkpoint_info` in the files of weights (0.19.8,
checkpoint/affine_ir_spec.md): of each parameter, which blocks of it a rank holds. Without it, every slice is taken for
a block of rows. `zero_to_fp32.py`, which DeepSpeed writes beside a checkpoint, knows no slices, no padding, no stages,
and no files but those of ZeRO's optimizers; ours runs it where there are none of these, and says elsewhere what to run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from parcompile.atomic import write_file
from parcompile.layout.shards import TensorLayout
from parcompile.plan import Plan, digest, plan_tree, spec_from_tree
from parcompile.plan.holding import expert_places, further_ep_ranks, model_parallel_places
from parcompile.runtime.errors import RunError, everywhere
from parcompile.spec import Precision
from parcompile.text.typed import Reader, integer, list_of
from parcompile.user_files import MAX_INDEX_BYTES, read_text

from .state_file import experts_file, random_file, shard_file, weights_file

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
        RunError: there is none, or nobody may look.
    """
    try:
        return _located(folder)
    except PermissionError as error:
        raise everywhere(f"{error.filename} cannot be read: {error.strerror}") from None


def _located(folder: Path) -> Path:
    if (folder / NOTE).is_file():
        return folder
    try:
        tag = read_text(folder / LATEST).strip()
    except UnicodeDecodeError:
        raise everywhere(f"{folder / LATEST} is no text") from None
    except PermissionError:
        raise
    except OSError as error:
        raise everywhere(f"there is no checkpoint in {folder}: {_why_none(folder, error)}") from None
    if not tag or Path(tag).name != tag:
        raise everywhere(f"{folder / LATEST} names no checkpoint beside it: {tag!r}")
    if not (folder / tag / NOTE).is_file() and (folder / (REPLACED + tag) / NOTE).is_file():
        return folder / (REPLACED + tag)  # a save ended between two renames
    if not (folder / tag / NOTE).is_file():
        others = f"; complete there: {_some(found)}" if (found := _checkpoints_in(folder)) else ""
        raise everywhere(f"{folder / LATEST} names {tag}, but {folder / tag / NOTE} is missing{others}")
    return folder / tag


def _why_none(folder: Path, error: OSError) -> str:
    """Why neither a note nor `latest` can be read in a folder, and what to name in its place."""
    if folder.is_file():
        near = [one for one in (folder.parent, folder.parent / "checkpoints") if _holds(one)]
        return "this is a file: name the folder of a checkpoint" + (f", such as {near[0]}" if near else "")
    if not folder.is_dir() or (folder / LATEST).exists():
        return "there is no such folder" if not folder.exists() else f"{folder / LATEST}: {error.strerror}"
    if _holds(folder / "checkpoints"):
        return f"name {folder / 'checkpoints'}"
    if found := _checkpoints_in(folder):
        return f"it lacks the file {LATEST}, which names the last one: name a checkpoint in it ({_some(found)})"
    return f"it holds neither {NOTE}, which each checkpoint has, nor {LATEST}, which names the last one of a run"


def _checkpoints_in(folder: Path) -> list[str]:
    return sorted(one.parent.name for one in folder.glob(f"*/{NOTE}"))


def _holds(folder: Path) -> bool:
    return (folder / NOTE).is_file() or (folder / LATEST).is_file()


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint itself, in which no other file may lie."""
    with contextlib.suppress(PermissionError):
        return (folder / NOTE).is_file() and (folder / weights_file(0)).is_file()
    return False


def refuse_inside(output: Path) -> None:
    """Keeps what is written out of checkpoints, which a further file makes unusable.

    Raises:
        RunError: the folder to write is a checkpoint, or lies in one.
    """
    real = Path(os.path.realpath(output))
    if (found := next(filter(is_checkpoint, (real, *real.parents)), None)) is not None:
        where = "is" if found == real else f"lies in {found}, which is"
        raise everywhere(f"{output} {where} a checkpoint, and a further file makes it unusable: name another folder")


def read_note(folder: Path) -> Note:
    """The note of a checkpoint, or of the last one in a folder of them.

    Raises:
        RunError: there is none, or it is damaged.
    """
    place = locate(folder)
    try:
        return _note(place, Reader(json.loads(read_text(place / NOTE, MAX_INDEX_BYTES))))
    except OSError as error:
        raise everywhere(f"{place / NOTE} cannot be read: {error.strerror}") from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        message = f"the note of the checkpoint in {place} is damaged: {NOTE}: {error}"
        raise everywhere(message) from None


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
    if wrong := list(_differences(plan, names)):
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
    # A checkpoint of a run has all files of random states, a converted or an imported one has none.
    tensors, random = tensor_files(plan), {random_file(rank) for rank in range(plan.world_size)}
    required = tensors | random if random.intersection(names) else tensors
    if missing := sorted(required.difference(names)):
        yield f"it does not list {_some(missing)}, which the plan requires"
    if strange := sorted(set(names) - required):
        yield f"it lists {_some(strange)}, which the plan does not require"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


SCRIPT = "zero_to_fp32.py"

_SCRIPT = '''"""DeepSpeed's own zero_to_fp32.py, where each file of weights holds the whole model."""
import argparse
import json
import pathlib
import runpy
import sys

parser = argparse.ArgumentParser(add_help=False)
parser.add_argument("folder", nargs="?", type=pathlib.Path, default=pathlib.Path())
parser.add_argument("output", nargs="?")
parser.add_argument("-t", "--tag")
parser.add_argument("--max_shard_size")
given = parser.parse_known_args()[0]
latest = given.folder / "latest"
tag = given.tag or (latest.read_text().strip() if latest.is_file() else ".")
note = given.folder.resolve() / tag / "parcompile.json"
if note.is_file():
    plan = json.loads(note.read_text())["plan"]
    of_ranks = [one["name"] for one in plan["tensors"] if one["shape"] != one["local_shape"]]
    if of_ranks or plan["parallelism"]["pp"] > 1 or plan["zero"]["stage"] in (0, 3):
        one = note.parent
        sys.exit(f"DeepSpeed cannot read the weights of {one.name}: run parcompile checkpoint export {one} --hf OUTPUT")
runpy.run_module("deepspeed.utils.zero_to_fp32", run_name="__main__", alter_sys=True)
'''


def universal_checkpoint_info(plan: Plan, *, adapters: bool) -> dict[str, Any]:
    """As an entry of a file of weights; nothing where DeepSpeed's converter has no words for the layout.

    That is so with pipeline stages, which the converter does not join, with experts that are dealt over ep, which are
    not those of DeepSpeed's own layers, and with LoRA adapters, which the plan does not describe. A vocabulary is cut
    to its size, where it is a matrix.
    """
    from deepspeed.checkpoint import constants
    from deepspeed.checkpoint.affine import AFFINE_MAP_FORMAT_VERSION

    parallelism = plan.spec.parallelism
    if adapters or parallelism.pp > 1 or parallelism.ep > 1:
        return {}
    rows, maps, padded = plan.tensors(), {}, []
    for name, parameter in plan.parameters.expanded():
        layout, pattern = rows[parameter][1], f"^{re.escape(name)}$"
        maps[pattern] = _affine_map(layout, parallelism.tp)
        if layout.full_shape != tuple(parameter.shape) and len(layout.full_shape) == 2:
            padded.append(pattern)
    return {
        constants.UNIVERSAL_CHECKPOINT_INFO: {
            constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
            constants.AFFINE_MAP: {
                constants.AFFINE_MAP_VERSION: AFFINE_MAP_FORMAT_VERSION,
                constants.AFFINE_MAP_PARAMS: maps,
            },
            constants.VOCABULARY_PARAMETER_PATTERNS: padded,
            constants.ORIGINAL_VOCAB_SIZE: plan.spec.model.shape.vocab_size,
        }
    }


def leave_script(folder: Path) -> None:
    """Writes the script that stands in for DeepSpeed's.

    Raises:
        OSError: it cannot be written.
    """
    file = folder / SCRIPT
    if not file.is_file() or file.read_bytes() != _SCRIPT.encode():
        write_file(file, _SCRIPT)


def _affine_map(layout: TensorLayout, tp: int) -> dict[str, Any]:
    from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap

    whole, local, dim = layout.full_shape, layout.local_shape, layout.dim or 0
    ranges = layout.ranges or (((0, whole[dim]),),) * tp
    to_whole, to_local = (torch.empty(shape, device="meta").stride() for shape in (whole, local))
    pieces = {}
    for rank, held in enumerate(ranges):
        offsets = accumulate((stop - start for start, stop in held), initial=0)
        pieces[rank] = [
            AffinePiece(
                shape=(*whole[:dim], stop - start, *whole[dim + 1 :]),
                source_offset=start * to_whole[dim],
                source_strides=to_whole,
                dest_offset=offset * to_local[dim],
                dest_strides=to_local,
                locations=[other for other in range(tp) if (start, stop) in ranges[other]],
            )
            for (start, stop), offset in zip(held, offsets, strict=False)
        ]
    found: dict[str, Any] = ParamAffineMap(whole, dict.fromkeys(pieces, local), pieces).to_dict()
    return found
