"""What a rank does to its GPU beside messages and memory: kernels of attention, waits of the host, slower kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from .findings import Finding, Verdict
from .stand_in import MetaTracker
from .step import END, RUN
from .waits import known


def device_findings(rank: int, tracker: MetaTracker) -> Iterator[Finding]:
    """Kernels, waits and slower ways of a step, on `cuda`; on the meta device nothing is known of them."""
    if tracker.device.type != "cuda":
        return
    yield from attention_kernels(rank, tracker)
    yield from host_waits(rank, tracker)
    for what, count in sorted(tracker.slower.items()):
        yield Finding(rank, "a slower kernel", "none", f"{count} × {what}", Verdict.ODD)


def attention_kernels(rank: int, tracker: MetaTracker) -> Iterator[Finding]:
    """Which kernel the layers take, and why not a fused one."""
    layers: dict[tuple[str, str], list[str]] = {}
    for layer, choices in tracker.attention.items():
        for choice in choices:
            layers.setdefault(choice, []).append(layer)
    for (kernel, reason), names in layers.items():
        verdict = Verdict.ODD if reason else Verdict.AGREES
        subject = f"attention of {len(names)} layer{'' if len(names) == 1 else 's'}"
        yield Finding(
            rank, subject, "a fused kernel", kernel, verdict, reason and f"{reason} ({names[0]} is the first)"
        )


def host_waits(rank: int, tracker: MetaTracker) -> Iterator[Finding]:
    """How often the host waits in a step of `RUN` micro-batches; what docs/cuda.md does not list is named."""
    counted = Counter[str]()
    for phase in (*(f"micro {micro}" for micro in range(RUN)), END):
        counted += tracker.waits.get(phase, Counter())
    listed = sum(count for wait, count in counted.items() if known(wait) is not None)
    strangers = {wait: count for wait, count in counted.items() if known(wait) is None}
    yield Finding(
        rank,
        "host waits",
        "those of docs/cuda.md",
        f"{listed} of them" + (f", {sum(strangers.values())} others" if strangers else ""),
        Verdict.ODD if strangers else Verdict.AGREES,
        "; ".join(_shown(strangers.items())),
    )


def _shown(waits: Iterable[tuple[str, int]]) -> Iterator[str]:
    for wait, count in waits:
        what, _, where = wait.rpartition(" at ")
        path, _, line = where.partition(":")
        yield f"{count} × {what} at {'/'.join(Path(path).parts[-3:])}:{line}"
