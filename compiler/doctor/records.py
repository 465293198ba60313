"""What is known of a rank: its last messages with their places in the step, and its last steps.

The runtime writes it as JSON (`FORMAT`); Flight Recorder dumps are read into the same.

torch's own analyzer unpickles whatever a file holds, and needs torch; a dump consists of plain values alone, so that
here every class is refused.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import math
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1
FOLDER = "records"
KEPT = 512
"""Messages, and steps: the last ones."""
HEAD_BYTES, SLOT_BYTES = 2**15, 256
"""Of the mapped file: what is known of the rank as JSON, then messages as Python tuples, one in each slot."""
MESSAGE = ("number", "group", "op", "peer", "shape", "dtype", "time", "step", "micro_batch", "phase", "layer", "state")
STEP = ("step", "seconds", "waiting_seconds", "bytes", "phases", "starved_seconds")
MOST_VALUE = 2.0**62
"""A number that is larger is damage: seconds and bytes are not."""
MOST_MEMORY = 2**31
"""Of what a file of 32 MiB becomes when it is read."""
MOST_RANKS = 2**20
"""A number of a rank above this is damage."""


def file_name(rank: int) -> str:
    """Of a rank's records."""
    return f"rank-{rank:05d}.json"


def ring_name(rank: int) -> str:
    """Of the file that holds a rank's messages until its records are written."""
    return f"rank-{rank:05d}.ring"


class DamagedError(ValueError):
    """A file is not what its name or beginning says; the message is for the user."""


class Item(NamedTuple):
    """What of a message is the same in each step."""

    axis: str
    op: str
    numel: int | None
    micro_batch: int | None
    phase: str | None
    layer: int | None
    frame: str | None


@dataclass(frozen=True, slots=True)
class Message:
    """One collective, or one end of a message between two ranks."""

    number: int
    """Counts those of its group; of a send or receive, those to or from the same rank."""
    group: str
    op: str
    peer: int | None
    shape: tuple[int, ...] | None
    dtype: str | None
    seconds: float
    step: int | None
    item: Item
    state: str

    def __str__(self) -> str:
        return describe(self.item, self.shape)

    def where(self, due: Item | None = None) -> dict[str, Any]:
        """Its place in a verdict, or that of the one that was due."""
        one = due or self.item
        place = {"axis": one.axis, "micro_batch": one.micro_batch, "layer": one.layer, "phase": one.phase}
        return {**place, "step": self.step, "collective": describe(one, None if due else self.shape)}


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank has left."""

    rank: int
    source: str
    world_size: int
    groups: Mapping[str, tuple[str, tuple[int, ...]]]
    """Axis and ranks of each."""
    messages: Sequence[Message]
    steps: Sequence[Mapping[str, Any]] = ()
    events: Sequence[str] = ()
    stack: Sequence[str] = ()
    place: Mapping[str, Any] = field(default_factory=dict)
    nonfinite: Mapping[str, Any] | None = None
    seconds: float | None = None
    """When it was written; None: only when it was stuck."""
    plan_hash: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Ranks of groups, as the sizes of their messages tell; 0: they do not."""
    links: Mapping[str, float] | None = None
    """When its first message failed: `seconds`, and how many of how many TCP connections were `left` `of` all."""
    is_cut: bool = False
    """Whether the file ends too early: what the rank did after its last message here is not known."""

    @property
    def has_ended(self) -> bool:
        """Whether the process came to its end without an error."""
        return bool(self.events) and self.events[-1] == "ended" and self.error is None

    @property
    def error(self) -> str | None:
        """What it ended of, where that is its own."""
        own = [one for one in self.events if one != "ended" and not one.startswith(("SIG", "no message for"))]
        return own[0] if own else None


_OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all", "recv_anysource": "recv"}
SAME_SIZE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "send", "recv")
"""What has the same size on all its ranks."""


