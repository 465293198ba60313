"""Dumps of torch's Flight Recorder, whichever engine ran.

torch's own analyzer unpickles whatever a file holds, and needs torch; a dump consists of plain values alone, so that
here every class is refused.
"""

from __future__ import annotations

import ast
import io
import json
import math
import pickle
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .records import MOST_RANKS, DamagedError, Message, Rank, item_of, op_of

_OWN = ("/torch/", "/deepspeed/comm/", "/deepspeed/utils/", "/contextlib.py", "/typing_extensions.py")
"""Frames of libraries that every collective passes."""


class _Plain(pickle.Unpickler):
    """Reads dictionaries, lists, tuples, text and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise DamagedError(f"it names {module}.{name}: a dump holds no such thing, and nothing of it was run")


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
        tree = json.loads(content) if content[:1] == b"{" else _Plain(io.BytesIO(content)).load()
        done = {str(pg): int(one["last_completed_collective"]) for pg, one in (tree.get("pg_status") or {}).items()}
        groups = {
            str(name): (_axis(str(name), one.get("desc")), _ranks(one.get("ranks")))
            for name, one in tree["pg_config"].items()
        }
        messages = [_message(one, groups, done) for one in tree["entries"]]
        size = max((_size(one) for one in tree["entries"]), default=0)
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
    return Rank(rank, source, size if rank < size else 0, groups, over)


def _size(one: Mapping[str, Any]) -> int:
    """Ranks of the group of a message, which gloo's dumps do not list: what is gathered has a part of each."""
    sizes = one["input_sizes"], one["output_sizes"]
    if op_of(one["profiling_name"]) not in ("all_gather", "reduce_scatter") or not all(sizes):
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


def _message(one: Mapping[str, Any], groups: Mapping[str, Any], done: Mapping[str, int]) -> Message:
    name, description = (str(part) for part in one["process_group"])
    op, number = op_of(one["profiling_name"]), int(one["collective_seq_id"])
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
