"""Which rank diverged first, from the messages that ranks have posted and wait for.

The steps of a rank are alike: what follows on a few messages is what followed on them before, on this rank or another.
The rank whose next message nobody has posted there has diverged. Where none has, the ranks that wait lead to one that
does not: it is dead, has ended, or is busy elsewhere.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple

from .reading import WORDS, Verdict, some
from .records import SAME_SIZE, Item, Message, Rank, describe

CONTEXT = 3
"""Messages that tell which one is next."""
AHEAD = 12
"""How far to look for a message that is missing or too early."""
QUIET_SECONDS = 1.0
"""A message that was posted less long before the file was written is on its way."""
BEHIND = 64
"""How far back two places are compared."""
UNDONE = ("open", "failed")
STARTING = "starting"
"""What is sent before the first step is sent once."""
BOUNDARY = "between two passes"
ADVICE: Mapping[str, str] = WORDS["advice"]
DIVERGED: Mapping[str, str] = WORDS["diverged"]
_DIVERGED = "look at what this rank does differently there: a branch on its data, its rank or its environment"


@dataclass(frozen=True, slots=True)
class Wait:
    """A message that has not come to its end, and the ranks that have not posted theirs."""

    rank: int
    message: Message
    missing: tuple[int, ...]

    def __str__(self) -> str:
        have = "have" if len(self.missing) > 1 else "has"
        which = f"which {some(self.missing)} {have} not posted" if self.missing else "which all its ranks have posted"
        step = "" if self.message.step is None else f"step {self.message.step}: "
        return f"{step}rank {self.rank} waits in {self.message}, {which}"


class Deviation(NamedTuple):
    """A message other than the one that was due; `due` and `posted` are what follows, elsewhere and on this rank."""

    rank: int
    due: Sequence[Item]
    posted: Sequence[Message]
    step: int | None
    """Of the message that was due."""

    def cause(self) -> str:
        """Skipped, swapped, of another size or group, or another message."""
        due, mine = self.due, [one.item for one in self.posted]
        first = mine[0]
        if first._replace(numel=None) == due[0]._replace(numel=None):
            return "wrong size"
        # A like message of another group may be the one that comes next: then the rank skipped this one.
        is_next = list(due[1:2]) == [first] != mine[1:2]
        if first._replace(axis="") == due[0]._replace(axis="") and not is_next:
            return "wrong group"
        if first in due[1:]:
            place = due[1:].index(first) + 1
            ahead, late = due[place:], [*due[1 : place + 1], due[0], *due[place + 1 :]]
            skipped, swapped = (sum(map(eq, mine, order)) for order in (ahead, late[: len(ahead)]))
            if skipped == swapped:
                return "skipped or swapped"
            return "skipped" if skipped > swapped else "swapped order"
        if first.phase == BOUNDARY and due[0].phase != BOUNDARY:
            return "ended early"
        return "other message"


def other_end(one: Rank, message: Message) -> int:
    """Of a message between two ranks the one that is not this one."""
    members, place = one.groups.get(message.group, ("", ()))[1], message.peer or 0
    return members[place] if place < len(members) else place


class Messages:
    """The messages of all ranks, by group and number."""

    def __init__(self, ranks: Mapping[int, Rank]) -> None:
        self.ranks = ranks
        self.members: dict[str, set[int]] = defaultdict(set)
        self.posted: dict[tuple[str, int], dict[int, Message]] = defaultdict(dict)
        self._last: Counter[Any] = Counter()
        for rank, one in ranks.items():
            for name, (_, members) in one.groups.items():
                self.members[name].update(members)
            for message in one.messages:
                self.members[message.group].add(rank)
                if message.op not in ("send", "recv"):
                    self.posted[message.group, message.number][rank] = message
                key = (message.group, rank, *self._ends(rank, message))
                self._last[key] = max(self._last[key], message.number)
        self._add_absent()

    def _add_absent(self) -> None:
        """Dumps of gloo do not say who is in a group: a rank without one is in those that all use or that lack one."""
        sizes: Counter[str] = Counter()
        for one in self.ranks.values():
            sizes |= Counter(one.sizes)
        lacking = {name: sizes[name] - len(known) for name, known in self.members.items() if sizes[name] > len(known)}
        size = max((one.world_size for one in self.ranks.values()), default=0)
        absent = set(range(max([*self.ranks, size]))) - set(self.ranks)
        if lacking and not absent:
            absent = {max(self.ranks) + 1}
        for name, known in self.members.items():
            if known == set(self.ranks) or lacking.get(name) == len(absent):
                known |= absent

    def _ends(self, rank: int, message: Message) -> tuple[str, int] | tuple[()]:
        """Of a message between two ranks its way and the rank at the other end."""
        if message.op not in ("send", "recv"):
            return ()
        return message.op, other_end(self.ranks[rank], message)

    def waits(self) -> list[Wait]:
        """The first message of each rank that has not come to its end though all was quiet."""
        found = []
        for rank, one in self.ranks.items():
            typical = statistics.median([float(step.get("seconds") or 0.0) for step in one.steps] or [0.0])
            quiet = QUIET_SECONDS + 3 * typical
            limit = float("inf") if one.seconds is None or one.error else one.seconds - quiet
            mine = [] if one.has_ended or one.is_cut else [m for m in one.messages if m.seconds <= limit]
            every = [Wait(rank, m, tuple(sorted(self._missing(rank, m)))) for m in mine]
            # A dump of Flight Recorder counts what has failed as over: not what a member has never posted.
            waits = [w for w in every if w.message.state in UNDONE or (one.seconds is None and w.missing)]
            # A rank that left nothing may have posted all but the last: it is not known since when others wait for it.
            since = [w for w in waits if not w.missing or set(w.missing) & set(self.ranks)]
            if waits and not since:
                found.append(max(waits, key=lambda one: one.message.seconds))
            elif waits := since:
                # What nobody has looked at may have come to its end unseen.
                found.append(min(waits, key=lambda one: (not one.missing, one.message.seconds)))
        return found

    def _missing(self, rank: int, message: Message) -> Iterator[int]:
        if ends := self._ends(rank, message):
            way = "recv" if ends[0] == "send" else "send"
            if self._last[message.group, ends[1], way, rank] < message.number and not self._is_cut(ends[1]):
                yield ends[1]
            return
        for member in self.members[message.group]:
            if self._last[message.group, member] < message.number and not self._is_cut(member):
                yield member

    def _is_cut(self, rank: int) -> bool:
        """Whether nobody knows what a rank did last."""
        return rank in self.ranks and self.ranks[rank].is_cut

    def disagreement(self) -> dict[int, Message]:
        """The first collective that members of its group have posted differently."""
        found = [(min(m.seconds for m in one.values()), key) for key, one in self.posted.items() if _differs(one)]
        return self.posted[min(found)[1]] if found else {}


def _differs(posted: Mapping[int, Message]) -> bool:
    if len({(m.op, m.item.numel if m.op in SAME_SIZE else None, m.peer) for m in posted.values()}) > 1:
        return True
    # Stages of a pipeline are at other layers and micro-batches when they meet.
    mixes = any("pp" in m.item.axis or m.item.axis in ("world", "embedding") for m in posted.values())
    return len({(m.step, *(() if mixes else m.item[3:6])) for m in posted.values()}) > 1


def deviations(ranks: Mapping[int, Rank]) -> list[Deviation]:
    """The first deviation of each rank that has one, the earliest first."""
    items = {rank: [m.item for m in one.messages] for rank, one in ranks.items()}
    followers: dict[tuple[Item, ...], dict[Item, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, row in items.items():
        for place in range(CONTEXT, len(row)):
            followers[tuple(row[place - CONTEXT : place])][row[place]].append((rank, place))
    found = []
    for rank, row in items.items():
        for place in range(CONTEXT, len(row)):
            if row[place].phase == STARTING:
                continue
            known = followers[tuple(row[place - CONTEXT : place])]
            if len(known) > 1 and known[row[place]] == [(rank, place)]:
                mine = row[max(place - BEHIND, 0) : place]
                elsewhere = [one for item, seen in known.items() if item != row[place] for one in seen]
                likest = max(elsewhere, key=lambda one: _alike(items[one[0]], one[1], mine))
                # What follows on it is read where enough of it is known.
                other, start = max(
                    known[items[likest[0]][likest[1]]],
                    key=lambda one: (one[1] + AHEAD <= len(items[one[0]]), _alike(items[one[0]], one[1], mine)),
                )
                due, last = items[other][start : start + AHEAD], ranks[other].messages[start - 1]
                later = (ranks[other].messages[start].step or 0) - (last.step or 0)
                before = ranks[rank].messages[place - 1].step
                step = None if before is None else before + later
                found.append(Deviation(rank, due, ranks[rank].messages[place : place + AHEAD], step))
                break
    return sorted(found, key=lambda one: one.posted[0].seconds)


def _due(one: Rank, ranks: Mapping[int, Rank]) -> tuple[Item, int | None] | None:
    """What a rank would have posted next, and in which step: what followed on its last messages elsewhere."""
    mine = [m.item for m in one.messages]
    rows = {rank: [m.item for m in other.messages] for rank, other in ranks.items()}
    known = [
        (_alike(row, place, mine), rank == one.rank, rank, place)
        for rank, row in rows.items()
        for place in range(CONTEXT, len(row))
        if row[place - CONTEXT : place] == mine[-CONTEXT:]
    ]
    if not known:
        return None
    *_, rank, place = max(known)
    before, after = (ranks[rank].messages[at].step or 0 for at in (place - 1, place))
    step = one.messages[-1].step
    return rows[rank][place], None if step is None else step + after - before


def _alike(row: Sequence[Item], place: int, mine: Sequence[Item]) -> int:
    """How many messages before that place are the same: the more, the surer that the next one is due here too."""
    before = row[max(place - BEHIND, 0) : place]
    return sum(1 for _ in takewhile(bool, map(eq, reversed(before), reversed(mine))))


def judge(ranks: Mapping[int, Rank], lost: Mapping[int, str], world_size: int) -> Verdict | None:
    """The verdict on a hang; None where nothing hangs.

    Args:
        ranks: what they have left.
        lost: ranks that others or logs say have gone, with the words.
        world_size: ranks of the job; 0: as many as are known.
    """
    every = Messages(ranks)
    waits, first = every.waits(), every.disagreement()
    if not waits and not lost and not first:
        return None
    evidence = [str(one) for one in waits[:4]] + [f"and {len(waits) - 4} more ranks wait"] * (len(waits) > 4)
    involved = {rank for one in waits for rank in (one.rank, *one.missing)} | set(first)
    is_stuck = bool(waits or lost) or any(one.error or one.seconds is None for one in ranks.values())
    own = [one for one in deviations(ranks) if one.rank in involved or one.rank in lost]
    if own and (earlier := _outvoted(first, ranks)) and earlier.posted[0].seconds < own[0].posted[0].seconds:
        own = [earlier]
    if own:
        found = _strayed(own[0], ranks, evidence)
        return found if is_stuck else replace(found, kind="wrong")
    if first and not lost:
        return _differing(first, ranks, evidence, is_stuck=is_stuck)
    missing = {rank for one in waits for rank in one.missing}
    if not waits and not lost:
        return None
    # Those that have left records and have not ended are blamed last.
    busy = {rank for rank, one in ranks.items() if not one.has_ended}
    roots = sorted(lost) or sorted(missing - {one.rank for one in waits}, key=lambda rank: (rank in busy, rank))
    if roots:
        # Where a rank has gone on, it is not known that it waits for one that left nothing.
        for_them = [one for one in waits if set(roots) & set(one.missing)] or waits
        last = {rank: one.messages[-1] for rank, one in ranks.items() if one.messages}
        wait = min(for_them, key=lambda one: (one.message is not last[one.rank], one.message.seconds), default=None)
        return _absent(roots, wait, ranks, lost, evidence, world_size)
    stuck = [one for one in waits if not one.missing]
    one = min(stuck or waits, key=lambda wait: wait.message.seconds)
    if not stuck:
        cause, said = "circle", f"{some([wait.rank for wait in waits])} wait for each other in different collectives"
    else:
        cause = "network"
        said = f"all ranks have posted {one.message}, and it does not end: the network between them drops messages"
    return _hang(cause, said, [wait.rank for wait in stuck or waits], one.message, evidence)


def strayed(ranks: Mapping[int, Rank]) -> Verdict | None:
    """The first rank whose order of messages is its own, whether or not anybody waits."""
    found = deviations(ranks)
    return _strayed(found[0], ranks, []) if found else None


def _hang(
    cause: str,
    said: str,
    ranks: Sequence[int],
    message: Message | None,
    evidence: Sequence[str],
    due: Item | None = None,
) -> Verdict:
    advice = [ADVICE.get(cause, _DIVERGED if due else "look at what these ranks do there")]
    where = {} if message is None else message.where(due)
    kind = "died" if cause == "error" or (cause == "dead" and "left nothing" not in said) else "hang"
    return Verdict(kind, cause, said, tuple(ranks), **where, evidence=evidence, advice=advice)


def _strayed(one: Deviation, ranks: Mapping[int, Rank], evidence: list[str]) -> Verdict:
    cause, due, posted = one.cause(), one.due[0], one.posted[0]
    if cause == "ended early":
        said = f"rank {one.rank} left the training loop before step {one.step}: its data ended early"
    else:
        said = f"rank {one.rank} posted {posted} where {describe(due)} was due: {DIVERGED[cause]}"
    shown = f"{ranks[one.rank].source}: message {posted.number} of its group, {posted}"
    return replace(_hang(cause, said, [one.rank], posted, [shown, *evidence], due), step=one.step)


def _outvoted(posted: Mapping[int, Message], ranks: Mapping[int, Rank]) -> Deviation | None:
    """The one rank that posted another message than all others of its group; None where there is none."""
    counts = Counter((m.op, m.item) for m in posted.values())
    if len(counts) != 2 or min(counts.values()) > 1 or len(posted) < 3:
        return None
    rank = next(rank for rank, m in posted.items() if counts[m.op, m.item] == 1)
    other = next(one for one in posted if one != rank)
    due, mine = (ranks[one].messages[ranks[one].messages.index(posted[one]) :][:AHEAD] for one in (other, rank))
    return Deviation(rank, [m.item for m in due], mine, due[0].step)


def _differing(
    posted: Mapping[int, Message], ranks: Mapping[int, Rank], evidence: list[str], *, is_stuck: bool
) -> Verdict:
    (most, count), *_ = Counter((m.op, m.item) for m in posted.values()).most_common()
    few = sorted(rank for rank, m in posted.items() if (m.op, m.item) != most) or sorted(posted)[1:]
    one, other = posted[few[0]], next(m for rank, m in posted.items() if rank not in few)
    alike = one.item._replace(numel=None) == other.item._replace(numel=None)
    cause = "wrong size" if alike and one.shape != other.shape else "other message"
    said = f"message {one.number} on {one.item.axis} is {one} on {some(few)}, and {other} on others"
    if count <= len(few):
        few, said = sorted(posted), f"{said}; the records do not say which of them is right"
    shown = [f"{ranks[rank].source}: {m}" for rank, m in sorted(posted.items())[:4]]
    found = _hang(cause, said, few, one, [*shown, *evidence], other.item)
    return found if is_stuck else replace(found, kind="wrong")


def _absent(
    blamed: Sequence[int],
    wait: Wait | None,
    ranks: Mapping[int, Rank],
    lost: Mapping[int, str],
    evidence: list[str],
    world_size: int,
) -> Verdict:
    """Ranks wait for one that waits for nobody."""
    one, who = ranks.get(blamed[0]), some(blamed)
    if (told := lost.get(blamed[0])) is not None:
        stopped = "no sign of life" in told or "answered nothing" in told
        verb = ("is", "has") if len(blamed) == 1 else ("are", "have")
        cause, said = ("stopped", f"{who} {verb[0]} stopped") if stopped else ("dead", f"{who} {verb[1]} died")
        if one is not None and "SIGTERM" in one.events:
            cause, said = "dead", f"{who} was sent SIGTERM"
        evidence = [told, *evidence]
    elif one is None:
        of = f" of {world_size}" if world_size > blamed[0] else ""
        cause, said = "dead", f"{who}{of} has left nothing: its process is dead or stopped"
    elif one.has_ended:
        cause, said = "ended early", f"{who} has ended without an error while others go on: its data ended early"
    elif one.error:
        cause, said = "error", f"{who} failed: {one.error}"
    else:
        at = _own_line(one.stack) if one.stack else None
        store = any("store" in line.lower() for line in one.stack[-3:])
        cause, said = ("store", f"{who} waits for the store") if store else ("busy", f"{who} is elsewhere")
        said += f": {at}" if at else ""
    found = _hang(cause, said, blamed, wait.message if wait else None, evidence)
    if cause in ("dead", "stopped") and one is not None and (due := _due(one, ranks)) is not None:
        last, (item, step) = one.messages[-1], due
        shown = f"{one.source}: {last} is what it posted last; {describe(item)} was due"
        where = {**last.where(item), "step": step}
        found = replace(found, **where, evidence=[evidence[0], shown, *evidence[1:]] if told else [shown, *evidence])
    sender = ["look who sends it: a scheduler at its limit, a launcher whose other rank failed"]
    return replace(found, advice=sender) if said.endswith("SIGTERM") else found


_COLLECTIVES = ("distributed_c10d.py", "torch/distributed/_functional_collectives.py", "deepspeed/comm/")
_LIBRARY = re.compile(r"^(torch|deepspeed|contextlib)\b|/(torch|deepspeed|site-packages|lib/python[\d.]+)/")
"""Lines of a stack that are not the program's; py-spy writes them from the folder of packages on."""


