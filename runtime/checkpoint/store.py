"""Save and resume. DeepSpeed writes the tensors; a note beside them says what they belong to and what each file holds.

A checkpoint is complete or not there: it is written under another name, hashed, and renamed; `latest` moves last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from parcompile.plan.resume import ADAPTABLE, file_layout, layout_differences
from parcompile.runtime.errors import RunError
from parcompile.runtime.model.lora import describe_adapters

from .adapting import adapt, group_sizes
from .manifest import LATEST, NOTE, Note, damages, digest_of, locate, read_note, write_atomically
from .random_state import file_of, load_random_state, save_random_state
from .reading import SavedRun
from .trusted import check_trusted

_UNFINISHED = "unfinished-"


def save(engine: Any, folder: str | Path, step: int, *, keep: int | None = None) -> Path:
    """Writes the checkpoint `step-N`: weights, optimizer shards, scheduler, random states, and the step.

    Every rank calls it. A crash at any moment leaves the checkpoint before this one in use.

    Args:
        engine: from `initialize`.
        folder: the folder of all checkpoints of the run, the same for all ranks.
        step: optimizer steps made so far; also the position in the data.
        keep: how many checkpoints remain, this one included; None keeps all.
    """
    mesh, folder = engine.mesh, Path(folder)
    place, unfinished = folder / f"step-{step}", folder / f"{_UNFINISHED}step-{step}"
    if mesh.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(str(folder), tag=unfinished.name, client_state={"step": step}, save_latest=False)
    save_random_state(unfinished, mesh.rank)
    dist.barrier()
    files = _hashes(unfinished, mesh.rank)
    stages = _stages(engine)
    if mesh.rank == 0:
        sizes = [stage.group_sizes for stage in stages]
        note = Note(unfinished, step, mesh.plan, file_layout(mesh.plan), files, _adapters(stages), sizes)
        write_atomically(unfinished / NOTE, json.dumps(note.to_json(), indent=1) + "\n")
        shutil.rmtree(place, ignore_errors=True)
        unfinished.rename(place)
        write_atomically(folder / LATEST, place.name)
        _forget(folder, place, keep)
    dist.barrier()
    return place


class _Stage(NamedTuple):
    """What the ranks of a stage say of their part of the model."""

    group_sizes: list[int]
    adapters: dict[str, Any] | None


def _stages(engine: Any) -> list[_Stage]:
    """All stages, in the order of pp."""
    mine = _Stage(group_sizes(engine.optimizer), describe_adapters(engine.module))
    found: list[Any] = [None] * engine.mesh.size("pp")
    dist.all_gather_object(found, mine, group=engine.mesh.group("pp"))
    return found


def _adapters(stages: Sequence[_Stage]) -> dict[str, Any] | None:
    """Those of the whole model."""
    described = [stage.adapters for stage in stages if stage.adapters is not None]
    if not described:
        return None
    linears = {name: entry for one in described for name, entry in one["linears"].items()}
    return {**described[0], "linears": linears}


def _hashes(folder: Path, rank: int) -> dict[str, tuple[int, str]]:
    """Size and hash of every file; each rank reads its share."""
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    mine = {name: digest_of(folder / name) for name in names[rank :: dist.get_world_size()]}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return {name: entry for found in everyones for name, entry in sorted(found.items())}


def _forget(folder: Path, newest: Path, keep: int | None) -> None:
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if keep is None:
        return
    old = [found for found in folder.glob("step-*") if found != newest and (found / NOTE).is_file()]
    old.sort(key=lambda found: (found / NOTE).stat().st_mtime)
    for found in old[: max(0, len(old) + 1 - max(1, keep))]:
        shutil.rmtree(found, ignore_errors=True)


def load(engine: Any, folder: str | Path) -> int:
    """Restores the last checkpoint in `folder` (or the checkpoint `folder` itself); returns the steps it had made.

    Saved in another layout (tp, cp, dp, pp, padding, precision), it is cut anew. In the same one the run goes on to the
    bit, random numbers included.

    Raises:
        RunError: there is no checkpoint, it is damaged (which file is said), or it is of another model or optimizer
        (which values differ is said). Every rank raises.
    """
    note = read_note(Path(folder))
    different = layout_differences(note.layout, file_layout(engine.mesh.plan))
    fixed = [text for name, text in different.items() if name not in ADAPTABLE]
    if fixed:
        raise RunError(f"the checkpoint in {note.folder} is of another run ({'; '.join(fixed)})", everywhere=True)
    stages = _stages(engine)
    _compare_adapters(note, _adapters(stages))
    _agree_that_it_is_whole(note)
    if different or note.groups not in (None, [stage.group_sizes for stage in stages]):
        adapt(engine, SavedRun(note))
        return note.step
    path, state = engine.load_checkpoint(str(note.folder.parent), tag=note.folder.name)
    if path is None or state.get("step") != note.step:
        raise RunError(f"the checkpoint {note.folder} could not be read by DeepSpeed", everywhere=True)
    if note.plan.world_size == engine.mesh.plan.world_size and file_of(note.folder, engine.mesh.rank).exists():
        load_random_state(note.folder, engine.mesh.rank)
    return note.step


def _compare_adapters(note: Note, ours: Mapping[str, Any] | None) -> None:
    theirs, mine = ({} if one is None else one["linears"] for one in (note.adapters, ours))
    for name in sorted({*theirs, *mine}):
        was, now = theirs.get(name, "none"), mine.get(name, "none")
        if was != now:
            raise RunError(
                f"the checkpoint in {note.folder} has other adapters than the model: {name} had {was}, has {now}",
                everywhere=True,
            )


def _agree_that_it_is_whole(note: Note) -> None:
    """Each rank reads its share of the files; what one finds wrong, every rank raises."""
    mine = sorted(note.files)[dist.get_rank() :: dist.get_world_size()]
    wrong = damages(note, mine)
    if not wrong:
        try:
            for name in mine:
                if name.endswith(".pt"):
                    check_trusted(note.folder / name)
        except RunError as error:
            wrong = [str(error)]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, wrong)
    found = [sentence for sentences in everyones for sentence in sentences]
    if found:
        raise RunError(f"the checkpoint cannot be resumed: {'; '.join(found[:3])}", everywhere=True)


__all__ = ["load", "locate", "save"]
