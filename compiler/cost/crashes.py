"""Which crashed runs may have crashed for want of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .measurements import Measurement
from .workload import Workload


def crashed_of_memory(rows: Sequence[Measurement]) -> list[Measurement]:
    """Crashes that may have been of memory, told from measurements and exact arithmetic alone.

    A crash is left out when a larger micro-batch of the same layout ran. ZeRO 0 holds at most 12 bytes more of each
    parameter than ZeRO 1 did: when that, too, leaves a `CLEAR` share of the device empty, memory was not the reason.
    """
    measured: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for one in rows:
        if one.peak_bytes:
            measured[one.model, _layout(one.work)].append(one)
    return [
        one
        for one in rows
        if one.crashed and not any(_rules_out(ran, one) for ran in measured[one.model, _layout(one.work)])
    ]


CLEAR = 0.2
"""Share of a device that stays empty in a run that cannot have crashed of memory."""


def _rules_out(ran: Measurement, crash: Measurement) -> bool:
    """Whether a run of the same layout shows that a crash was not of memory."""
    if ran.work.micro_batch < crash.work.micro_batch:
        return False
    if ran.work.zero_stage <= crash.work.zero_stage:
        return True
    device = crash.work.machine.memory_bytes
    more = 12 * max(crash.work.stage_parameters(stage) for stage in crash.work.stages)
    return device is not None and (ran.peak_bytes or 0) + more <= (1 - CLEAR) * device


def _layout(work: Workload) -> tuple[int, ...]:
    return (work.nodes, work.tp, work.cp, work.dp, work.pp)
