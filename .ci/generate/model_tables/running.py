"""Studies many types, several at a time, and keeps each finished one so that an interrupted run goes on."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from collecting import LeftOutError
from study import study

import parcompile.model.tables

Entry: TypeAlias = "dict[str, Any] | str"
"""A table as it is stored, or why a type has none."""


@dataclass(frozen=True)
class Result:
    """What became of one type."""

    name: str
    entry: Entry
    said: str
    seconds: float


def run(names: Sequence[str], seconds: int, jobs: int, part: Path) -> dict[str, Entry]:
    """The entries of the types; `part` holds those that are done while others are not, and is removed behind them.

    A part is of no use where the generator, transformers or the longest time of a type is another one: it starts anew.
    """
    start, total = time.monotonic(), len(names)
    found = {name: entry for name, entry in _kept(part, seconds).items() if name in names}
    before = len(found)
    if before:
        print(f"{before} of {total} types were done before", flush=True)
    for one in _studied([name for name in names if name not in found], seconds, jobs):
        found[one.name] = one.entry
        with part.open("a", encoding="utf-8") as file:
            file.write(json.dumps([one.name, one.entry]) + "\n")
        gone, left = time.monotonic() - start, total - len(found)
        rest = gone / (len(found) - before) * left
        print(
            f"[{len(found):3} of {total}] {one.name}: {one.said}, {one.seconds:.1f} s"
            f" ({gone / 60:.0f} min so far, about {rest / 60:.0f} min left)",
            flush=True,
        )
    part.unlink(missing_ok=True)
    return found


def _kept(part: Path, seconds: int) -> dict[str, Entry]:
    """What an interrupted run of the same generator left; the file begins anew where it is of another one."""
    lines = part.read_text(encoding="utf-8").splitlines() if part.exists() else []
    mark = _mark(seconds)
    if lines[:1] != [mark]:
        part.write_text(mark + "\n", encoding="utf-8")
        return {}
    found: dict[str, Entry] = {}
    for line in lines[1:]:
        try:
            name, entry = json.loads(line)
        except ValueError:  # the last line, where it was cut off
            break
        found[name] = entry
    part.write_text("".join(line + "\n" for line in [mark, *map(json.dumps, found.items())]), encoding="utf-8")
    return found


def _mark(seconds: int) -> str:
    """What entries depend on: the code that finds them, the code that reads them, and the versions of libraries."""
    rooms = (Path(__file__).parent, Path(parcompile.model.tables.__file__).parent)
    code = [file.read_bytes() for room in rooms for file in sorted(room.glob("*.py"))]
    digest = hashlib.sha256(b"\0".join(code)).hexdigest()
    return f"transformers {transformers.__version__}, torch {torch.__version__}, {seconds} s, {digest}"


def _studied(names: Sequence[str], seconds: int, jobs: int) -> Iterator[Result]:
    """What becomes of each type, as soon as it is known."""
    if jobs <= 1 or len(names) <= 1:
        for name in names:
            yield _one(name, seconds)
        return
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(names)), mp_context=processes) as pool:
        waiting = [pool.submit(_one, name, seconds) for name in names]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _one(name: str, seconds: int) -> Result:
    start = time.monotonic()
    try:
        found = study(name, seconds)
    except LeftOutError as error:
        return Result(name, str(error), f"left out: {error}", time.monotonic() - start)
    said = f"exact, {len(found.stored['rows'])} rows, {found.builds} models built, {found.rounds} rounds"
    return Result(name, found.stored, said, time.monotonic() - start)
