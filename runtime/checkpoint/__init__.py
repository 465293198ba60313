"""Saves and resumes runs, whatever the layout, and hands their weights to Hugging Face.

`save` and `load` are for training scripts; `read_note`, `verify`, `SavedRun` and `export` need no process group.

DeepSpeed writes the tensors; a note beside them says what they belong to and what each file holds.

A checkpoint is complete or not there: it is written under another name, hashed, and renamed; `latest` moves last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from parcompile.layout.groups import Axis
from parcompile.plan import digest
from parcompile.plan.diff import ADAPTABLE, file_layout, layout_differences
from parcompile.plan.holding import further_ep_ranks
from parcompile.runtime.deepspeed_patches.engine import use_checkpoint_engine
from parcompile.runtime.errors import everywhere
from parcompile.runtime.liveness import doing, share_errors
from parcompile.runtime.liveness.monitor import say
from parcompile.runtime.model.lora import describe_adapters
from parcompile.runtime.transport.backend import gather_objects

from .adapting import adapt, group_sizes
from .agreement import on_all_ranks
from .exporting import export, export_adapter
from .manifest import Note, damages, read_note, strange_contents
from .reading import SavedRun, refuse_damaged, unreadable, verify, wrong_files
from .saving import saver_of
from .state_file import experts_file, load_random_state, random_file, weights_file
from .whole_tensors import joined_adapters


def save(
    engine: Any,
    folder: str | Path,
    step: int,
    *,
    keep: int | None = None,
    wait: bool = True,
    on_error: Literal["raise", "warn"] = "raise",
) -> Path | None:
    """Writes the checkpoint `step-N`: weights, optimizer shards, scheduler, random states, and the step.

    Every rank calls it. A crash at any moment leaves the checkpoint before this one in use. A checkpoint of this step
    that is there already is left alone when it is the same, and replaced when it is not.

    Args:
        engine: from `initialize`.
        folder: the folder of all checkpoints of the run, the same for all ranks. One job at a time saves there.
        step: optimizer steps made so far; also the position in the data.
        keep: how many checkpoints remain, this one included; None keeps all.
        wait: return when the checkpoint is in place. False: return when host memory holds what is to be saved, which
            stays reserved for the next save; the rest is done while training goes on. One such save is under way at a
            time: the next `save` waits for it. What goes wrong is raised by the first `engine.step`, `save`, `load` or
            `wait_for_save` after it. Call `wait_for_save` before the process groups end.
        on_error: what to do when the checkpoint cannot be written (the disk is full, the folder is gone): `raise`, or
            `warn` in one line and go on. The checkpoints before it stay in either case.

    Returns:
        Where the checkpoint is, or will be; None when it was not written, and `on_error` is `warn`.

    Raises:
        RunError: it cannot be written, another job saves into the folder, or a weight is not a finite number. Every
            rank raises.
    """
    mesh, place = engine.mesh, Path(folder) / f"step-{step}"
    finite = getattr(engine, "finite_watch", None)
    if finite is not None:
        finite.settle()
    sizes, adapters = _of_stages(engine)
    note = Note(place, step, mesh.plan, file_layout(mesh.plan), {}, adapters, sizes)
    with doing("saving a checkpoint"), share_errors():
        if not saver_of(engine).save(engine, note, keep=keep, wait=wait, on_error=on_error):
            return None
    if finite is not None:
        finite.saved(place, step)
    return place


def _of_stages(engine: Any) -> tuple[list[list[int]], dict[str, Any] | None]:
    """How many parameters the optimizer's groups have, by stage in the order of pp, and the adapters of all stages."""
    mine = group_sizes(engine.optimizer), describe_adapters(engine.module)
    sizes, adapters = zip(*gather_objects(mine, engine.mesh.group("pp")), strict=True)
    return list(sizes), joined_adapters(adapters)


def wait_for_save(engine: Any) -> None:
    """Waits until the checkpoint that `save(…, wait=False)` began is in place. Every rank calls it.

    Raises:
        RunError: it could not be written, and it was not to be a warning. Every rank raises.
    """
    saver_of(engine).finish()


