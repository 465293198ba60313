"""What a run has left, and what is wrong with it: files of any kind, in any state. Unreadable ones are listed.

The output of ranks, launchers, schedulers and tools is read line by line.

`torch.utils.cpp_extension` makes an empty file `lock` in the folder of a build, and keeps it open until it removes it.
Every other process that needs the extension waits until the file is gone: for ever, where nobody will remove it.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from parcompile.units import MIB, first_of
from parcompile.user_files import read_start, shipped

from .metrics import RUN, read_metrics
from .records import DamagedError, Rank, read_dump, read_records, read_ring

WORDS: Mapping[str, Any] = shipped("parcompile.doctor", "words.json")
"""What kinds of verdicts are called, what to do about a cause, how ranks say that a connection broke, and what `lines`
say of which kind: regular expressions, tried in this order."""
KINDS: Mapping[str, str] = WORDS["kinds"]
_NAMED = 8
"""So many ranks are named."""


def some(ranks: Sequence[int]) -> str:
    """Such as "rank 3", or "ranks 0, 1, 2" with the number of those that are left out."""
    return f"rank{'s' * (len(ranks) > 1)} {first_of(ranks, _NAMED)}"


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
        where = {
            "rank": first_of(self.ranks, _NAMED),
            **{name.replace("_", "-"): getattr(self, name) for name in names},
        }
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


WAITING = "file_baton.py"
"""The file of torch whose frame is the last of a process that waits for a build."""
YOUNG_SECONDS = 60.0
"""A lock that is younger may belong to a build on another host of a shared file system."""


@dataclass(frozen=True, slots=True)
class Lock:
    """The lock of a build. `builder` is the process of this host that has it open; None where none is seen."""

    path: str
    age_seconds: float
    builder: int | None

    @property
    def is_left(self) -> bool:
        """Whether nobody is going to remove it."""
        return self.builder is None and self.age_seconds > YOUNG_SECONDS

    def __str__(self) -> str:
        who = f"process {self.builder} has" if self.builder else "no process of this host that can be seen has"
        return f"{self.path}: {self.age_seconds / 60:,.0f} minutes old, {who} it open"


def read_lock(path: Path) -> Lock | None:
    """The lock in a folder of a build; None: the file is another one."""
    if path.name != "lock" or not ("torch_extensions" in path.parts or (path.parent / "build.ninja").is_file()):
        return None
    there = path.stat()
    return Lock(str(path), max(time.time() - there.st_mtime, 0.0), _builder(there))


def locks_below(roots: Iterable[Path]) -> list[Lock]:
    """Those of the builds in torch's folders of extensions; no roots: the folders that torch takes by itself."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folders = list(roots) or [Path(named) if named else Path(cache, "torch_extensions")]
    files = {file for folder in folders for pattern in ("*/lock", "*/*/lock") for file in folder.glob(pattern)}
    return [lock for file in sorted(files) if (lock := read_lock(file)) is not None]


def _builder(file: os.stat_result) -> int | None:
    """The process of this host that has a file open."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # a process of another user, or one that has ended
            for name in os.scandir(folder):
                there = name.stat()
                if (there.st_dev, there.st_ino) == (file.st_dev, file.st_ino):
                    return int(folder.parent.name)
    return None


MOST_FACTS = 200
"""Of one kind and one file: a loop that logs an error would otherwise fill the memory."""
LINE = 2000
"""Characters of a line that are looked at."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What one line says. `rank` is None where it does not say whose it is."""

    kind: str
    text: str
    place: str
    rank: int | None = None
    numbers: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


OF_RANKS = ("host memory", "device memory", "watchdog", "store", "network", "lost", "nonfinite", "data", "error")
"""What a rank says of itself, and not another process of it."""
_FINDERS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE if kind == "nonfinite" else 0)) for kind, pattern in WORDS["lines"]
)
_SIGNS = re.compile(
    r"rank|oom|OOM|[Mm]emory|srun|Error|Exception|exception|WARN|ibv_|[Tt]imed out|route|unhandled|finite|nan|NAN|inf"
    r"|INF|Iter|batches|Fatal|core dumped|TIME|CANCEL|Conn|remote|Skipping|timeout|exitcode|return code|PyTorch ext|MiB"
)
"""What a line has that a finder may find something in: looking for all of them takes longer."""
_TORCHRUN = re.compile(r" +rank +: (\d+) \(local_rank: \d+\)$")
"""The line of torchrun's summary that says of which rank the next one is."""
_RANK = re.compile(r"\[(?:[Rr]ank|default) ?(\d+)\]|^ *(\d+): |\b[Rr]ank (\d+)\b|local_rank: (\d+)")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_LABEL = re.compile(r"\[rank\d+\]:| *\d+: ")
"""Whose line it is, as torchrun and `srun --label` write it before each."""
_SIZES = re.compile(r"(\d+(?:\.\d+)?) ([KMG]iB)")
_SMI = re.compile(r"(\d+)MiB */ *(\d+)MiB *\| *(\d+)%")
_FRAME = re.compile(r'^ {4}(\S.*) \((.+:\d+)\)$|^(?:\[rank\d+\]:| *\d+:)? *File "(.+)", line (\d+),? in (\S+)')


