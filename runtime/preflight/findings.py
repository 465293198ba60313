"""What preflight found: what the plan says, what was built or counted, and whether they agree; also of the device."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parcompile.cost.table import columns

from .counting import Counts
from .stand_in import MetaTracker
from .step import END, RUN
from .waits import known


class Verdict(enum.Enum):
    """How a comparison ended."""

    AGREES = "agrees"
    DIFFERS = "DIFFERS"
    ODD = "odd"
    """Worth a look; nothing has to be changed for it."""
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison on one rank: what the plan or its estimate says, and what was found."""

    rank: int
    subject: str
    planned: str
    found: str
    verdict: Verdict
    detail: str = ""
    """Why, where they differ or nothing was run."""

    def to_wire(self) -> list[Any]:
        """For the way to another rank, as JSON."""
        return [self.rank, self.subject, self.planned, self.found, self.verdict.value, self.detail]

    @classmethod
    def from_wire(cls, fields: Sequence[Any]) -> Finding:
        """What `to_wire` gave."""
        rank, subject, planned, found, verdict, detail = fields
        return cls(rank, subject, planned, found, Verdict(verdict), detail)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found, on the ranks that were looked at."""

    plan: str
    world_size: int
    ranks: tuple[int, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = field(default=())
    counts: Mapping[int, Counts] = field(default_factory=dict)
    """What the ranks that took a step sent in it."""

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return all(one.verdict is not Verdict.DIFFERS for one in self.findings)

    @property
    def differing(self) -> tuple[Finding, ...]:
        """What does."""
        return tuple(one for one in self.findings if one.verdict is Verdict.DIFFERS)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "plan": self.plan,
            "world_size": self.world_size,
            "ranks": list(self.ranks),
            "agrees": self.agrees,
            "notes": list(self.notes),
            "findings": [finding_tree(one, ranks) for one, ranks in merged(self.findings)],
        }

    def text(self) -> str:
        """For people: a table, what differs explained below it."""
        lines = [f"preflight of {self.plan}: {len(self.ranks)} of {self.world_size:,} ranks", *self.notes, ""]
        lines += table(self.findings, "planned", shown_ranks)
        count = len(merged(self.differing))
        left = "; not everything could be run" if any(one.verdict is Verdict.NOT_RUN for one in self.findings) else ""
        lines += ["", ("what was compared agrees" if self.agrees else f"{count} comparison(s) differ") + left]
        return "\n".join(lines)


def merged(findings: Iterable[Finding]) -> list[tuple[Finding, tuple[int, ...]]]:
    """Findings that are the same on several ranks become one, with those ranks."""
    found: dict[tuple[object, ...], list[Finding]] = {}
    for one in findings:
        key = one.subject, one.planned, one.found, one.verdict, one.detail
        found.setdefault(key, []).append(one)
    return [(ones[0], tuple(one.rank for one in ones)) for ones in found.values()]


def table(findings: Iterable[Finding], wanted: str, who: Callable[[Sequence[int]], str]) -> list[str]:
    """Findings as lines with a head, what differs or is odd explained below; `who` says which ranks, or "all"."""
    rows: list[tuple[str, ...]] = [("rank", "compared", wanted, "found", "verdict")]
    details = []
    for one, ranks in merged(findings):
        said = who(ranks)
        rows.append((said, one.subject, one.planned, one.found, one.verdict.value))
        if one.detail:
            speaker = "" if said == "all" else f"rank {said}, "
            details.append(f"{one.verdict.value}: {speaker}{one.subject}: {one.detail}")
    return [*columns(rows), *(("", *details) if details else ())]


def finding_tree(finding: Finding, ranks: Sequence[int]) -> dict[str, Any]:
    """A finding with the ranks that share it, for machines."""
    return {
        "ranks": list(ranks),
        "subject": finding.subject,
        "planned": finding.planned,
        "found": finding.found,
        "verdict": finding.verdict.value.lower(),
        "detail": finding.detail,
    }


def shown_ranks(ranks: Sequence[int], few: int = 4) -> str:
    """Ranks for people: all of a few, the ends of many."""
    if len(ranks) <= few:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, … {ranks[-1]} ({len(ranks)})"


def group_in_words(ranks: Sequence[int]) -> str:
    """The first ranks of a group in their order, and the last of many with their number."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"[{shown}, … {ranks[-1]}] ({len(ranks)})" if len(ranks) > 8 else f"[{shown}]"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 3, 4, … 9 (7)`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown_ranks(ranks, few=8)}"


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
        detail = reason and f"{reason} ({names[0]} is the first)"
        yield Finding(rank, subject, "a fused kernel", kernel, verdict, detail)


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
