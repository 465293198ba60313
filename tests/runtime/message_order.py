"""What each rank posts and waits for, recorded while the real code runs, and whether NCCL would come to the end of it.

Ranks are recorded one after the other in torch's fake process group. Each gives a program: a message is posted, or the
rank's stream waits for one. The programs are then played together as c10d's NCCL backend does (`pointToPoint` and
`collective` in `ProcessGroupNCCL.cpp`): what a rank posts on a communicator goes into one stream, and the head of a
stream blocks it until each other end is the head of its own. Sends and receives of a batch are one such head. Others
share the stream of a communicator that was connected eagerly; else each pair of ranks has a communicator of its own.
NCCL may let small messages pass before they are received: no order here counts on that.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

ALONE, BATCH = "alone", "batch"
"""Kinds of messages that are sends and receives; other kinds are collectives by name."""


@dataclass(frozen=True)
class Message:
    """What a rank posts on a group."""

    group: str
    kind: str
    ranks: tuple[int, ...]
    """Who takes part; of the world."""
    ends: tuple[tuple[str, int], ...] = ()
    """Sends and receives, each with the other rank."""

    def stream(self, eager: bool) -> tuple[Any, ...]:
        """Messages of a rank that wait for each other have the same."""
        return (self.group, *sorted(self.ranks)) if self.kind == ALONE and not eager else (self.group,)


Program = list[tuple[int, Message | None]]
"""Posts the message of a number; None: waits for it."""
EVERYTHING, RECEIVES = -1, -2
"""Numbers of a wait for all that was posted, or for all receives: the driver loads a kernel or frees memory."""


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records the program of the rank that this process stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.program: Program = []
        self._numbers = itertools.count()
        self._batch: tuple[int, list[Message]] | None = None
        self._works: list[_Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return self.record(func, args, found) if func.namespace == "c10d" else found

    def record(self, func: Any, args: tuple[Any, ...], found: Any) -> Any:
        """Records an operator of c10d; its result, with what it is waited for by."""
        *rest, work = found if isinstance(found, tuple) else (found,)
        group = next((dist.ProcessGroup.unbox(one) for one in args if _is(one, "ProcessGroup")), None)
        if group is None or group.size() == 1 or not _is(work, "Work"):
            return found
        name, ranks = func._schema.name.removeprefix("c10d::"), tuple(dist.get_process_group_ranks(group))
        if name in ("send", "recv_"):
            peer = ranks[args[2]]
            number = self._post(Message(group.group_name, ALONE, (dist.get_rank(), peer), ((name, peer),)))
        else:
            number = self._post(Message(group.group_name, name, ranks))
        self._works.append(_Work(self.program, number))
        return (*rest, self._works[-1].boxed()) if rest else self._works[-1].boxed()

    def _post(self, message: Message) -> int:
        if self._batch is not None:
            self._batch[1].append(message)
            return self._batch[0]
        number = next(self._numbers)
        self.program.append((number, message))
        return number

    @contextlib.contextmanager
    def unbatched(self) -> Iterator[None]:
        """Records sends and receives by their functions: within it the recorder need not see every operator."""

        def posted(way: str) -> Callable[..., _Work]:
            def post(_: Any, *, group: dist.ProcessGroup, **other: int) -> _Work:
                (place,) = other.values()
                peer = dist.get_global_rank(group, place)
                message = Message(group.group_name, ALONE, (dist.get_rank(), peer), ((way, peer),))
                return _Work(self.program, self._post(message))

            return post

        with mock.patch.object(dist, "isend", posted("send")), mock.patch.object(dist, "irecv", posted("recv_")):
            yield

    @contextlib.contextmanager
    def batches(self) -> Iterator[None]:
        """Within it what is posted as a batch is one message."""
        right = dist.batch_isend_irecv

        def post(messages: list[Any]) -> Any:
            self._batch = number, posted = next(self._numbers), []
            works = right(messages)
            self._batch = None
            ends = tuple(end for one in posted for end in one.ends)
            self.program.append((number, replace(posted[0], kind=BATCH, ends=ends)))
            return works

        with mock.patch.object(dist, "batch_isend_irecv", post):
            yield


class _Work(dist.Work):
    """Never complete before it is waited for: whoever asks gets the answer that makes it wait most."""

    def __init__(self, program: Program, number: int) -> None:
        super().__init__()
        self.program, self.number = program, number

    def wait(self, timeout: Any = None) -> bool:
        self.program.append((self.number, None))
        return True

    def is_completed(self) -> bool:
        return False


def _is(value: Any, name: str) -> bool:
    return isinstance(value, torch.ScriptObject) and name in str(value._type())


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank, whose messages go nowhere."""
    dist.init_process_group("meta:fake,cpu:fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def stuck(programs: Mapping[int, Program], *, eager: bool) -> dict[int, str]:
    """What ranks wait for when nothing moves any more; none: all came to their ends.

    Args:
        programs: by rank.
        eager: every communicator was connected before its first message.
    """
    played = {rank: _Player(program, eager) for rank, program in programs.items()}
    moved = True
    while moved:
        moved = False
        for rank, player in played.items():
            moved |= player.advance()
            moved |= _meet(rank, player, played)
    return {rank: player.waits_for() for rank, player in played.items() if player.waits_for()}


@dataclass
class _Head:
    """A message at the head of a stream; `ends` are those that have not met their other ends."""

    number: int
    message: Message
    ends: list[tuple[str, int]]


class _Player:
    """One rank: the place in its program, and its streams."""

    def __init__(self, program: Program, eager: bool) -> None:
        self.program, self.eager, self.place = program, eager, 0
        self.done: set[int] = set()
        self.streams: dict[tuple[Any, ...], deque[_Head]] = {}

    def advance(self) -> bool:
        """Posts until the next wait that is not over."""
        before = self.place
        while self.place < len(self.program):
            number, message = self.program[self.place]
            if message is None:
                if self._waits(number):
                    break
            else:
                stream = self.streams.setdefault(message.stream(self.eager), deque())
                stream.append(_Head(number, message, list(message.ends)))
            self.place += 1
        return self.place > before

    def _waits(self, number: int) -> bool:
        if number >= 0:
            return number not in self.done
        heads = [head for queue in self.streams.values() for head in queue]
        return any(number == EVERYTHING or way == "recv_" for head in heads for way, _ in head.message.ends)

    def head(self, stream: tuple[Any, ...]) -> _Head | None:
        """What the stream is at."""
        queue = self.streams.get(stream)
        return queue[0] if queue else None

    def end(self, stream: tuple[Any, ...]) -> None:
        """The head of a stream is over."""
        self.done.add(self.streams[stream].popleft().number)

    def waits_for(self) -> str:
        """What has not come to its end, in words."""
        heads = [str(queue[0].message) for queue in self.streams.values() if queue]
        return "; ".join(heads) + (f" at {self.place} of {len(self.program)}" if self.place < len(self.program) else "")


def _meet(rank: int, player: _Player, played: Mapping[int, _Player]) -> bool:
    """Heads of this rank's streams that meet their other ends."""
    moved = False
    for stream in player.streams:
        while (head := player.head(stream)) is not None:
            if head.message.ends:
                before = len(head.ends)
                for end in list(head.ends):
                    _exchange(rank, head, end, played[end[1]].head(stream))
                moved |= len(head.ends) < before
                if head.ends:
                    break
                player.end(stream)
            else:
                others = [played[one].head(stream) for one in head.message.ranks]
                if any(one is None or one.message != head.message for one in others):
                    break
                for one in head.message.ranks:
                    played[one].end(stream)
            moved = True
    return moved


def _exchange(rank: int, head: _Head, end: tuple[str, int], theirs: _Head | None) -> None:
    """A send meets its receive where both are at the heads of their streams."""
    way, _ = end
    other = ("recv_" if way == "send" else "send", rank)
    if theirs is not None and other in theirs.ends:
        theirs.ends.remove(other)
        head.ends.remove(end)