def judge_stacks(stacks: Mapping[int, Sequence[str]]) -> Verdict | None:
    """The verdict on stacks alone: the ranks that are in no collective, or in one of another line than most."""
    waiting = {rank for rank, stack in stacks.items() if any(one in "".join(stack[-6:]) for one in _COLLECTIVES)}
    if not waiting or len(stacks) == 1:
        return None
    lines = {rank: _own_line(stack) for rank, stack in stacks.items()}
    (most, count), *_ = Counter(lines[rank] for rank in waiting).most_common()
    evidence = [f"rank {rank}: {line}" for rank, line in sorted(lines.items())[:8]]
    if others := sorted(set(stacks) - waiting):
        said = f"outside of a collective: {some(others)}, at {lines[others[0]]}; "
        said += f"in one: {some(sorted(waiting))}, at {most}"
        return _hang("busy", said, others, None, evidence)
    others = sorted(rank for rank, line in lines.items() if line != most)
    if not others or count <= len(others):
        return None
    said = f"in another collective: {some(others)}, at {lines[others[0]]}; most ranks are in the one at {most}"
    return replace(_hang("other message", said, others, None, evidence), advice=[_DIVERGED])


def _own_line(stack: Sequence[str]) -> str:
    """The innermost line that is not a library's."""
    return next((line for line in reversed(stack) if not _LIBRARY.search(line)), stack[-1])
