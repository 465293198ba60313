"""The last messages and steps of this rank, kept in memory, and written to a file for `parcompile doctor`.

Every message goes through a method of torch's `ProcessGroup`, whoever posts it. What is kept of one is its kind, sizes
and place in the step; its tensors are not. The file is written when the run fails, is sent SIGTERM or SIGUSR1, stands
still, or ends. Until then a mapped file holds the messages, which the system keeps when the process is killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import socket
import stat
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.atomic import write_file
from parcompile.doctor.records import FORMAT, HEAD_BYTES, KEPT, MESSAGE, SLOT_BYTES, STEP, file_name, ring_name
from parcompile.runtime.settings import records_folder, records_wanted

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_ONE_TO_ONE = ("send", "recv")
_ESTABLISHED = 1
"""Of a TCP connection, as the kernel tells it."""
_METHODS = (
    *_ROOTED,
    *_ONE_TO_ONE,
    *("allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("_allgather_base", "all_gather_single", "all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "alltoall"),
    *("alltoall_base", "all_to_all_single", "barrier", "recv_anysource"),
)


class Place(NamedTuple):
    """Where in a step something happens."""

    step: int = 0
    micro_batch: int = 0
    phase: str = "starting"
    layer: int | None = None


@dataclass(slots=True)
class _Message:
    """What is kept of a message."""

    number: int
    group: str
    op: str
    peer: int | None
    shape: torch.Size | None
    dtype: torch.dtype | None
    seconds: float
    place: Place
    work: Callable[[], Any] | None = None
    """A reference that is dead when nobody waits for the message any more; None until it is posted."""
    has_failed: bool = False

    def plain(self) -> tuple[Any, ...]:
        """What it is, with its place, in the order of `MESSAGE`."""
        shape = None if self.shape is None else tuple(self.shape)
        return self.number, self.group, self.op, self.peer, shape, str(self.dtype), self.seconds, *self.place

    def state(self) -> str:
        """Whether it has come to its end: done, open or failed."""
        work = None if self.work is None else self.work()
        if self.has_failed:
            return "failed"
        return "open" if self.work is None or (work is not None and not work.is_completed()) else "done"


class Records:
    """What is kept of this rank."""

    def __init__(self) -> None:
        self.messages: deque[_Message] = deque(maxlen=KEPT)
        self.steps: deque[list[Any]] = deque(maxlen=KEPT)
        self.place = Place()
        self.folder: Path | None = None
        self.facts: dict[str, Any] = {}
        self.nonfinite: dict[str, Any] | None = None
        self._axes: dict[str, str] = {}
        self._groups: dict[str, list[int] | None] = {}
        self._counts: dict[Any, int] = {}
        self._blocked, self._phases = 0.0, dict[str, float]()
        self.waiting_seconds = 0.0
        """In all that the host has waited for messages."""
        self._entered = self._began = time.perf_counter()
        self._starved = 0.0
        self._events: list[str] = []
        self._sums: list[tuple[Place, Tensor, str | None]] = []
        self._sums_before: list[tuple[Place, Tensor, str | None]] = []
        self._connections, self._links = 0, dict[str, float]()
        self._seen: tuple[object, float] = None, 0.0
        self._writing = threading.Lock()
        self._ring: mmap.mmap | None = None
        self._slot = 0

    def post(self, group: Any, op: str, args: tuple[Any, ...]) -> _Message | None:
        """A message that is about to be posted; None in a group of one."""
        name = group.group_name
        if name not in self._groups:
            ranks = dist.get_process_group_ranks(group) if group in dist.distributed_c10d._world.pg_map else []
            self._groups[name] = None if group.size() == 1 else ranks
            self._write_head()
        if self._groups[name] is None:
            return None
        peer, key = None, name
        if op in _ONE_TO_ONE:
            peer = args[1]
            key = (name, op, peer)
        elif op in _ROOTED:
            peer = args[-1].rootRank
        self._counts[key] = number = self._counts.get(key, 0) + 1
        tensor = _first(args)
        shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
        message = _Message(number, name, op, peer, shape, dtype, time.time(), self.place)
        self.messages.append(message)
        if self._ring is not None:
            start = HEAD_BYTES + self._slot * SLOT_BYTES
            self._ring[start : start + SLOT_BYTES] = repr(message.plain()).encode()[:SLOT_BYTES].ljust(SLOT_BYTES)
            self._slot = (self._slot + 1) % KEPT
        return message

    def fail(self, work: object) -> None:
        """Waiting for a message has raised an error."""
        if not self._links:
            self._links = {"left": _connections(), "of": self._connections, "seconds": time.time()}
        for one in self.messages:
            if work is not None and one.work is not None and one.work() is work:
                one.has_failed = True

    def name(self, axes: Mapping[str, str]) -> None:
        """The axes of groups."""
        self._axes.update(axes)
        self._write_head()

    def open_ring(self) -> None:
        """From here on a mapped file holds the messages too."""
        if self.folder is None:
            return
        file = self.folder / ring_name(self.facts["rank"])
        with contextlib.suppress(OSError):  # a full disk, or no right to write there
            self.folder.mkdir(parents=True, exist_ok=True)
            # A new file: another job may have mapped the one of this name, and a link may name a file of someone else.
            file.unlink(missing_ok=True)
            with file.open("x+b") as stream:
                stream.write(b" " * (HEAD_BYTES + KEPT * SLOT_BYTES))
                stream.flush()
                self._ring = mmap.mmap(stream.fileno(), 0)
            self._write_head()

    def _write_head(self) -> None:
        if self._ring is not None:
            head = json.dumps({"format": FORMAT, **self.facts, "groups": self._named_groups()}).encode()
            if len(head) <= HEAD_BYTES:  # groups of many thousands of ranks are known from the others' files
                self._ring[:HEAD_BYTES] = head.ljust(HEAD_BYTES)

    def end(self) -> None:
        """The process comes to its end as it should."""
        error = getattr(sys, "last_value", None)
        self.write("ended" if error is None else f"{type(error).__name__}: {error}")
        if self._ring is not None and self.folder is not None:
            with contextlib.suppress(OSError):
                (self.folder / ring_name(self.facts["rank"])).unlink()

    def waited(self, seconds: float) -> None:
        """So long the host has waited for a message."""
        self._blocked += seconds
        self.waiting_seconds += seconds

    def enter(self, phase: str) -> None:
        """From here on this rank is in that phase of the step."""
        now = time.perf_counter()
        before = self.place.phase
        self._phases[before] = self._phases.get(before, 0.0) + now - self._entered
        self._entered, self.place = now, self.place._replace(phase=phase, layer=None)

    def at(self, **where: Any) -> None:
        """From here on this rank is at that layer, micro-batch or step."""
        self.place = self.place._replace(**where)

    def begin_step(self) -> None:
        """A step begins here: what went on since the last one, such as an evaluation, is no part of it."""
        self._began = self._entered = time.perf_counter()
        self._blocked, self._starved = 0.0, _starved_seconds()
        self._phases.clear()

    def end_step(self, step: int) -> None:
        """The optimizer step of that number is over."""
        now = time.perf_counter()
        phases = {name: round(seconds, 6) for name, seconds in self._phases.items()}
        starved = _starved_seconds()
        row = [step, now - self._began, self._blocked, _held_bytes(), phases, starved - self._starved]
        if not self.steps:
            self._connections = _connections()
        self.steps.append(row)
        self._starved = starved
        self._began, self._blocked = now, 0.0
        self._phases.clear()
        self._sums_before, self._sums = self._sums, []
        self.place = Place(step + 1, 0, self.place.phase)

    def follow_layers(self, model: nn.Module, path: str) -> None:
        """From here on messages are known by layer, and a first value that is no finite number is found.

        Args:
            model: which may be wrapped.
            path: of the list of its layers.
        """
        if not self.facts:
            return  # nothing is recorded
        lists = (one for name, one in model.named_modules() if name == path or name.endswith(f".{path}"))
        for name, layer in next(lists, nn.Module()).named_children():
            if not name.isdecimal():
                continue  # a module of the user's own
            layer.register_forward_pre_hook(lambda *_, number=int(name): self.at(layer=number))
            layer.register_forward_hook(lambda one, __, output, number=int(name): self._leave(one, number, output))

    def _leave(self, layer: nn.Module, number: int, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        if not isinstance(x, Tensor) or not x.requires_grad or torch.compiler.is_compiling():
            return
        place = self.place

        def backward(gradient: Tensor) -> None:
            self.place = place._replace(phase=self.place.phase, layer=number)
            self._sum(self.place, gradient, layer)

        self._sum(place, x.detach(), layer)
        x.register_hook(backward)  # type: ignore[no-untyped-call]
        self.at(layer=None)

    def _sum(self, place: Place, x: Tensor, layer: nn.Module) -> None:
        """Keeps a number that is finite where all of x are. Nobody waits for it, and on a CPU nobody has to."""
        total, name = x.sum(dtype=torch.float32), None
        if total.is_cpu and not math.isfinite(total.item()):
            # The ranks of a tensor parallel group have the same sum: whose weights these are shows which one made it.
            name = next((one for one, p in layer.named_parameters() if not bool(torch.isfinite(p).all())), None)
        self._sums.append((place, total, name))

    def look_for_nonfinite(self) -> None:
        """Which layer of the last two steps was the first whose output, or gradient of it, holds no finite number."""
        every = (*self._sums_before, *self._sums)
        wrong = [(place, name) for place, total, name in every if not bool(torch.isfinite(total))]
        if wrong and self.nonfinite is None:
            self.nonfinite = {**wrong[0][0]._asdict(), "parameter": wrong[0][1]}

    def look_for_standstill(self, limit_seconds: float) -> None:
        """Writes the file once when a message has been under way for so long, and no other has been posted."""
        last, now = (self.messages[-1] if self.messages else None), time.monotonic()
        if last is not self._seen[0]:
            self._seen = last, now
        elif last is not None and now - self._seen[1] > limit_seconds and last.state() == "open":
            self._seen = last, float("inf")
            self.write(f"no message for {limit_seconds:.0f} s")

    def write(self, why: str) -> None:
        """Writes the file, where there is a folder for it. It never raises: it must not hide why a run ends."""
        with contextlib.suppress(Exception), self._writing:
            self._events = [*self._events, why][-8:]
            if self.folder is None or not self.facts:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(self.folder / file_name(self.facts["rank"]), json.dumps(self.to_json()))

    def pointer(self) -> str:
        """How to go on from a line that names a lost rank, to be put behind it."""
        return "" if self.folder is None else f"; for what each rank did last: parcompile doctor {self.folder}"

    def _named_groups(self) -> dict[str, Any]:
        return {name: {"axis": self._axes.get(name), "ranks": ranks} for name, ranks in self._groups.items() if ranks}

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        messages = [dict(zip(MESSAGE, (*one.plain(), one.state()), strict=True)) for one in list(self.messages)]
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = [] if frame is None else traceback.extract_stack(frame)
        return {
            "format": FORMAT,
            **self.facts,
            "events": self._events,
            "time": time.time(),
            "place": self.place._asdict(),
            "groups": self._named_groups(),
            "messages": messages,
            "steps": [dict(zip(STEP, one, strict=True)) for one in list(self.steps)],
            "stack": [f"{one.filename}:{one.lineno} {one.name}" for one in stack],
            "nonfinite": self.nonfinite,
            "links": self._links,
        }


records = Records()
"""Those of this process."""


def start(rank: int, world_size: int, facts: Mapping[str, Any]) -> None:
    """From here on messages are recorded. What an earlier run of this folder has left of this rank is removed."""
    if not records_wanted():
        return
    is_new, host = not records.facts, socket.gethostname()
    records.facts = {"rank": rank, "world_size": world_size, "host": host, **facts, "pid": os.getpid()}
    records.folder = records_folder() or records.folder
    if records.folder is not None:
        with contextlib.suppress(OSError):
            (records.folder / file_name(rank)).unlink()
        records.open_ring()
    if is_new:
        for name in _METHODS:
            if hasattr(dist.ProcessGroup, name):
                setattr(dist.ProcessGroup, name, _posting(name, getattr(dist.ProcessGroup, name)))
        dist.Work.wait = _waiting(dist.Work.wait)  # type: ignore[method-assign]
        util.Finalize(None, records.end, exitpriority=200)


def name_groups(groups: Mapping[str, dist.ProcessGroup]) -> None:
    """What messages on these groups are for: the axis of each."""
    records.name({group.group_name: axis for axis, group in groups.items()})


def _posting(op: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def post(group: Any, *args: Any, **options: Any) -> Any:
        message = records.post(group, op, args)
        try:
            work = method(group, *args, **options)
        except BaseException:
            records.fail(None)
            raise
        if message is not None:
            message.work = _over if work is None else weakref.ref(work)
        return work

    return post


def _over() -> None:
    """In place of a reference to a work that has gone."""


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(work, *args, **options)
        except BaseException:
            records.fail(work)
            raise
        finally:
            records.waited(time.perf_counter() - started)

    return wait


def _first(values: Any) -> Tensor | None:
    """The first tensor of arguments that may be lists of lists."""
    for one in values:
        if isinstance(one, Tensor):
            return one
        if isinstance(one, list | tuple) and (found := _first(one)) is not None:
            return found
    return None


def _starved_seconds() -> float:
    """For how long the system has let this thread wait for a processor; 0 where it does not say it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _connections() -> int:
    """The TCP connections of this process that are whole at both ends."""
    count = 0
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as one:
                        count += one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    return count


