"""Counts every message of this rank: collectives and point-to-point, ours and DeepSpeed's, live or under a fake group.

Every function of torch.distributed that communicates ends in an operator of torch's `c10d` library. There messages are
counted, which changes nothing.

Bytes are those that one rank puts on the wire, with ring collectives: of n bytes over N ranks an all-reduce sends
2 (N − 1) / N · n, an all-gather or reduce-scatter half of that (n counts the whole tensor), a send n, a receive none.
A collective that travels in pieces (`transport/lanes.py`) or as direct exchanges (`transport/gloo.py`) is one message,
as in the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from parcompile.cost.collectives import CONTROL_BYTES
from parcompile.layout.groups import Axis
from parcompile.runtime.transport.backend import continues
from parcompile.user_files import shipped

_KINDS: Mapping[str, str] = shipped("parcompile.runtime.preflight", "collectives.json")


@dataclass(frozen=True, slots=True)
class Tally:
    """Messages of one kind, and the bytes that this rank sends with them."""

    messages: int = 0
    wire_bytes: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(self.messages + other.messages, self.wire_bytes + other.wire_bytes)

    def times(self, factor: int) -> Tally:
        """As often as that."""
        return Tally(self.messages * factor, self.wire_bytes * factor)


Counts = dict[tuple[str, str], Tally]
"""Tallies by group and kind."""


class MessageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, messages are counted under the current `phase`.

    Args:
        groups: process groups under the names of the plan; others count as "other", the default group as "world".
        lanes: the groups of its lanes, which count as "pp".
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], lanes: Iterable[dist.ProcessGroup] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {group.group_name: name for name, group in groups.items()}
        self._names.update({lane.group_name: Axis.PP.value for lane in lanes})
        self.phase = "setup"
        self._counts: dict[str, Counts] = {}

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator; counts it where it is a message."""
        if func.namespace == "c10d":
            self.record(func, args)
        return func(*args, **(kwargs or {}))

    def record(self, func: Any, args: tuple[Any, ...]) -> str | None:
        """Counts one operator of c10d; returns the name of its group where it is a message."""
        name = func._schema.name.removeprefix("c10d::")
        kind = _KINDS.get(name)
        if kind is None:
            return None
        objects = (one for one in args if isinstance(one, torch.ScriptObject))
        group = next(dist.ProcessGroup.unbox(one) for one in objects if "ProcessGroup" in str(one._type()))
        named = self._names.get(group.group_name)
        if named is None:
            named = "world" if group.group_name == dist.group.WORLD.group_name else "other"  # type: ignore[union-attr]
        counts = self._counts.setdefault(self.phase, {})
        tally = Tally(0 if continues() else 1, _wire_bytes(kind, args, group))
        largest = max((one.nbytes for one in tensors_in(args)), default=0)
        if kind != "barrier" and tally.wire_bytes <= CONTROL_BYTES and largest <= CONTROL_BYTES:
            kind = "control"
        counts[named, kind] = counts.get((named, kind), Tally()) + tally
        return named

    def counts(self, phases: Iterable[str] | None = None) -> Counts:
        """What was counted in these phases, or in all."""
        found: Counts = {}
        for phase in self._counts if phases is None else phases:
            for key, tally in self._counts.get(phase, {}).items():
                found[key] = found.get(key, Tally()) + tally
        return found


def by_group(counts: Counts) -> dict[str, Tally]:
    """Tallies by group: what is sent, so that receives, barriers and control are left out."""
    found: dict[str, Tally] = {}
    for (group, kind), tally in counts.items():
        if kind not in ("receive", "barrier", "control"):
            found[group] = found.get(group, Tally()) + tally
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """Those of lists of lists, dictionaries and the like."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def nbytes(value: Any) -> int:
    """Of these tensors."""
    return sum(one.nbytes for one in tensors_in(value))


def _wire_bytes(kind: str, args: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    """What this rank sends; see the module."""
    if kind in ("receive", "barrier"):
        return 0.0
    if kind == "send":
        return float(nbytes(args[0]))
    share = (group.size() - 1) / group.size()
    if kind == "all-to-all" and len(args) > 4 and args[4]:
        # Pieces of unequal sizes: all but its own.
        sizes = args[4]
        share = 1 - sizes[group.rank()] / max(1, sum(sizes))
    if kind in ("all-reduce", "broadcast", "reduce"):
        return (2 if kind == "all-reduce" else 1) * share * nbytes(args[0])
    # Outputs come first, inputs second; of a gather the outputs are the whole, of a scatter the inputs.
    return share * nbytes(args[0] if kind in ("all-gather", "gather") else args[1])
