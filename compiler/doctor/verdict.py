"""What is wrong with a run, with its evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = {
    "hang": "HANG",
    "died": "DIED",
    "memory": "OUT OF MEMORY",
    "slow": "SLOW",
    "wrong": "WRONG NUMBERS",
    "start": "DOES NOT START",
    "nothing": "NOTHING FOUND",
    "unknown": "CANNOT TELL",
}


def some(ranks: Sequence[int]) -> str:
    """Such as "rank 3", or "ranks 0, 1, 2" with the number of those that are left out."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


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

    def text(self) -> str:
        """For a person."""
        lines = [f"{KINDS[self.kind]} · {self.summary}", ""]
        where = {
            "rank": ", ".join(map(str, self.ranks[:8]))
            + (f" and {len(self.ranks) - 8} more" if len(self.ranks) > 8 else ""),
            **{
                name.replace("_", "-"): getattr(self, name)
                for name in ("axis", "step", "micro_batch", "layer", "phase")
            },
            "collective": self.collective,
            "cause": self.cause,
        }
        lines += [f"{name:<13} {value}" for name, value in where.items() if value not in (None, "")]
        for title, said in (("evidence", self.evidence), ("what to do", self.advice)):
            lines += ["", title, *(f"  - {one}" for one in said)] if said else []
        unread = self.read.get("unreadable", {})
        lines += [
            "",
            f"read {(files := self.read.get('files', 0))} file{'s' * (files != 1)}: {self.read.get('said', '')}",
        ]
        lines += [f"  not read: {name}: {why}" for name, why in unread.items()]
        return "\n".join(lines)
