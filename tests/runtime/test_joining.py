"""Contract: ranks that do not fit together say so, each of them, before any collective, and none waits for ever."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from families import tiny_config
from launched import Ranks
from ranks import run_ranks
from training_runs import make_plan

from parcompile.plan import Plan, PlanError, load_plan, plan_tree
from parcompile.runtime import RunError, join
from parcompile.runtime.groups import leave

pytestmark = pytest.mark.ranks


def join_and_report(rank: int, plans: list[Plan]) -> dict[str, object]:
    """What joining says on this rank."""
    try:
        mesh = join(plans[rank % len(plans)])
    except RunError as error:
        return {"error": str(error), "everywhere": error.everywhere, "initialized": dist.is_initialized()}
    return {
        "groups": {name: dist.get_process_group_ranks(group) for name, group in mesh.groups.items()},
        "device": str(mesh.device),
    }


def test_live_groups_are_the_planned_ones() -> None:
    plan = make_plan(8, {"tp": 4, "cp": 2})
    for rank, found in enumerate(run_ranks(8, join_and_report, [plan])):
        planned = {name: list(plan.groups.of_rank(name, rank)) for name in plan.groups.names}
        assert found["groups"] == planned
        assert planned["kv-replica"] == [rank // 2 * 2, rank // 2 * 2 + 1]


def initialize_without(_: int, plan: Plan, package: str) -> tuple[str, bool]:
    """What a run hears of a package that is not installed."""
    from parcompile.runtime import initialize

    real = importlib.util.find_spec
    without = {"find_spec": lambda name, *at: None if name == package else real(name, *at)}
    with mock.patch.multiple(importlib.util, **without), pytest.raises(RunError) as raised:
        initialize(plan=plan)
    return str(raised.value), raised.value.everywhere


@pytest.mark.parametrize("section", ["tensorboard", "wandb", "comet"])
def test_a_monitor_of_deepspeed_that_is_not_installed_is_named_on_every_rank(section: str) -> None:
    """DeepSpeed imports it on rank 0 alone, while it makes the engine."""
    plan = make_plan(2, {}, extra={"deepspeed": {section: {"enabled": True}, "csv_monitor": {"enabled": "false"}}})
    package = {"comet": "comet_ml"}.get(section, section)
    said = set(run_ranks(2, initialize_without, plan, package))
    ((text, everywhere),) = said
    assert everywhere
    assert text.startswith(f"rank 0: deepspeed.{section} of the spec is enabled, and {package} is not installed on ")
    assert f"pip install {package}, or remove deepspeed.{section}" in text


def join_one_after_the_other(_: int, plans: list[Plan], port: int | None) -> list[tuple[int, int]]:
    if port is not None:
        os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    sizes = []
    for plan in plans:
        mesh = join(plan)
        total = torch.ones(1)
        dist.all_reduce(total, group=mesh.group("tp"))
        sizes.append((int(total), mesh.size("cp")))
        leave()
    return sizes


@pytest.mark.parametrize("agent", [False, True], ids=["store in rank 0", "store of torchrun"])
def test_a_plan_can_be_left_for_another(agent: bool) -> None:
    plans = [make_plan(2, {"tp": 2}), make_plan(2, {"cp": 2}), make_plan(2, {"tp": 2})]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port if agent else None
    assert run_ranks(2, join_one_after_the_other, plans, port) == [[(2, 1), (1, 2), (2, 1)]] * 2


def test_a_plan_for_another_world_size_is_refused_on_every_rank_before_anything_is_initialised() -> None:
    for found in run_ranks(2, join_and_report, [make_plan(4, {"tp": 2})]):
        assert "plan 'tiny' is for 4 ranks, this job has 2" in str(found["error"])
        assert "--num_gpus 4" in str(found["error"])
        assert found["everywhere"]
        assert not found["initialized"]


def test_different_plans_are_named_on_every_rank() -> None:
    plans = [make_plan(2, {"tp": 2}), make_plan(2, {"cp": 2})]
    first, second = run_ranks(2, join_and_report, plans)
    assert first == second
    assert first["error"] == (
        f"the ranks do not run the same: rank 1 has plan {plans[1].plan_hash}, rank 0 has {plans[0].plan_hash}"
    )
    assert not first["initialized"]


def test_a_plan_that_the_runtime_does_not_execute_is_refused_with_its_rule() -> None:
    plan = make_plan(2, {}, model=tiny_config("phimoe") | {"sliding_window": 8}, whole_model=True)
    for found in run_ranks(2, join_and_report, [plan]):
        assert "[X004] " in str(found["error"])
        assert "sliding_window" in str(found["error"])


def join_as(_: Path, plan: Plan, environment: dict[str, str]) -> None:
    """A rank that is started by hand."""
    os.environ.update(environment)
    join(plan)


def started(folder: Path, **environment: str) -> str:
    """What one rank of two says, which ends with an error."""
    given = {"WORLD_SIZE": "2", "PARCOMPILE_HANDSHAKE_TIMEOUT": "2", **environment}
    job = Ranks(folder, 1, join_as, make_plan(2, {"tp": 2}), given)
    assert job.end(within=600) == [1]
    assert "Traceback" not in job.text(0)
    return job.text(0)


def test_a_rank_that_never_comes_is_named_within_the_time_out(tmp_path: Path) -> None:
    assert "rank 1 of 2 did not report within 2 s" in started(tmp_path, RANK="0")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "x"),
        ("RANK", "5"),
        ("WORLD_SIZE", "-2"),
        ("MASTER_PORT", "http"),
        ("PARCOMPILE_SILENT_TIMEOUT", "soon"),
    ],
)
def test_a_wrong_environment_variable_is_named(tmp_path: Path, name: str, value: str) -> None:
    assert name in started(tmp_path, **{"RANK": "1", name: value})


def test_another_program_on_the_port_is_an_error_in_time(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        said = started(tmp_path, RANK="1", MASTER_PORT=str(listener.getsockname()[1]))
    assert "rank 1 cannot reach the other ranks through 127.0.0.1:" in said


@pytest.mark.parametrize("host", ["no.such.host.invalid", "x" * 70, ""])
def test_a_name_that_no_host_has_is_told_at_once_and_ends_in_time(tmp_path: Path, host: str) -> None:
    said = started(tmp_path, RANK="1", LOCAL_RANK="0", MASTER_ADDR=host)
    waits, error = (line for line in said.splitlines() if "parcompile: " in line)
    assert f"rank 1 waits up to 2 s: MASTER_ADDR is {host!r}, and no name that host " in waits
    assert f"rank 1 cannot reach the other ranks through {host}:" in error
    assert f"MASTER_ADDR is {host!r}, and no name that host " in error
    assert "Write the name or the address of rank 0's node" in error


def join_after_another(rank: int, plans: list[Plan]) -> str:
    """The second plan differs from rank to rank; the first rank comes late."""
    import torch.distributed as dist

    from parcompile.runtime import RunError, join, leave

    dist.init_process_group("gloo")
    join(plans[0])
    leave()
    # Otherwise gloo may find the addresses of the first world, where nobody listens any more.
    dist.distributed_c10d._world.group_count = 100
    dist.init_process_group("gloo")
    time.sleep(0 if rank else 1)
    try:
        join(plans[1 + rank])
    except RunError as error:
        return str(error)
    return "joined"


def test_a_statement_that_is_none_is_an_error() -> None:
    import torch.distributed as dist

    from parcompile.runtime import RunError
    from parcompile.runtime.groups import agree

    store = dist.HashStore()
    for key in ("1", "read/1"):
        store.set(f"parcompile/handshake/{key}", "\x00{")
    with pytest.raises(RunError, match="in the store for rank 1 is no statement"):
        agree(store, 0, 2, {"plan": "x"}, timedelta(seconds=5))


def test_a_second_plan_does_not_read_the_verdict_on_the_first() -> None:
    plans = [make_plan(2, {"tp": 2}), make_plan(2, {"cp": 2}), make_plan(2, {})]
    for found in run_ranks(2, join_after_another, plans):
        assert "the ranks do not run the same" in found


def timeouts(rank: int, plan: Plan) -> dict[str, float]:
    """Seconds, of every group."""
    import torch
    import torch.distributed as dist

    from parcompile.runtime import join

    os.environ["PARCOMPILE_COLLECTIVE_TIMEOUT"] = "77"
    groups = {"world": None, **join(plan).groups}
    groups["world"] = dist.group.WORLD
    return {
        name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds()  # type: ignore[union-attr]
        for name, group in groups.items()
    }


def test_the_time_of_collectives_holds_for_every_group() -> None:
    found = run_ranks(2, timeouts, make_plan(2, {"tp": 2}))[0]
    assert len(found) > 3
    assert set(found.values()) == {77.0}


def test_a_plan_that_was_edited_by_hand_is_refused(tmp_path: Path) -> None:
    from parcompile.backends.artefacts import to_text

    file = tmp_path / "plan.json"
    text = to_text(plan_tree(make_plan(2, {"tp": 2})))
    file.write_text(text.replace('"sequence_length": 16', '"sequence_length": 32'), encoding="utf-8")
    with pytest.raises(PlanError, match="changed after it was compiled"):
        load_plan(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "is not a plan"),
        ('{"plan_version": 99}', "plan_version is 99"),
    ],
)
def test_what_is_not_a_plan_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=message):
        load_plan(tmp_path)


def test_a_missing_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        load_plan(tmp_path / "nowhere")
