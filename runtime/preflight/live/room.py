"""Where ranks speak without a process group: keys of the launcher's store. Nothing here waits without an end.

Ranks say what they have to say stage by stage; rank 0 hears all of it and answers. Any rank can call the check off.
Beside that every rank says every moment that it is alive and where it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LOST = (RuntimeError, dist.DistError)
"""What a store raises when whoever keeps it is gone."""
POLL_SECONDS = (0.01, 0.5)
"""The first wait between two looks at the store, and the longest."""


class CalledOff(Exception):  # noqa: N818 -- no error of its own: the reason is in the store
    """Some rank has called the check off."""


@dataclass(frozen=True, slots=True)
class Alive:
    """A rank's last sign of life."""

    beat: int
    stage: str


class Room:
    """This rank's place in the conversation. Threads may share it: none of its calls on the store waits for a rank.

    It has a connection of its own. Process groups that are being made wait for other ranks on theirs, and nothing else
    can be asked there meanwhile.

    Args:
        store: shared by all ranks.
        rank: of this process.
        world_size: ranks that the launcher speaks of.
        name: of this conversation; the same on all ranks, another for each check of a process.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._name = store.clone(), name  # type: ignore[attr-defined]

    def say(self, stage: str, value: Any) -> None:
        """This rank's word at a stage, for rank 0."""
        self._set(f"{stage}/{self.rank}", value)
        self._store.add(self._key(f"{stage}/count"), 1)

    def hear_all(self, stage: str, seconds: float) -> list[Any]:
        """What every rank said, on rank 0; None for those that have said nothing in time.

        Raises:
            CalledOff: a rank has called the check off meanwhile.
        """
        self._wait(lambda: self._store.add(self._key(f"{stage}/count"), 0) >= self.world_size, seconds)
        return [self._get(f"{stage}/{rank}") for rank in range(self.world_size)]

    def answer(self, stage: str, value: Any) -> None:
        """Rank 0's word for all."""
        self._set(f"{stage}/answer", value)

    def hear_answer(self, stage: str, seconds: float, *, whatever: bool = False) -> Any:
        """Rank 0's word, or None when it does not come in time.

        Raises:
            CalledOff: a rank has called the check off meanwhile; not with `whatever`.
        """
        self._wait(lambda: self._has(f"{stage}/answer"), seconds, whatever=whatever)
        return self._get(f"{stage}/answer")

    def call_off(self, why: str, *, about: str = "") -> None:
        """Ends the check on all ranks; `about` names the stage in which this rank failed, when it was this one."""
        if about:
            self._set(f"failed/{self.rank}", {"stage": about, "why": why})
        self._set("off", why)

    def is_off(self) -> bool:
        """Whether the check was called off."""
        return self._has("off")

    def failures(self) -> dict[int, dict[str, str]]:
        """Stage and reason of each rank that has failed."""
        found = {rank: self._get(f"failed/{rank}") for rank in range(self.world_size)}
        return {rank: one for rank, one in found.items() if one is not None}

    def beat(self, number: int, stage: str) -> None:
        """A sign of life."""
        self._set(f"alive/{self.rank}", [number, stage])

    def alive(self, count: int | None = None) -> list[Alive | None]:
        """The last sign of life of every rank, or of the first `count`."""
        found = (self._get(f"alive/{rank}") for rank in range(self.world_size if count is None else count))
        return [None if one is None else Alive(*one) for one in found]

    def reason(self) -> str:
        """Why it was called off."""
        return str(self._get("off"))

    def part(self, others: int, seconds: float) -> None:
        """Rank 0, in whose process the store may live, waits until so many others have said that they go."""
        self._wait(lambda: self._store.add(self._key("parting/count"), 0) >= others, seconds, whatever=True)

    def _wait(self, ready: Callable[[], bool], seconds: float, *, whatever: bool = False) -> bool:
        end, pause = time.monotonic() + seconds, POLL_SECONDS[0]
        while not ready():
            if not whatever and self.is_off():
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


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 3, 4, … 9 (7)`."""
    shown = ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]} ({len(ranks)})"
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"