def _held_bytes() -> int:
    """What this rank holds now: on a device what its allocator has given out, on a CPU the process's pages."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return int(torch.cuda.memory_allocated())
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


_engine: Any = None
_place = ""
_phase = "starting"


def now_doing() -> str:
    """Such as "at step 12, in the backward pass, on pipeline stage 1"."""
    step = "" if _engine is None else f"at step {_engine.global_steps + 1}, "
    return f"{step}{_phase}{_place}"


def is_training() -> bool:
    """Whether an engine makes steps."""
    return _engine is not None


def doing(phase: str) -> contextlib.AbstractContextManager[Any]:
    """Within it, this rank is in that phase."""
    return mock.patch.object(sys.modules[__name__], "_phase", phase)


def set_stage(stage: int | None) -> None:
    """The pipeline stage of this rank; None: there is only one."""
    global _place
    _place = "" if stage is None else f", on pipeline stage {stage}"


def follow(engine: Any) -> None:
    """From here on the phases of an engine's steps are known. Its `backward` and `step` are wrapped."""
    global _engine, _phase
    _engine, _phase = engine, "before the forward pass"
    engine.register_forward_pre_hook(lambda *_: _enter_forward())
    engine.backward = _entering("in the backward pass", engine.backward)
    engine.step = _entering("in the optimizer step", engine.step, "between two passes")
    records.at(step=engine.global_steps + 1)


def _enter_forward() -> None:
    _enter("in the forward pass")
    if not _place:  # stages say which micro-batch they work on
        records.at(micro_batch=_engine.micro_steps % _engine.gradient_accumulation_steps())


def _enter(phase: str) -> None:
    global _phase
    _phase = phase
    records.enter(phase)


def _entering(phase: str, call: Callable[..., Any], after: str | None = None) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        _enter(phase)
        before = _engine.global_steps
        result = call(*args, **options)
        if after is not None:
            _enter(after)
        if _engine.global_steps != before:
            records.end_step(_engine.global_steps)
        return result

    return wrapped