def load(engine: Any, folder: str | Path) -> int:
    """Restores the last checkpoint in `folder` (or the checkpoint `folder` itself); returns the steps it had made.

    Saved in another layout (tp, cp, ep, dp, pp, padding, precision), it is cut anew. In the same one the run goes on to
    the bit, random numbers included. The loader of `initialize` goes on with the next sample, whatever the batch size.

    Raises:
        RunError: there is no checkpoint, it is damaged (which file is said), or it is of another model or optimizer
            (which values differ is said). Every rank raises, also when only one of them sees it.
    """
    wait_for_save(engine)
    note = _note_on_all_ranks(Path(folder))
    different = layout_differences(note.layout, file_layout(engine.mesh.plan))
    if fixed := [text for name, text in different.items() if name not in ADAPTABLE]:
        raise everywhere(f"the checkpoint in {note.folder} is of another run ({'; '.join(fixed)})")
    sizes, adapters = _of_stages(engine)
    _compare_adapters(note, adapters)
    _agree_that_it_is_whole(note)
    schedules = _compare_schedulers(engine, note)
    # An earlier version gave sums in another type to an optimizer of DeepSpeed whose files have another form.
    apart = note.layout.get("gradient accumulation", precision := note.layout.get("precision")) != precision
    if different or apart or note.groups not in (None, sizes):
        adapt(engine, _opened(note))
    else:
        _load_as_it_is(engine, note, schedules=schedules)
    if (set_rates := getattr(engine.lr_scheduler, "set_rates", None)) is not None:
        set_rates()  # a checkpoint that begins with other weights has those of a fresh optimizer
    if (batch := getattr(engine, "parcompile_batch", None)) is not None:
        batch.follow()
    if (loader := getattr(engine, "parcompile_loader", None)) is not None:
        loader.resume(note.step, engine.global_samples)
    return note.step


def _note_on_all_ranks(folder: Path) -> Note:
    """The note, which every rank reads in its own view of the folder."""
    found: list[Note] = []

    def look() -> tuple[str, int, str, str]:
        found.append(read_note(folder))
        note = found[-1]
        return note.folder.name, note.step, note.plan.plan_hash, digest(sorted(note.files.items()))

    views = on_all_ranks(look)
    for rank, view in enumerate(views):
        if view != views[0]:
            difference = f"{views[0][0]} on rank 0 and another {view[0]} on rank {rank}"
            raise everywhere(f"{folder} holds {difference}")
    return found[0]


def _load_as_it_is(engine: Any, note: Note, *, schedules: bool) -> None:
    """A checkpoint of the same layout."""
    from .deepspeed_engine import Reader, deepspeed_writes

    mesh = engine.mesh
    if deepspeed_writes(mesh.plan):
        experts = {}
        ep_rank = None if mesh.parallel_group(Axis.EP) is None else mesh.index(Axis.EP)
        if ep_rank in further_ep_ranks(note.plan, mesh.index(Axis.TP)):  # those of others are in the file of weights
            place = mesh.index("tp-pp")
            experts[weights_file(place)] = experts_file(ep_rank, place)
        with use_checkpoint_engine(engine, Reader(note, experts)):
            path, state = engine.load_checkpoint(
                str(note.folder.parent), tag=note.folder.name, load_lr_scheduler_states=schedules
            )
        if path is None or state.get("step") != note.step:
            raise everywhere(f"the checkpoint {note.folder} could not be read by DeepSpeed")
    else:
        adapt(engine, _opened(note))
    rank = engine.mesh.rank
    if note.plan.world_size == engine.mesh.plan.world_size and random_file(rank) in note.files:
        on_all_ranks(lambda: load_random_state(note.folder, rank))


def _opened(note: Note) -> SavedRun:
    """The checkpoint, when every rank finds all of it in the files."""
    saved = SavedRun(note)
    on_all_ranks(lambda: refuse_damaged(note, unreadable(saved)))
    return saved


def _compare_schedulers(engine: Any, note: Note) -> bool:
    """Whether the checkpoint has the state of an LR scheduler. Where the run differs in that, rank 0 warns."""
    was, now = SavedRun(note).counters.get("lr_scheduler") is not None, engine.lr_scheduler is not None
    if was != now and dist.get_rank() == 0:
        lost = "has the state of an LR scheduler, and this run has none: no scheduler changes the learning rates"
        begun = "has no state of an LR scheduler: that of this run begins at its first step"
        say(f"warning: {note.folder} {lost if was else begun}")
    return was


def _compare_adapters(note: Note, ours: Mapping[str, Any] | None) -> None:
    theirs, mine = ({} if one is None else one["linears"] for one in (note.adapters, ours))
    for name in sorted({*theirs, *mine}):
        was, now = theirs.get(name, "none"), mine.get(name, "none")
        if was != now:
            raise everywhere(
                f"the checkpoint in {note.folder} has other adapters than the model: {name} had {was}, has {now}"
            )


def _agree_that_it_is_whole(note: Note) -> None:
    """Every rank compares the names, and reads its share of the files; what one finds wrong, all raise."""
    names = sorted(note.files)

    def compare() -> None:
        refuse_damaged(note, strange_contents(note))
        seen = {one.name for one in note.folder.iterdir()}
        refuse_damaged(note, damages(note, [name for name in names if name not in seen], hashes=False))

    on_all_ranks(compare)
    mine = names[dist.get_rank() :: dist.get_world_size()]
    on_all_ranks(lambda: refuse_damaged(note, wrong_files(note, mine)))


__all__ = ["Note", "SavedRun", "export", "export_adapter", "load", "read_note", "save", "verify", "wait_for_save"]
