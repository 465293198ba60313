"""What a run has left, and what is wrong with it: files of any kind, in any state. Unreadable ones are listed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from parcompile.user_files import read_start, shipped

from .logs import OF_RANKS, Fact, Lock, read_gpu_table, read_lock, read_log, read_stack
from .metrics import RUN, read_metrics
from .records import DamagedError, Rank, read_dump, read_records, read_ring

WORDS: Mapping[str, Any] = shipped("parcompile.doctor", "words.json")
"""What kinds of verdicts are called, what to do about a cause, and how ranks say that a connection broke."""
KINDS: Mapping[str, str] = WORDS["kinds"]


def some(ranks: Sequence[int]) -> str:
    """Such as "rank 3", or "ranks 0, 1, 2" with the number of those that are left out."""
    return f"rank{'s' * (len(ranks) > 1)} {_numbers(ranks)}"


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One verdict. What is not known is None or empty."""

    kind: str
    cause: str
    summary: str
    ranks: tuple[int, ...] = ()
    axis: str | None = None
    step: int | None = None
    micro_batch: int | None = None
    layer: int | None = None
    phase: str | None = None
    collective: str | None = None
    evidence: Sequence[str] = ()
    advice: Sequence[str] = ()
    read: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As `schemas/doctor.schema.json` describes it."""
        tree = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {"format": 1, **tree}

    def places(self) -> dict[str, str]:
        """Which rank, and where in its step; what is not known is left out."""
        names = ("axis", "step", "micro_batch", "layer", "phase", "collective", "cause")
        where = {"rank": _numbers(self.ranks), **{name.replace("_", "-"): getattr(self, name) for name in names}}
        return {name: str(value) for name, value in where.items() if value not in (None, "")}

    def text(self) -> str:
        """For a person."""
        lines = [f"{KINDS[self.kind]} · {self.summary}", ""]
        lines += [f"{name:<13} {value}" for name, value in self.places().items()]
        for title, said in (("evidence", self.evidence), ("what to do", self.advice)):
            lines += ["", title, *(f"  - {one}" for one in said)] if said else []
        unread = self.read.get("unreadable", {})
        files = self.read.get("files", 0)
        lines += ["", f"read {files} file{'s' * (files != 1)}: {self.read.get('said', '')}"]
        lines += [f"  not read: {name}: {why}" for name, why in unread.items()]
        return "\n".join(lines)


MOST_FILES = 20_000
MOST_BYTES = 32 * 2**20
"""Of one file. 512 messages have 0.2 MB; of a longer log its beginning is read."""
_KNOWN = (".json", ".jsonl", ".log", ".out", ".err", ".txt", ".csv", ".pickle", ".pkl", ".ring", "")
"""How files that are looked at in folders end; a number, as of Flight Recorder's dumps, is an end too."""
_OF_RANK = re.compile(r"rank[-_]?(\d{1,6})\D*$|/(\d{1,6})/std(?:out|err)\.log$|/(\d{1,6})\.(?:log|out|err)$")
"""The rank in the name of a file of its output, as DeepSpeed, torchrun (a folder for each) and srun write it."""
_OTHER = ("plan.json", "ds_config.json", "process_groups.json", "parcompile.lock", RUN)


@dataclass
class Evidence:
    """All that was read."""

    ranks: dict[int, Rank] = field(default_factory=dict)
    stacks: dict[int, list[str]] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)
    locks: list[Lock] = field(default_factory=list)
    """Of builds of torch's extensions."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    metrics_file: str = ""
    files: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks of the job; 0 where nothing says it."""
        size = max([one.world_size for one in self.ranks.values()] or [0])
        return max(size, *(rank + 1 for rank in self.ranks)) if size else 0

    def note_cut(self, one: Rank, name: str) -> None:
        """Tells of a file that ends too early."""
        if one.is_cut:
            self.unreadable[name] = f"it ends too early: its first {len(one.messages):,} messages were read"