def read_log(text: str, source: str) -> list[Fact]:
    """What the lines say that a verdict can use."""
    found: list[Fact] = []
    counts: dict[str, int] = {}
    frames: dict[str, list[str]] = {}
    whose = ""
    for number, line in enumerate(text.splitlines(), 1):
        line = _COLOUR.sub("", line[:LINE])
        speaker = line[: label.end()] if (label := _LABEL.match(line)) else ""
        if _FRAME.match(line):
            frames[speaker] = [*frames.get(speaker, ())[-60:], line.strip()]
            continue
        if not _SIGNS.search(line):
            continue
        if (row := _TORCHRUN.match(line)) is not None:
            whose = row[1]
            continue
        facts = list(_facts(line, f"{source}:{number}", frames.get(speaker, ()), whose))
        for fact in facts:
            counts[fact.kind] = counts.get(fact.kind, 0) + 1
            if counts[fact.kind] <= MOST_FACTS:
                found.append(fact)
        if facts or "Traceback (most recent" in line:
            frames.pop(speaker, None)
    return found


def _facts(line: str, place: str, frames: Sequence[str], exited: str) -> Iterator[Fact]:
    if (row := _SMI.search(line)) is not None:
        used, total, busy = map(float, row.groups())
        yield Fact("gpu", line.strip(), place, None, {"used": used * MIB, "total": total * MIB, "busy": busy})
        return
    for kind, finder in _FINDERS:
        for match in finder.finditer(line):
            named = match.groupdict()
            whose = _RANK.search(line)
            rank = named.get("who") or (next((one for one in whose.groups() if one), None) if whose else None)
            rank = exited or None if "exitcode " in match[0] else None if "exitcode:" in match[0] else rank
            numbers = {"seq": float(named["seq"])} if named.get("seq") else {}
            if kind == "device memory":
                numbers = _sizes(line) | {"phase": _phase(frames)}
            text = named.get("root") or match[0].strip()
            for one in (None,) if rank is None else _ranks_in(rank):
                yield Fact(kind, text[:300], place, one, numbers)
        if finder.search(line) and kind not in ("stopped", "dead"):
            return


def _ranks_in(text: str) -> list[int]:
    """Of "3", or of "4,7-9" as Slurm writes it; of a long list the first ones."""
    found: list[int] = []
    for first, last in re.findall(r"(\d{1,7})(?:-(\d{1,7}))?", text):
        found += range(int(first), min(int(last or first), int(first) + MOST_FACTS) + 1)
    return found[:MOST_FACTS]


def _sizes(line: str) -> dict[str, float]:
    """Of torch's message: what was asked for, what the device has, and what was free."""
    scale = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
    names = ("asked", "total", "free")
    return {name: float(size) * scale[unit] for name, (size, unit) in zip(names, _SIZES.findall(line), strict=False)}


def _phase(frames: Sequence[str]) -> float:
    """0, 1 or 2: the traceback before it was in the forward pass, the backward pass or the optimizer step; else -1."""
    for frame in reversed(frames):
        if "backward" in frame:
            return 1.0
        if re.search(r"optim\w*[/.]|in step\b|_take_model_step", frame):
            return 2.0
        if re.search(r"in forward\b|modeling_", frame):
            return 0.0
    return -1.0


PHASES = ("forward pass", "backward pass", "optimizer step")


def read_stack(text: str) -> list[str]:
    """The main thread's frames of a `py-spy dump`, or of faulthandler, the outermost first; empty: it is neither."""
    main = re.search(r"^Thread .*MainThread.*\n((?: {4}.*\n?)+)", text, re.MULTILINE)
    main = main or re.search(
        r"^(?:Current thread|Thread 0x).*most recent call first.*\n((?: +File .*\n?)+)", text, re.MULTILINE
    )
    if main is None:
        return []
    frames = []
    for line in main[1].splitlines():
        if (frame := _FRAME.match(line)) is not None:
            name, where, file, number, function = frame.groups()
            frames.append(f"{where} {name}" if where else f"{file}:{number} {function}")
    return frames[::-1]


def read_gpu_table(text: str, source: str) -> list[Fact]:
    """`nvidia-smi --query-gpu=…,utilization.gpu,memory.used,memory.total --format=csv`; empty: it is none."""
    lines = text.splitlines()
    if not lines or "memory.used" not in lines[0]:
        return []
    names = [name.split("[")[0].strip() for name in lines[0].split(",")]
    found = []
    for number, row in enumerate(csv.reader(lines[1:]), 2):
        values = {name: re.match(r" *([\d.]+)", value) for name, value in zip(names, row, strict=False)}
        known = {name: float(value[1]) for name, value in values.items() if value is not None}
        numbers = {
            "used": known.get("memory.used", 0.0) * MIB,
            "total": known.get("memory.total", 0.0) * MIB,
            "busy": known.get("utilization.gpu", -1.0),
            "index": known.get("index", -1.0),
        }
        found.append(Fact("gpu", ",".join(row)[:200], f"{source}:{number}", None, numbers))
    return found[-MOST_FACTS:]


# Files of any kind, in any state.

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