def op_of(name: str) -> str:
    """One name for what torch's methods and Flight Recorder call differently."""
    name = name.rpartition(":")[2].split(" ")[0].lower().strip("_")
    for long in ("_base", "_single", "_coalesced", "_into_tensor", "_tensor", "_v", "_oop", "_barrier"):
        name = name.replace(long, "")
    return _OPS.get(name, name)


def describe(item: Item, shape: Sequence[int] | None = None) -> str:
    """Such as "all_reduce [4, 128] on tp, layer 3, micro-batch 0, in the forward pass"."""
    size = f" {list(shape)}" if shape is not None else "" if item.numel is None else f" of {item.numel:,}"
    parts = [f"{item.op}{size} on {item.axis}"]
    parts += [f"layer {item.layer}"] if item.layer is not None else []
    parts += [f"micro-batch {item.micro_batch}"] if item.micro_batch is not None else []
    return ", ".join([*parts, *(one for one in (item.phase, item.frame) if one)])


def item_of(axis: str, op: str, shape: Sequence[int] | None, *place: Any, frame: str | None = None) -> Item:
    """What a message is in each step. Of collectives whose sizes may differ between ranks the size is left out."""
    numel = math.prod(shape) if shape is not None and op in SAME_SIZE else None
    micro_batch, phase, layer = place or (None, None, None)
    return Item(axis, op, numel, micro_batch, phase, layer, frame)


def read_records(text: str, source: str) -> Rank:
    """What the runtime wrote; of a file that ends too early, what is there.

    Raises:
        DamagedError: nothing of it can be used.
    """
    try:
        tree, is_cut = json.loads(text), False
    except (ValueError, RecursionError):
        tree, is_cut = _salvaged(text), True
    try:
        groups = {
            str(name): (str(one["axis"] or "world"), tuple(map(int, one["ranks"])))
            for name, one in tree["groups"].items()
        }
        rank, size = int(tree["rank"]), int(tree["world_size"])
        if tree["format"] != FORMAT or not 0 <= rank < size <= MOST_RANKS:
            said = f"format {tree['format']}, rank {rank} of {size}: this version reads format {FORMAT}"
            raise DamagedError(said)  # noqa: TRY301
        messages = [_message(one, groups) for one in tree["messages"]]
        steps = [_step(one) for one in tree.get("steps", []) if isinstance(one.get("step"), int)]
        return Rank(
            *(rank, source, size, groups, messages, steps, [str(one) for one in tree.get("events", [])]),
            *([str(one) for one in tree.get("stack", [])], dict(tree.get("place") or {}), _nonfinite(tree)),
            *(float(tree["time"]), None if tree.get("plan") is None else str(tree["plan"])),
            links={k: float(v) for k, v in links.items()} if (links := tree.get("links")) else None,
            is_cut=is_cut,
        )
    except DamagedError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DamagedError(f"no records of a rank: {type(error).__name__} {error}") from None


def read_ring(content: bytes, source: str) -> Rank:
    """What a process that was killed has left. Which messages had come to their ends is not known.

    Raises:
        DamagedError: nothing of it can be used.
    """
    messages = []
    for start in range(HEAD_BYTES, len(content), SLOT_BYTES):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            row = ast.literal_eval(content[start : start + SLOT_BYTES].decode("utf-8", "replace").strip())
            messages.append(dict(zip(MESSAGE, (*row, "unknown"), strict=True)))
    messages.sort(key=lambda one: float(one["time"]))
    head = content[:HEAD_BYTES].decode("utf-8", "replace").strip()
    return read_records(f'{head[:-1]}, "time": 0, "messages": {json.dumps(messages)}}}', source)


def _step(one: Mapping[str, Any]) -> dict[str, Any]:
    """A step whose values are finite numbers, and its phases."""
    names = [name for name in one if name != "phases"]
    numbers = {name: one[name] for name in names if isinstance(one[name], int | float) and abs(one[name]) < MOST_VALUE}
    return {**numbers, "phases": {str(name): float(value) for name, value in dict(one.get("phases") or {}).items()}}


