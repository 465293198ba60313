"""One damaged file through one command, in this process: how it ends, what it takes, and where it fails."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fuzzing.kinds import Base, Kind
from fuzzing.mutations import mutant
from harness import forget_peak, resident_bytes

Limits = contextlib.AbstractContextManager[None]

SECONDS = 10
"""Of processor time."""
WAIT_SECONDS = 300
"""Of any time: who waits for something ends too, and a machine with other work to do is no failure."""
GROWTH_BYTES = 300 * 2**20
_ROOM_BYTES = 2 * 2**30
"""Address space above what the process has at its start: a safeguard for the machine."""


class TooLong(BaseException):
    """A command did not end in time."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A mutant that was not read or refused as it should be. `place` is the innermost line of the project."""

    what: str
    place: str = ""
    message: str = ""
    kind: str = ""
    seed: int = 0
    words: tuple[str, ...] = ()
    kept: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """How a mutant ended: its exit code, its seconds of processor time, the growth of memory, and what is wrong."""

    code: int
    seconds: float
    growth_bytes: int
    failure: Failure | None


class Attack:
    """Files of some kinds in a folder, damaged one after the other."""

    def __init__(self, folder: Path, kinds: Sequence[Kind]) -> None:
        self.folder, self.kinds = folder, kinds
        self._ready: set[str] = set()

    def chosen(self, seed: int) -> tuple[Kind, Base, tuple[str, ...], bytes]:
        """What a seed stands for: a kind, a file of it, the command and the damaged file."""
        chance = random.Random(seed)
        kind = chance.choices(self.kinds, [one.weight for one in self.kinds])[0]
        base = chance.choice(kind.bases)
        donors = [one.tree for one in chance.sample(list(kind.bases), min(3, len(kind.bases))) if one.tree is not None]
        content = mutant(base.text, base.form, base.tree, donors, chance)
        if kind.sealed is not None and chance.random() < 0.7:
            with contextlib.suppress(ValueError, RecursionError):
                tree = json.loads(content)
                if isinstance(tree, dict):
                    kind.sealed(tree)
                    content = json.dumps(tree).encode()
        return kind, base, chance.choice(kind.commands), content

    def run(self, seed: int, keep: Path | None = None) -> tuple[Kind, End]:
        """Runs the mutant of a seed; a file that fails is kept in the folder `keep`."""
        kind, base, words, content = self.chosen(seed)
        if kind.name not in self._ready:
            if kind.beside is not None:
                shutil.copytree(kind.beside, self.folder / kind.name, dirs_exist_ok=True)
            good = kind.bases[0]
            for command in kind.commands:  # what they import first and keep is not the growth of a mutant
                self._one(kind, good, command, good.text.encode(), contextlib.nullcontext())
            self._ready.add(kind.name)
        end = self._one(kind, base, words, content, _limited())
        if end.failure is None:
            return kind, end
        kept = ""
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            name = keep / f"{seed}-{kind.path(self.folder, base).name}"
            name.write_bytes(content)
            kept = str(name)
        return kind, replace(end, failure=replace(end.failure, kind=kind.name, seed=seed, words=words, kept=kept))

    def _one(self, kind: Kind, base: Base, words: tuple[str, ...], content: bytes, limits: Limits) -> End:
        file = kind.path(self.folder, base)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        end = _measured(kind.line(self.folder, base, words), limits)
        for made in ("out", "new"):
            shutil.rmtree(self.folder / kind.name / made, ignore_errors=True)
        return end


def _measured(line: Sequence[str], limits: Limits) -> End:
    """One call of the command line. An import that is cut off by limits would leave half a module behind."""
    from parcompile.cli import run

    arguments, out, err = sys.argv, io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    sys.argv = ["parcompile", *line]
    code, wrong = 0, None
    before = _reset_peak()
    began = time.process_time()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limits:
            code = run()
        if code not in (0, 1, 2):
            wrong = Failure(f"exit code {code}")
    except TooLong as error:
        wrong = Failure("too long", _place(error), f"{time.process_time() - began:.1f} s of processor time")
    except BaseException as error:
        wrong = Failure(type(error).__name__, _place(error), _said(error))
    finally:
        sys.argv = arguments
    seconds, growth = time.process_time() - began, resident_bytes(peak=True) - before
    with contextlib.suppress(ValueError):
        err.flush()
        if wrong is None and b"Traceback (most recent call last)" in err.buffer.getvalue():  # type: ignore[attr-defined]
            wrong = Failure("Traceback", "standard error")
    if wrong is None and growth > GROWTH_BYTES:
        wrong = Failure("memory", " ".join(line[:2]), f"{growth / 2**20:.0f} MB")
    return End(code, seconds, growth, wrong)


def _said(error: BaseException) -> str:
    try:
        return str(error)[:200]
    except Exception as again:
        return f"str() of it raises {type(again).__name__}"


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(_signal: int, _frame: object) -> None:
        raise TooLong

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, WAIT_SECONDS)}
    previous = {one: signal.signal(one, stop) for one in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for one, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(one, previous[one])


def _place(error: BaseException) -> str:
    """File, line and function of the innermost frame of the project."""
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        name = frame.filename
        if "/parcompile/" in name or "/compiler/" in name or "/runtime/" in name:
            found = f"{name.rpartition('parcompile/')[2]}:{frame.lineno} {frame.name}"
    return found


def _reset_peak() -> int:
    """The resident bytes of this process, whose peak begins anew here."""
    forget_peak()
    return resident_bytes(peak=True)


def bound_memory() -> None:
    """Bounds the address space of this process."""
    now = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + _ROOM_BYTES, now + _ROOM_BYTES))
