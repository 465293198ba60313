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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fuzzing.kinds import Base, Kind
from fuzzing.mutations import mutant

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

    kind: str
    seed: int
    words: tuple[str, ...]
    what: str
    place: str
    message: str
    kept: str = ""

    def to_json(self) -> dict[str, Any]:
        """As a worker prints it."""
        return asdict(self)


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

    def chosen(self, seed: int) -> tuple[Kind, Base, Sequence[str], bytes]:
        """What a seed stands for: a kind, a file of it, the command and the damaged file."""
        chance = random.Random(seed)
        kind = chance.choices(self.kinds, [one.weight for one in self.kinds])[0]
        base = chance.choice(kind.bases)
        donors = [one.tree for one in chance.sample(list(kind.bases), min(3, len(kind.bases))) if one.tree is not None]
        content = mutant(base.text, base.form, base.tree, donors, chance)
        if kind.sealed is not None and chance.random() < 0.7:
            content = _sealed(content, kind.sealed)
        return kind, base, chance.choice(kind.commands), content

    def _warm(self, kind: Kind, own: Path) -> None:
        """Runs the commands on a good file: what they import first and keep is not the growth of a mutant."""
        base = kind.bases[0]
        file = kind.path(self.folder, base)
        file.parent.mkdir(parents=True, exist_ok=True)
        for words in kind.commands:
            file.write_text(base.text, encoding="utf-8")
            # An import that is cut off would leave half a module behind.
            line = [word.replace("@", str(file)).replace("%", str(own)) for word in words]
            _measured(line, contextlib.nullcontext())
        _remove_outputs(own)

    def run(self, seed: int, keep: Path | None = None) -> tuple[Kind, End]:
        """Runs the mutant of a seed; a file that fails is kept in the folder `keep`."""
        kind, base, words, content = self.chosen(seed)
        own = self.folder / kind.name
        if kind.name not in self._ready:
            own.mkdir(parents=True, exist_ok=True)
            if kind.beside is not None:
                shutil.copytree(kind.beside, own, dirs_exist_ok=True)
            self._warm(kind, own)
            self._ready.add(kind.name)
        file = kind.path(self.folder, base)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        line = tuple(word.replace("@", str(file)).replace("%", str(own)) for word in words)
        code, seconds, growth, wrong = _measured(line)
        _remove_outputs(own)
        if wrong is None:
            return kind, End(code, seconds, growth, None)
        kept = ""
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            name = keep / f"{seed}-{file.name}"
            name.write_bytes(content)
            kept = str(name)
        what, place, message = wrong
        return kind, End(code, seconds, growth, Failure(kind.name, seed, tuple(words), what, place, message, kept))


def _sealed(content: bytes, seal: Callable[[dict[str, Any]], object]) -> bytes:
    with contextlib.suppress(ValueError, RecursionError):
        tree = json.loads(content)
        if isinstance(tree, dict):
            seal(tree)
            return json.dumps(tree).encode()
    return content


def _remove_outputs(folder: Path) -> None:
    for made in ("out", "new"):
        shutil.rmtree(folder / made, ignore_errors=True)


def _measured(
    line: Sequence[str], limits: contextlib.AbstractContextManager[None] | None = None
) -> tuple[int, float, int, tuple[str, str, str] | None]:
    """One call of the command line: exit code, seconds, growth, and what is wrong: what, where and its message."""
    from parcompile.cli import run

    arguments, out, err = sys.argv, io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    sys.argv = ["parcompile", *line]
    code, wrong = 0, None
    before = _reset_peak()
    began = time.process_time()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limits or _limited():
            code = run()
        if code not in (0, 1, 2):
            wrong = (f"exit code {code}", "", "")
    except TooLong as error:
        wrong = ("too long", _place(error), f"{time.process_time() - began:.1f} s of processor time")
    except BaseException as error:
        wrong = (type(error).__name__, _place(error), _said(error))
    finally:
        sys.argv = arguments
    seconds, growth = time.process_time() - began, _peak() - before
    with contextlib.suppress(ValueError):
        err.flush()
        if wrong is None and b"Traceback (most recent call last)" in err.buffer.getvalue():  # type: ignore[attr-defined]
            wrong = ("Traceback", "standard error", "")
    if wrong is None and growth > GROWTH_BYTES:
        wrong = ("memory", " ".join(line[:2]), f"{growth / 2**20:.0f} MB")
    return code, seconds, growth, wrong


def _said(error: BaseException) -> str:
    try:
        return str(error)[:200]
    except Exception as again:
        return f"str() of it raises {type(again).__name__}"


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(_signal: int, _frame: object) -> None:
        raise TooLong

    previous = [signal.signal(one, stop) for one in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for one, handler in zip((signal.SIGPROF, signal.SIGALRM), previous, strict=True):
            signal.signal(one, handler)


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
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as stream:  # noqa: PTH123
        stream.write("5")
    return _peak()


def _peak() -> int:
    try:
        with open("/proc/self/status") as stream:  # noqa: PTH123
            for line in stream:
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def bound_memory() -> None:
    """Bounds the address space of this process."""
    with open("/proc/self/statm") as stream:  # noqa: PTH123
        now = int(stream.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + _ROOM_BYTES, now + _ROOM_BYTES))