def _nonfinite(tree: Mapping[str, Any]) -> dict[str, Any] | None:
    if (one := tree.get("nonfinite")) is None:
        return None
    numbers = {name: int(one[name]) for name in ("step", "micro_batch", "layer") if one.get(name) is not None}
    return {**numbers, **{name: str(one[name]) for name in ("phase", "parameter") if one.get(name) is not None}}


def _message(one: Mapping[str, Any], groups: Mapping[str, tuple[str, tuple[int, ...]]]) -> Message:
    shape = None if one["shape"] is None else tuple(map(int, one["shape"]))
    op, axis = op_of(one["op"]), groups.get(one["group"], ("unknown", ()))[0]
    layer = None if one["layer"] is None else int(one["layer"])
    item = item_of(axis, op, shape, int(one["micro_batch"]), str(one["phase"]), layer)
    peer = None if one["peer"] is None else int(one["peer"])
    return Message(
        *(int(one["number"]), str(one["group"]), op, peer, shape, one["dtype"]),
        *(float(one["time"]), int(one["step"]), item, str(one["state"])),
    )


def _salvaged(text: str) -> dict[str, Any]:
    """The head of a damaged file and the messages that are whole."""
    head, found, rest = text.partition('"messages": [')
    try:
        tree = json.loads(head.rstrip().rstrip(",") + "}") if found else None
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise DamagedError("it is damaged before the first message")
    messages, decoder = [], json.JSONDecoder()
    while rest.lstrip(", ").startswith("{"):
        try:
            one, end = decoder.raw_decode(rest := rest.lstrip(", "))
        except (ValueError, RecursionError):
            break
        messages.append(one)
        rest = rest[end:]
    return {**tree, "messages": messages}


_OWN = ("/torch/", "/deepspeed/comm/", "/deepspeed/utils/", "/contextlib.py", "/typing_extensions.py")
"""Frames of libraries that every collective passes."""


