"""What a rank sends in a step: by group of ranks, and by the link that carries it."""

from __future__ import annotations

from parcompile.cost.estimate import UNTIMED
from parcompile.cost.table import traffic_rows
from parcompile.cost.traffic import GroupTraffic
from parcompile.plan.sections import topology as topology_of
from parcompile.units import format_bytes, format_seconds

from . import AXIS_OF_GROUP, SMALL, Box, Picture, Sketch, Subject, Text, reached

ROW = 44.0


def draw(subject: Subject, width: float) -> Picture:
    """A bar for each kind of group in the colour of its axis, then one for each link."""
    found = subject.estimate.traffic
    sketch = Sketch(width)
    links: dict[tuple[str, bool], float] = {}
    for one in found:
        key = (one.link.title, one.leaves_node)
        links[key] = links.get(key, 0.0) + one.wire_bytes
    longest = max(links.values(), default=0.0)
    for one in found:
        note = f"{reached(one.leaves_node)}, {_time(subject, one)}"
        axis = AXIS_OF_GROUP.get(one.group, one.group)
        _row(sketch, f"{one.group}: {one.operation}", one.wire_bytes, longest, axis, note)
    if not found:
        sketch.caption("One rank has no one to send to.")
    elif len(links) > 1 or len(found) > 1:
        sketch.y += 10
        sketch.caption("By link", strong=True)
        for (title, leaves), size in links.items():
            _row(sketch, title, size, longest, "soft" if leaves else "framework", reached(leaves))
    sent = (f"{one.group} sends {format_bytes(one.wire_bytes)} {reached(one.leaves_node)}" for one in found)
    said = "; ".join(sent) or "One rank has no one to send to"
    return sketch.picture("Traffic of a rank in a step", _subtitle(subject), said)


def _row(sketch: Sketch, name: str, size: float, longest: float, role: str, note: str) -> None:
    top = sketch.y
    value = format_bytes(size)
    room = sketch.width
    if sketch.narrow:
        sketch.caption(f"{name}, {note}", size=SMALL + 1)
        top = sketch.y - 16
    else:
        sketch.add(Text(0, top + 14, name), Text(room, top + 14, note, SMALL + 1, "soft", "end"))
    sketch.add(Text(room, top + 33, value, anchor="end", strong=True))
    end = room - 110
    sketch.add(Box(0, top + 20, end, 16, "track", radius=3))
    if longest:
        length = max(end * size / longest, 2.0 if size else 0.0)
        sketch.add(Box(0, top + 20, length, 16, role, f"{name}: {value}", radius=3))
    sketch.y = top + ROW + 2


def _time(subject: Subject, one: GroupTraffic) -> str:
    exposed, hidden = subject.estimate.exposed_seconds(one.group), subject.estimate.hidden_seconds(one.group)
    if one.group in UNTIMED:
        return "not timed"
    if not exposed:
        return f"fully overlapped{f' ({format_seconds(hidden)})' if hidden else ''}"
    return f"{format_seconds(exposed)} exposed" + (f", {format_seconds(hidden)} overlapped" if hidden else "")


def _subtitle(subject: Subject) -> str:
    topology = topology_of(subject.plan)
    others = topology["other_orders"]
    text = f"Order {'-'.join(subject.plan.spec.parallelism.order)}"
    if not others:
        return f"{text}; one node"
    least = others[0]
    if least["bytes_leaving_node"] < topology["bytes_leaving_node"]:
        return f"{text}; {least['order']} would send less between nodes: {format_bytes(least['bytes_leaving_node'])}"
    return f"{text}; no other order of the axes sends less between nodes"


def lines(subject: Subject, *, unicode: bool = True) -> list[str]:  # noqa: ARG001 -- plain anyway
    """For a terminal: the table."""
    return traffic_rows(subject.estimate) if subject.estimate.traffic else ["one rank: no traffic"]


def rows(subject: Subject) -> list[tuple[str, ...]]:
    """As a table."""
    found: list[tuple[str, ...]] = [("group", "operation", "messages", "sent", "link", "exposed", "overlapped")]
    for one in subject.estimate.traffic:
        of, link = subject.estimate, f"{one.link.title}, {reached(one.leaves_node)}"
        times = (format_seconds(seconds(one.group)) for seconds in (of.exposed_seconds, of.hidden_seconds))
        found.append((one.group, one.operation, f"{one.messages:,}", format_bytes(one.wire_bytes), link, *times))
    return found
