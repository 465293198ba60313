"""What ranks record of their messages, while they run and when one of them is killed."""

from __future__ import annotations

import copy
import json
import socket
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import forked_world
from torch import nn

from parcompile.doctor import judge, read_all
from parcompile.doctor.records import KEPT, file_name, ring_name
from parcompile.runtime.liveness import recording, records
from parcompile.runtime.liveness.recording import Records, name_groups, start

pytestmark = pytest.mark.ranks


def begin(rank: int, folder: str) -> None:
    records.folder = Path(folder)
    start(rank, 2, {"plan": "one"})


def talk(rank: int) -> dict[str, Any]:
    """Messages of all kinds; what is recorded of them."""
    group = dist.new_group([0, 1])
    name_groups({"tp": group})
    held = weakref.ref(x := torch.ones(4))
    for step in range(1, 4):
        records.at(step=step, layer=step + 1)
        dist.all_reduce(x, group=group)
        dist.broadcast(x, 1, group=group)
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank, group=group)
        records.end_step(step)
    del x
    for _ in range(100):  # gloo's threads let go of it a moment later
        if held() is not None:
            time.sleep(0.05)
    assert held() is None
    return records.to_json()


def test_messages_are_recorded_with_their_places_and_their_ends(tmp_path: Path) -> None:
    with forked_world(2) as world:
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


class Layered(nn.Module):
    """Two layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.layers:
            x = torch.tanh(one(x))
        return x


def test_what_is_recorded_of_layers_changes_no_number_and_names_the_first_that_is_none() -> None:
    torch.manual_seed(0)
    plain, x = Layered(), torch.randn(4, 8)
    followed, own = copy.deepcopy(plain), Records()
    own.facts = {"rank": 0}
    own.follow_layers(followed, "layers")
    for model in (plain, followed):
        model(x).square().sum().backward()
    for one, other in zip(plain.parameters(), followed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    own.look_for_nonfinite()
    assert own.nonfinite is None
    own.end_step(1)
    with torch.no_grad():
        followed.layers[1].weight[0, 0] = torch.inf  # type: ignore[union-attr,operator]
    followed(x).sum().backward()
    own.look_for_nonfinite()
    assert own.nonfinite is not None
    assert (own.nonfinite["step"], own.nonfinite["layer"], own.nonfinite["parameter"]) == (2, 1, "weight")


def test_connections_that_are_lost_and_waits_for_a_processor_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    starved = iter((1.0, 3.5, 3.5))
    monkeypatch.setattr(recording, "_starved_seconds", lambda: next(starved))
    own = Records()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        own.begin_step()
        own.end_step(1)
        accepted.close()
        own.fail(None)
        first = dict(own.to_json()["links"])
        time.sleep(0.01)
        own.fail(None)
    links = own.to_json()["links"]
    assert links == first
    assert links["left"] == links["of"] - 2  # both ends are of this process
    (row,) = own.to_json()["steps"]
    assert row["starved_seconds"] == 2.5


def test_nothing_is_recorded_where_the_user_wants_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARCOMPILE_RECORDS", "0")
    monkeypatch.setattr(records, "facts", {})
    post, model = dist.ProcessGroup.allreduce, Layered()
    start(0, 2, {})
    records.follow_layers(model, "layers")
    assert dist.ProcessGroup.allreduce is post
    assert not records.facts
    assert not model.layers[0]._forward_hooks


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
    with forked_world(2) as world:
        world.run(begin, str(tmp_path))
        world.run(wait_in_vain)
    assert json.loads((tmp_path / file_name(0)).read_text())["events"] == ["timed out"]
    found = judge(read_all([tmp_path]))
    assert (found.kind, found.cause, found.ranks, found.axis, found.step) == ("hang", "busy", (1,), "world", KEPT)
    assert "rank 0 waits in all_reduce [2] on world" in found.evidence[0]


def test_a_second_job_in_the_folder_takes_a_new_file_and_no_link_is_followed(tmp_path: Path) -> None:
    ring, other = tmp_path / "records" / ring_name(0), tmp_path / "other"
    other.write_text("of someone else")
    ring.parent.mkdir()
    ring.symlink_to(other)
    jobs = [Records(), Records()]
    for job in jobs:
        job.facts, job.folder = {"rank": 0}, ring.parent
        job.open_ring()
    assert other.read_text() == "of someone else"
    first, second = (job._ring for job in jobs)
    assert first is not None
    assert second is not None
    first[:5] = b"first"
    assert second[:5] != b"first"
    assert ring.read_bytes() == second[:]


def test_a_list_of_layers_whose_names_are_no_numbers_is_passed_over() -> None:
    model, own = nn.Module(), Records()
    model.layers = nn.ModuleDict({"first": nn.Linear(2, 2)})
    own.facts = {"rank": 0}
    own.follow_layers(model, "layers")
    assert not model.layers["first"]._forward_hooks


def test_ranks_that_were_killed_together_are_named(tmp_path: Path) -> None:
    for rank in range(2):
        one = Records()
        one.facts, one.folder = {"rank": rank, "world_size": 2}, tmp_path
        one.open_ring()
    verdict = judge(read_all([tmp_path]))
    assert verdict.kind == "nothing"
    assert "ranks 0, 1 left no word of an end" in verdict.summary
    assert "they were killed together" in verdict.advice[-1]