class _Plain(pickle.Unpickler):
    """Reads dictionaries, lists, tuples, text and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise DamagedError(f"it names {module}.{name}: a dump holds no such thing, and nothing of it was run")


class _Parts(pickle._Unpickler):
    """The same in Python, whose unfinished parts can be looked at."""

    find_class = _Plain.find_class


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """Within it, a few bytes of a pickle that ask for 64 GB get a MemoryError, where the system can limit a process."""
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError, ValueError):
        yield
        return
    limit = min(one for one in (used + MOST_MEMORY, soft, hard) if one != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _salvaged_dump(content: bytes) -> dict[str, Any]:
    """The messages of a pickle that are whole.

    Raises:
        DamagedError: none is.
    """
    reader = _Parts(io.BytesIO(content))
    try:
        reader.load()
    except DamagedError:
        raise
    except Exception:  # a damaged pickle raises whatever it likes
        parts = [one for row in (*getattr(reader, "metastack", ()), getattr(reader, "stack", ())) for one in row]
    else:
        parts = []
    rows = [row for one in parts for row in (one if isinstance(one, list) else [one])]
    entries = [row for row in rows if isinstance(row, dict) and "collective_seq_id" in row]
    if not entries:
        raise DamagedError("no Flight Recorder dump: it ends before the first message")
    config: Any = next((after for one, after in itertools.pairwise(parts) if one == "pg_config"), {})
    return {"entries": entries, "pg_config": config if isinstance(config, dict) else {}}


def read_dump(content: bytes, source: str) -> Rank:
    """A dump, pickled or as JSON, whose file's name ends with its rank.

    Raises:
        DamagedError: it is none.
    """
    number = re.search(r"(\d+)(?:\.\w+)?$", source)
    if number is None or int(number[1]) > MOST_RANKS:
        raise DamagedError("the name of a Flight Recorder dump ends with its rank")
    rank = int(number[1])
    try:
        is_cut = False
        try:
            with _bounded_memory():
                tree = json.loads(content) if content[:1] == b"{" else _Plain(io.BytesIO(content)).load()
        except (EOFError, pickle.UnpicklingError):
            tree, is_cut = _salvaged_dump(content), True
        done = {str(pg): int(one["last_completed_collective"]) for pg, one in (tree.get("pg_status") or {}).items()}
        groups = {
            str(name): (_axis(str(name), one.get("desc")), _ranks(one.get("ranks")))
            for name, one in tree["pg_config"].items()
        }
        messages = [_dump_message(one, groups, done) for one in tree["entries"]]
        sizes: dict[str, int] = {}
        for one, message in zip(tree["entries"], messages, strict=True):
            sizes[message.group] = max(sizes.get(message.group, 0), _size(one))
    except DamagedError:
        raise
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise DamagedError(f"no Flight Recorder dump: {type(error).__name__} {error}"[:200]) from None
    last = Counter[str]()
    for one in messages:
        last[one.group] = max(last[one.group], one.number if one.state == "done" and one.peer is None else 0)
    # The collectives of a group end in their order; gloo marks only those that were waited for.
    over = [
        replace(one, state="done") if one.peer is None and one.number <= last[one.group] else one for one in messages
    ]
    size = max(sizes.values(), default=0)
    return Rank(rank, source, size if rank < size else 0, groups, over, sizes=sizes, is_cut=is_cut)


def _size(one: Mapping[str, Any]) -> int:
    """Ranks of the group of a message, which gloo's dumps do not list: what is gathered has a part of each."""
    sizes = one["input_sizes"], one["output_sizes"]
    if op_of(one["profiling_name"]) not in ("all_gather", "reduce_scatter", "scatter") or not all(sizes):
        return 0
    less, more = sorted(sum(math.prod(map(int, shape)) for shape in each) for each in sizes)
    return more // less if less > 0 and more <= MOST_RANKS * less and more % less == 0 else 0


def _axis(name: str, description: str | None) -> str:
    if description == "default_pg":
        return "world"
    return f"group {name}" if description in (None, "", "undefined") else str(description)


def _ranks(text: Any) -> tuple[int, ...]:
    found = ast.literal_eval(text) if isinstance(text, str) else text
    return tuple(int(one) for one in found or ())


def _dump_message(one: Mapping[str, Any], groups: Mapping[str, Any], done: Mapping[str, int]) -> Message:
    name, description = (str(part) for part in one["process_group"])
    op, number = op_of(one["profiling_name"]), int(one["collective_seq_id"])
    if op == "all_reduce" and any(part["name"].startswith("reduce_scatter") for part in one.get("frames") or ()):
        op = "reduce_scatter"  # gloo has none: it sums everything, and keeps a part
    sizes = one["output_sizes"] if op == "all_gather" else one["input_sizes"] or one["output_sizes"]
    shape = tuple(int(size) for size in sizes[0]) if sizes else None
    peer = None
    if one.get("is_p2p"):
        number = int(one["p2p_seq_id"])
        found = re.search(r"(\d+)(?:->|<-)(\d+)", one["profiling_name"])
        peer = int(found[2]) if found else None
    axis = groups[name][0] if name in groups else _axis(name, description)
    state = "done" if one.get("retired") or one["state"] == "completed" else "open"
    if state == "open" and not one.get("is_p2p") and number <= done.get(str(one.get("pg_id")), -1):
        state = "done"
    frames = [part for part in one.get("frames") or () if not any(own in part["filename"] for own in _OWN)]
    frame = f"{frames[0]['filename']}:{frames[0]['line']} {frames[0]['name']}" if frames else None
    dtypes = one.get("input_dtypes") or [None]
    item = item_of(axis, op, shape, frame=frame)
    return Message(number, name, op, peer, shape, dtypes[0], float(one["time_created_ns"]) / 1e9, None, item, state)