def read_all(paths: Iterable[str | os.PathLike[str]]) -> Evidence:
    """Files, and those of folders."""
    found = Evidence()
    paths = list(paths)
    for path, name in _files(paths):
        if found.files >= MOST_FILES:
            found.unreadable[name] = f"only {MOST_FILES:,} files are read"
            break
        found.files += 1
        try:
            if not _read(path, name, found) and path in map(Path, paths):
                found.unreadable[name] = "it is of no kind that is known"
        except OSError as error:
            found.unreadable[name] = error.strerror or str(error)
        except DamagedError as error:
            found.unreadable[name] = str(error)
    for rank, stack in found.stacks.items():
        one = found.ranks.get(rank)
        if one is not None and not one.stack:
            found.ranks[rank] = replace(one, stack=stack)
    newest = max((one.seconds or 0.0 for one in found.ranks.values()), default=0.0)
    hashes = {one.plan_hash for one in found.ranks.values() if one.seconds == newest}
    for rank in [rank for rank, one in found.ranks.items() if one.plan_hash not in hashes and one.seconds is not None]:
        if not any("do not run the same" in event for event in found.ranks[rank].events):
            found.unreadable[found.ranks.pop(rank).source] = "it is of another plan than the newest records"
    return found


def _files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[tuple[Path, str]]:
    for given in map(Path, paths):
        if not given.is_dir():
            yield given, str(given)
            continue
        for folder, inner, names in os.walk(given):
            inner.sort()
            for name in sorted(names):
                path = Path(folder, name)
                if (path.suffix.lower() in _KNOWN or re.search(r"\d$", name)) and name not in _OTHER:
                    yield path, str(path.relative_to(given))


def _read(path: Path, name: str, found: Evidence) -> bool:
    """Whether it is of a kind that is known."""
    if (lock := read_lock(path)) is not None:
        found.locks.append(lock)
        return True
    content, size = read_start(path, MOST_BYTES)
    if content[:1] == b"\x80" or (content[:1] == b"{" and b'"pg_config"' in content[:4096]):
        one = read_dump(content, name)
        found.ranks.setdefault(one.rank, one)
        found.note_cut(one, name)
        return True
    text = content.decode("utf-8", errors="replace")
    if text.startswith('{"format"'):
        one = read_ring(content, name) if path.suffix == ".ring" else read_records(text, name)
        known = found.ranks.get(one.rank)
        # A process that was killed after its records were written goes on in the other file.
        if known is None or known.seconds is None or _last(one) > _last(known):
            found.ranks[one.rank] = one
            found.note_cut(one, name)
    elif path.suffix == ".jsonl":
        # Texts that the model wrote and training data are lines of JSON as well: they have no figures.
        if rows := [row for row in read_metrics(text)[0] if len(row) > 1]:
            found.metrics, found.metrics_file = rows, name
    elif stack := read_stack(text):
        number = re.search(r"(\d+)\D*$", path.name)
        if number is None:
            raise DamagedError("a stack, whose file's name does not say of which rank: write rank-N.txt")
        found.stacks[int(number[1])] = stack
    elif (
        "\0" in text[:1000]
        or text[:1000].count("\ufffd") > len(text[:1000]) / 10
        or (text.startswith("{") and path.suffix == ".json")
    ):
        return False
    else:
        facts = read_gpu_table(text, name) or read_log(text, name)
        whose = _OF_RANK.search(path.as_posix())
        rank = None if whose is None else int(next(filter(None, whose.groups())))
        found.facts += [replace(one, rank=rank) if one.rank is None and one.kind in OF_RANKS else one for one in facts]
    if size > MOST_BYTES:
        found.unreadable[name] = f"the first {MOST_BYTES:,} of its {size:,} bytes were read"
    return True


def _last(one: Rank) -> float:
    """When it posted its last message."""
    return one.messages[-1].seconds if one.messages else 0.0
