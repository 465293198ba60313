"""What ranks record of their messages, while they run and when one of them is killed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parcompile.doctor import judge, read_all
from parcompile.doctor.records import KEPT, file_name
from parcompile.runtime.liveness import records
from parcompile.runtime.liveness.recording import name_groups, start
from parcompile.runtime.local import LocalWorld

pytestmark = pytest.mark.ranks


def begin(rank: int, folder: str) -> None:
    records.folder = Path(folder)
    start(rank, 2, {"plan": "one"})


def talk(rank: int) -> dict[str, Any]:
    """Messages of all kinds; what is recorded of them."""
    group = dist.new_group([0, 1])
    name_groups({"tp": group})
    held = sys.getrefcount(x := torch.ones(4))
    for step in range(1, 4):
        records.at(step=step, layer=step + 1)
        dist.all_reduce(x, group=group)
        dist.broadcast(x, 1, group=group)
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank, group=group)
        records.end_step(step)
    assert sys.getrefcount(x) == held + 1  # the name
    return records.to_json()


def test_messages_are_recorded_with_their_places_and_their_ends(tmp_path: Path) -> None:
    with LocalWorld(2) as world:
        world.run(begin, str(tmp_path))
        first, second = world.run(talk)
        shown = [
            (one["op"], one["number"], one["peer"], one["shape"], one["step"], one["layer"], one["state"])
            for one in first["messages"]
        ]
        assert shown[:3] == [
            ("allreduce", 1, None, (4,), 1, 2, "done"),
            ("broadcast", 2, 1, (4,), 1, 2, "done"),
            ("send", 1, 1, (4,), 1, 2, "done"),
        ]
        assert [one["op"] for one in second["messages"]][-1] == "recv"
        assert [(one["step"], one["bytes"] > 0) for one in first["steps"]] == [(1, True), (2, True), (3, True)]
        (name,) = first["groups"]
        assert first["groups"][name] == {"axis": "tp", "ranks": [0, 1]}
        # Both processes are killed: what the system has of the mapped files is there.
    found = read_all([tmp_path])
    assert sorted(found.ranks) == [0, 1]
    assert str(found.ranks[1].messages[0]) == "all_reduce [4] on tp, layer 2, micro-batch 0, starting"
    assert len(found.ranks[0].messages) == 9


def wait_in_vain(rank: int) -> None:
    dist.distributed_c10d._set_pg_timeout(__import__("datetime").timedelta(seconds=1), dist.group.WORLD)
    x = torch.ones(2)
    for step in range(KEPT):
        records.at(step=step + 1)
        dist.all_reduce(x)
    if rank == 0:
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(x)
        records.write("timed out")
        assert records.messages[-1].state() == "failed"
        assert len(records.messages) == KEPT
    else:
        time.sleep(1.5)
        records.write("SIGUSR1")


def test_who_waits_for_whom_is_read_from_what_is_written(tmp_path: Path) -> None:
    with LocalWorld(2) as world:
        world.run(begin, str(tmp_path))
        world.run(wait_in_vain)
    assert json.loads((tmp_path / file_name(0)).read_text())["events"] == ["timed out"]
    found = judge(read_all([tmp_path]))
    assert (found.kind, found.cause, found.ranks, found.axis, found.step) == ("hang", "busy", (1,), "world", KEPT)
    assert "rank 0 waits in all_reduce [2] on world" in found.evidence[0]
