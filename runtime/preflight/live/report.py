"""What the live check found: comparisons as offline, and a list of what is slow or odd, node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parcompile.cost.table import columns
from parcompile.runtime.preflight.findings import (
    Finding,
    Verdict,
    finding_tree,
    merged,
    ranks_in_words,
    shown_ranks,
    table,
)

from .agreement import JOB, Arrived

MOST_NODES = 64
"""So many nodes are listed; of more, those of which there is something to say come first."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as it reported, with its ranks and what is slow or odd about it."""

    name: str
    ranks: tuple[int, ...]
    device: str
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LiveReport:
    """Everything that the ranks of a job found before their first step."""

    plan: str
    world_size: int
    findings: tuple[Finding, ...]
    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()
    reason: str = ""
    """Why the check ended before its end; empty when it was gone through."""

    @property
    def passed(self) -> bool:
        """Whether the run can start: nothing differs, and the check was gone through."""
        return not self.reason and all(one.verdict is not Verdict.DIFFERS for one in self.findings)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "plan": self.plan,
            "world_size": self.world_size,
            "passed": self.passed,
            "reason": self.reason,
            "notes": list(self.notes),
            "findings": [
                finding_tree(one, [rank for rank in ranks if rank != JOB]) for one, ranks in merged(self.findings)
            ],
            "nodes": [
                {"name": one.name, "ranks": list(one.ranks), "device": one.device, "remarks": list(one.remarks)}
                for one in self.nodes
            ],
        }

    def text(self) -> str:
        """For people: a table, then what differs or is odd with its reason, then the nodes."""
        world = f"{self.world_size:,} rank{'s' if self.world_size > 1 else ''}"
        lines = [f"live preflight of {self.plan}: {world} on {len(self.nodes)} node(s)", *self.notes]
        lines += ["", *table(self.findings, "needed", self._who)]
        lines += ["", *_table_of(self.nodes)] if self.nodes else []
        return "\n".join([*lines, "", self.conclusion])

    def _who(self, ranks: Sequence[int]) -> str:
        return "all" if tuple(ranks) == (JOB,) or len(ranks) == self.world_size else shown_ranks(ranks)

    @property
    def conclusion(self) -> str:
        """In one line."""
        differing = len(merged(one for one in self.findings if one.verdict is Verdict.DIFFERS))
        odd = len(merged(one for one in self.findings if one.verdict is Verdict.ODD))
        ended = f"ended early: {self.reason}; " if self.reason else ""
        found = f"{differing} comparison(s) differ" if differing else "what was compared agrees"
        return f"{ended}{found}; {odd} slow or odd" if odd else f"{ended}{found}"


def nodes_of(arrived: Arrived, findings: Sequence[Finding], slow: Mapping[str, Sequence[str]]) -> tuple[Node, ...]:
    """Every node, with what was found odd about its ranks and what is slower there than elsewhere."""
    homes = {one.rank: one.node for one in arrived.facts}
    odd: dict[tuple[str, str, str], list[int]] = {}
    for one in findings:
        if one.verdict in (Verdict.DIFFERS, Verdict.ODD) and one.rank in homes:
            odd.setdefault((homes[one.rank], one.subject, one.found), []).append(one.rank)
    remarks: dict[str, list[str]] = {name: [] for name in arrived.nodes}
    for (node, subject, said), ranks in odd.items():
        remarks[node].append(f"{ranks_in_words(ranks)}: {subject} {said}")
    return tuple(
        Node(
            name,
            tuple(one.rank for one in ranks),
            f"{len(ranks)} × {ranks[0].device}",
            (*remarks[name], *slow.get(name, ())),
        )
        for name, ranks in arrived.nodes.items()
    )


def _table_of(nodes: Sequence[Node]) -> list[str]:
    first = sorted(nodes, key=lambda one: not one.remarks)[:MOST_NODES] if len(nodes) > MOST_NODES else nodes
    lines = columns([("node", "ranks", "device", "slow or odd"), *map(_row, first)])
    more = len(nodes) - len(first)
    return [*lines, f"and {more:,} more nodes"] if more else lines


def _row(node: Node) -> tuple[str, ...]:
    return node.name, shown_ranks(node.ranks), node.device, "; ".join(node.remarks) or "nothing"
