"""One rank of each copy of the model reads the samples of a step, and sends them to the copy's other ranks.

The ranks of a copy differ in pp, cp and tp. The first of them reads. The micro-batches go to the first rank of each
pipeline stage, from there to the first of each cp rank, and from there over tp, through the groups that the layers have
too: all ranks take part where a step begins, when nothing else is under way. A stage gets what it looks at: tokens stay
at the first stage unless routers look experts up by them, labels go to the last one; where they are left out stands a
tensor of the same shape that takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.groups import Axis
from parcompile.plan import Plan
from parcompile.plan.holding import Holding
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.groups.rendezvous import wait_for_all
from parcompile.runtime.labels import IGNORED_LABEL

from .batches import Batch

_TOKENS, _LABELS = frozenset({"input_ids"}), frozenset({"labels", "shift_labels"})

_OF_NUMPY = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool, torch.float32, torch.float64)


class StepOfSamples(NamedTuple):
    """The whole sequences of a dp rank's micro-batches in a step."""

    firsts: range
    """The numbers of their first sequences."""
    micro_batches: list[Batch]
    predicted: int
    """How many of their tokens are."""


class _LeftOut(NamedTuple):
    """Stands for a tensor whose values no receiver looks at."""

    shape: tuple[int, ...]
    value: int


class Replica:
    """The ranks of the copy of the model that this rank belongs to.

    Args:
        mesh: this rank's place.

    Raises:
        RunError: not all ranks make one.
    """

    def __init__(self, mesh: Mesh) -> None:
        wait_for_all(
            "with loader.reads_once one rank reads for others",
            "iter(loader) with reads_once",
            "set it on every rank before iter(loader)",
        )
        self._mesh = mesh
        self._hops = [axis for axis in (Axis.PP, Axis.CP, Axis.TP) if mesh.size(axis) > 1]
        self.reads = all(mesh.index(axis) == 0 for axis in self._hops)
        """Whether this rank reads for the others."""
        stages = range(mesh.size(Axis.PP))
        self._left_out = [unneeded(mesh.plan, stage) if len(stages) > 1 else frozenset[str]() for stage in stages]
        self._reader = mesh.plan.groups.grid.rank({Axis.DP: mesh.index(Axis.DP)})

    def share(self, read: Callable[[], StepOfSamples], at: Callable[[], str]) -> StepOfSamples:
        """What `read` returns on the rank that reads, on all ranks of the copy.

        Args:
            read: called on that rank alone.
            at: which sample that rank was reading, for the message of an error.

        Raises:
            RunError: `read` has raised elsewhere; on the rank that reads its own exception goes on.
        """
        sent: Any = None
        if self.reads:
            try:
                sent = read()
            except Exception as error:
                failed = f"rank {self._reader} reads for this copy of the model and failed at {at()}"
                self._send(f"{failed}: {type(error).__name__}: {error}")
                raise
        sent = self._send(sent)
        if isinstance(sent, str):
            failure = RunError(sent)
            failure.follows = True
            raise failure
        return StepOfSamples(sent.firsts, _each(_tensor, sent.micro_batches), sent.predicted)

    def _send(self, sent: StepOfSamples | str | None) -> Any:
        """Hands on what this rank has, or what it gets on the way."""
        own = self._mesh.index(Axis.PP)
        for place, axis in enumerate(self._hops):
            if any(self._mesh.index(later) for later in self._hops[place + 1 :]):
                continue  # another rank of this stage is the first, and gets it for this one
            receivers = self._left_out[1:] if axis == Axis.PP else [self._left_out[own]]
            first = self._mesh.index(axis) == 0
            box = [_without(frozenset.intersection(*receivers), sent) if first else None]
            dist.broadcast_object_list(box, group=self._mesh.group(axis), group_src=0)
            if not first:
                sent = _without(self._left_out[own], box[0])
        return sent


def unneeded(plan: Plan, stage: int) -> frozenset[str]:
    """What of a batch no rank of a pipeline stage looks at."""
    held, moe = Holding(plan, stage), plan.spec.model.shape.moe
    found: frozenset[str] = frozenset() if held.has_head else _LABELS
    looked_up = moe is not None and any(moe.looked_up(one.layers) for one in held.stages)
    return found if held.has_embedding or looked_up else found | _TOKENS


def _each(change: Callable[[str, Any], Any], given: Any, name: str = "") -> Any:
    """Lists and mappings with each value changed; `name` is that of the nearest mapping's key."""
    if isinstance(given, dict):
        return {key: _each(change, one, key) for key, one in given.items()}
    if isinstance(given, list):
        return [_each(change, one, name) for one in given]
    return change(name, given)


def _without(left_out: Collection[str], sent: Any) -> Any:
    """The same without the values of these names, as it is sent: arrays are pickled several times as fast."""

    def change(name: str, given: Any) -> Any:
        if name in left_out and not isinstance(given, _LeftOut):
            return _LeftOut(tuple(given.shape), IGNORED_LABEL if name in _LABELS else 0)
        if isinstance(given, Tensor) and given.device.type == "cpu" and given.dtype in _OF_NUMPY:
            return given.numpy()
        return given

    return sent._replace(micro_batches=_each(change, sent.micro_batches)) if isinstance(sent, StepOfSamples) else sent


def _tensor(_: str, given: Any) -> Any:
    if isinstance(given, _LeftOut):
        return torch.full((), given.value).expand(given.shape)
    return torch.from_numpy(given) if isinstance(given, np.ndarray) else given
