"""Messages between ranks without a process group, through keys of the launcher's store. Every wait has a time-out.

In each stage every rank sends one message to rank 0, which replies to all. Any rank can call the job off. Every rank
also sends a heartbeat with the stage that it is in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .watchdog import Requests, TimedStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LOST = (RuntimeError, dist.DistError)
"""What a store raises when the process that keeps it has ended."""
POLL_SECONDS = (0.01, 0.5)
"""The first wait between two looks at the store, and the longest."""


class CalledOff(Exception):  # noqa: N818 -- no error of its own: the reason is in the store
    """Some rank has called the check off."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last heartbeat of a rank."""

    beat: int
    stage: str


class StoreChannel:
    """This rank's end of the messages between all ranks. Threads may share it: no call on the store waits for a rank.

    It opens another connection to the store. Process groups that are being created wait for other ranks on theirs,
    which takes no other request meanwhile.

    Args:
        store: shared by all ranks.
        rank: of this process.
        world_size: number of ranks that the launcher has announced.
        name: prefix of the keys; the same on all ranks, and another one for each check of a process.
        requests: where those of this channel are entered; a watchdog over them notices a store that does not answer.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str, requests: Requests | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self.requests = Requests() if requests is None else requests
        self._store, self._name = TimedStore(TimedStore(store, self.requests).clone(), self.requests), name

    def send(self, stage: str, value: Any) -> None:
        """Send this rank's message of a stage to rank 0."""
        self._set(f"{stage}/{self.rank}", value)
        self._store.add(self._key(f"{stage}/count"), 1)

    def receive_all(self, stage: str, seconds: float) -> list[Any]:
        """The messages of all ranks, on rank 0; None for those that have sent none in time.

        Raises:
            CalledOff: a rank has called the check off meanwhile.
        """
        self._wait(lambda: self._store.add(self._key(f"{stage}/count"), 0) >= self.world_size, seconds)
        return [self._get(f"{stage}/{rank}") for rank in range(self.world_size)]

    def reply(self, stage: str, value: Any) -> None:
        """Rank 0's reply to all."""
        self._set(f"{stage}/answer", value)

    def receive_reply(self, stage: str, seconds: float, *, even_if_off: bool = False) -> Any:
        """Rank 0's reply, or None when it does not come in time.

        Raises:
            CalledOff: a rank has called the check off meanwhile, and `even_if_off` is not set.
        """
        self._wait(lambda: self._has(f"{stage}/answer"), seconds, even_if_off=even_if_off)
        return self._get(f"{stage}/answer")

    def call_off(self, why: str, *, about: str = "") -> None:
        """Ends the check on all ranks. `about` names the stage in which this rank failed; empty if it did not fail."""
        if about:
            self._set(f"failed/{self.rank}", {"stage": about, "why": why})
        self._set("off", why)

    def call_off_first(self, why: str) -> bool:
        """Like `call_off`; returns False where another rank was first: then its reason stands."""
        mine = json.dumps([self.rank, why])
        return bool(self._store.compare_set(self._key("off"), "", mine).decode() == mine)

    def is_off(self) -> bool:
        """Whether the check was called off."""
        return self._has("off")

    def failures(self) -> dict[int, dict[str, str]]:
        """Stage and reason of each rank that has failed."""
        found = {rank: self._get(f"failed/{rank}") for rank in range(self.world_size)}
        return {rank: one for rank, one in found.items() if one is not None}

    def beat(self, number: int, stage: str) -> None:
        """Send a heartbeat."""
        self._set(f"alive/{self.rank}", [number, stage])

    def alive(self, count: int | None = None) -> list[Heartbeat | None]:
        """The last heartbeat of every rank, or of the first `count`."""
        found = (self._get(f"alive/{rank}") for rank in range(self.world_size if count is None else count))
        return [None if one is None else Heartbeat(*one) for one in found]

    def post(self, name: str, value: Any) -> None:
        """Leave a value for all ranks, in place of the one of that name."""
        self._set(name, value)

    def post_first(self, name: str, value: Any) -> Any:
        """Leave a value for all ranks unless there is one; returns the one that stands."""
        return json.loads(self._store.compare_set(self._key(name), "", json.dumps(value)))

    def posted(self, name: str) -> Any:
        """What was left under a name; None: nothing."""
        return self._get(name)

    def count(self, name: str, by: int = 0) -> int:
        """Adds to a counter that all ranks share, and returns it."""
        return int(self._store.add(self._key(f"count/{name}"), by))

    def reason(self) -> str:
        """Why it was called off."""
        return str(self._get("off"))

    def wait_for_departures(self, others: int, seconds: float) -> None:
        """Rank 0, in whose process the store may live, waits until so many others have announced that they leave."""
        self._wait(lambda: self._store.add(self._key("parting/count"), 0) >= others, seconds, even_if_off=True)

    def _wait(self, ready: Callable[[], bool], seconds: float, *, even_if_off: bool = False) -> bool:
        end, pause = time.monotonic() + seconds, POLL_SECONDS[0]
        while not ready():
            if not even_if_off and self.is_off():
                raise CalledOff
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, POLL_SECONDS[1])
        return True

    def _key(self, key: str) -> str:
        return f"parcompile/{self._name}/{key}"

    def _has(self, key: str) -> bool:
        return bool(self._store.check([self._key(key)]))

    def _set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(self._key(key))) if self._has(key) else None
