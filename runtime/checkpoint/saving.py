"""From an engine's state to a checkpoint in place, at once or while training goes on.

Each rank serialises its part to the disk, or to host memory; then all files are brought to the disk and hashed, rank 0
compares their list with the plan's, writes the note, and puts the folder in place. Nothing after the first step needs
the engine: with `wait=False` a thread of each rank does it, which speaks to the others through the launcher's store.
What goes wrong on one rank goes wrong on all of them.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parcompile.runtime.deepspeed_patches.engine import use_checkpoint_engine
from parcompile.runtime.deepspeed_patches.optimizer_state import held
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.liveness.monitor import say

from . import writing
from .agreement import StoreMessages, await_seen, on_all_ranks, on_rank_0
from .manifest import Note, check_listed, damages, locate, refuse_inside, universal_checkpoint_info
from .placing import begin, forget, hold, holds, is_noted_there, put_in_place, unfinished
from .state_file import random_file, random_state

_SLOWEST_WRITE = 3600.0
"""Seconds that the writer of one rank waits for that of another: disks differ."""
_Agreed = Callable[[Callable[[], Any]], Any]
"""`on_all_ranks` or `on_rank_0`, by collectives or by messages through the store."""


class Saver:
    """The saves of one engine, one after the other."""

    def __init__(self) -> None:
        self._memories: dict[str, bytearray] = {}
        self._agreement: StoreMessages | None = None
        """None after an error, too: ranks may have left theirs at different places."""
        self._looks = False
        self._thread: threading.Thread | None = None
        self._place = Path()
        self._error: RunError | None = None
        self._warns = False

    def save(self, engine: Any, note: Note, *, keep: int | None, wait: bool, on_error: str) -> bool:
        """Saves, or begins to; see `store.save`. False: it went wrong, and was said to be a warning.

        Args:
            engine: whose state is saved.
            note: of the checkpoint, without its files; its folder is where the checkpoint will be.
            keep: how many checkpoints remain.
            wait: for the end.
            on_error: raise, or warn.

        Raises:
            RunError: see `store.save`.
        """
        if on_error not in ("raise", "warn"):
            raise everywhere(f"on_error is raise or warn, not {on_error!r}")
        self.finish()
        self._place, self._warns = note.folder, on_error == "warn"
        try:
            on_all_ranks(lambda: _refuse_lost_weights(engine.module))
            writer = self._take(engine, note, in_memory=not wait)
            if wait:
                _complete(writer, note, keep, on_all_ranks, on_rank_0)
                return True
        except RunError as error:
            return self._failed(error)
        if not self._looks:
            _after_each_step(engine, self)
        self._looks, self._agreement = True, self._agreement or StoreMessages.of_world(_SLOWEST_WRITE)
        arguments = writer, note, keep, self._agreement.on_all_ranks, self._agreement.on_rank_0
        self._thread = threading.Thread(target=self._run, args=arguments, name=f"writes {note.folder.name}")
        self._thread.start()
        return True

    def finish(self) -> None:
        """Waits for the save under way, if there is one.

        Raises:
            RunError: it went wrong, and is not to be a warning. Every rank raises.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        try:
            on_all_ranks(self._outcome)
        except RunError as error:
            self._agreement = None
            self._failed(error)

    def after_step(self, device: torch.device) -> None:
        """Ends the save under way when all ranks have written; the same step on every rank.

        Raises:
            RunError: as `finish`.
        """
        if self._thread is None:
            return
        written = torch.tensor([0 if self._thread.is_alive() else 1], device=device)
        dist.all_reduce(written, dist.ReduceOp.MIN)
        if written.item():
            self.finish()

    def _take(self, engine: Any, note: Note, *, in_memory: bool) -> Any:
        """Takes the engine's state as it is now."""
        from . import deepspeed_engine
        from .deepspeed_engine import Writer

        folder = unfinished(note.folder)
        on_rank_0(lambda: _open(note.folder))
        on_all_ranks(lambda: await_seen(folder))
        writer = Writer(folder, self._memories if in_memory else None)
        state = {"step": note.step, **universal_checkpoint_info(note.plan, adapters=note.adapters is not None)}
        if note.plan.spec.shards_weights:
            for file, weights in deepspeed_engine.gathered_weights(engine, state).items():
                writer.save(weights, file)
        else:
            with use_checkpoint_engine(engine, writer):
                engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state=state, save_latest=False)
            if (experts := writing.experts_to_write(engine.mesh)) is not None:
                writer.save(writing.content_of_experts(engine.module), experts)
        if (states := deepspeed_engine.file_to_write(engine.mesh)) is not None:
            writer.save(deepspeed_engine.content(engine), states)
        writer.save(random_state(), random_file(engine.mesh.rank))
        return writer

    def _run(self, *arguments: Any) -> None:
        """In a thread of its own."""
        try:
            _complete(*arguments)
        except RunError as error:
            self._error = error
        except Exception as error:  # no one else would hear of it
            self._error = RunError(f"{type(error).__name__}: {error}")

    def _give_up(self) -> str:
        """Frees the disk of what was written, unless it is another job's; says what remains."""
        if holds(self._place.parent):
            shutil.rmtree(unfinished(self._place), ignore_errors=True)
        try:
            return f"the last checkpoint is {locate(self._place.parent).name}"
        except RunError:
            return "there is no checkpoint before it"

    def _outcome(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _failed(self, error: RunError) -> bool:
        message = f"{self._place} was not saved: {error}; {on_rank_0(self._give_up)}"
        if not self._warns:
            raise everywhere(message) from None
        if dist.get_rank() == 0:
            say(f"warning: {message}")
        return False


_savers: weakref.WeakKeyDictionary[Any, Saver] = weakref.WeakKeyDictionary()


def saver_of(engine: Any) -> Saver:
    """The one saver of an engine."""
    return _savers.setdefault(engine, Saver())


def _after_each_step(engine: Any, saver: Saver) -> None:
    step, device = engine.step, engine.mesh.device

    def step_and_look(*args: Any, **options: Any) -> Any:
        result = step(*args, **options)
        saver.after_step(device)
        return result

    engine.step = step_and_look


def _refuse_lost_weights(model: torch.nn.Module) -> None:
    """The checkpoint before stays the last one. One wait for the device, for all weights of this rank together.

    Raises:
        RunError: a weight is infinite or no number.
    """
    named = [(name, held(one)) for name, one in model.named_parameters() if one.is_floating_point()]
    if not named:
        return
    finite = torch.stack([torch.isfinite(one).all() for _, one in named])
    if not finite.all():
        lost = [name for (name, _), good in zip(named, finite.tolist(), strict=True) if not good]
        more = f" and {len(lost) - 1} more parameters" if len(lost) > 1 else ""
        raise RunError(f"{lost[0]}{more} are not finite numbers")


def _open(place: Path) -> None:
    refuse_inside(place.parent)
    place.parent.mkdir(parents=True, exist_ok=True)
    hold(place.parent)
    begin(place)


def _complete(writer: Any, note: Note, keep: int | None, on_all: _Agreed, on_first: _Agreed) -> None:
    """Brings the files of all ranks to the disk, and makes them a checkpoint.

    Raises:
        RunError: some rank could not. Every rank raises.
    """
    mine: dict[str, tuple[int, str]] = {}

    def finish() -> list[tuple[str, int, str]]:
        mine.update(writer.finish())
        return [(name, size, digest) for name, (size, digest) in mine.items()]

    by_rank = on_all(finish)
    own = replace(note, files=mine)
    note = replace(note, files={name: (size, digest) for name, size, digest in sorted(itertools.chain(*by_rank))})
    # Whether this very checkpoint is in place: each rank compares the files that it would replace.
    same = on_first(lambda: is_noted_there(note))
    same = same and not any(on_all(lambda: bool(damages(own, sorted(mine)))))
    on_first(lambda: _commit(note, keep, same=same))


def _commit(note: Note, keep: int | None, *, same: bool) -> None:
    if not holds(note.folder.parent):
        raise RunError(f"another job has taken {note.folder.parent} while this one stood still")
    check_listed(note.plan, note.files)
    await_seen(unfinished(note.folder), {name: size for name, (size, _) in note.files.items()})
    put_in_place(note, same=same)
    forget(note.folder, keep)
