"""Contract: a launched job that cannot run says why before its first step: once, in bounded time, on every rank."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from launched import Ranks
from ranks import RankError, free_port, run_ranks
from training_runs import make_plan, samples

from parcompile.backends.artefacts import to_text
from parcompile.machines import Link, Measured, find_accelerator
from parcompile.plan import Plan, identified, plan_tree
from parcompile.runtime.preflight.findings import Finding, Verdict
from parcompile.runtime.preflight.live import Limits, check_job, live_check
from parcompile.runtime.preflight.live.agreement import (
    Arrived,
    checkpoint_bytes,
    compare_arrival,
    compare_memory,
    compare_places,
    compare_shared_memory,
)
from parcompile.runtime.preflight.live.facts import Facts
from parcompile.runtime.preflight.live.trial import Trial, compare_trials, slow_pairs
from parcompile.runtime.profiling.links import PairRate, rounds

LIMITS = Limits(wait_seconds=60, measure_seconds=0.5, whole_seconds=120)
GIB = 2**30
_SOURCES = ("memory_mib", "bf16_flops_per_s", "memory_bytes_per_s")


def outcome(rank: int, plan: Plan, limits: Limits = LIMITS, **options: Any) -> dict[str, Any]:
    """What the check says on this rank."""
    found = check_job(plan, speak=lambda report: None, limits=limits, **options)
    tree = None if found.report is None else found.report.to_json()
    text = "" if found.report is None else found.report.text()
    return {"passed": found.passed, "tree": tree, "text": text, "initialized": dist.is_initialized()}


def of_verdict(tree: dict[str, Any], verdict: str) -> dict[str, dict[str, Any]]:
    """Findings of a report by their subject."""
    return {one["subject"]: one for one in tree["findings"] if one["verdict"] == verdict}


def on_two_nodes(plan: Plan) -> Plan:
    cluster = plan.spec.cluster
    half = replace(cluster, nodes=2, gpus_per_node=cluster.gpus_per_node // 2)
    return identified(replace(plan, spec=replace(plan.spec, cluster=half)))


def with_machine(plan: Plan, bytes_per_s: float) -> Plan:
    """The same plan for a machine whose links were measured at that rate."""
    link = Link("node_link", "loopback", bytes_per_s, "a test", latency_seconds=1e-3)
    known = find_accelerator("cpu")
    machine = replace(
        known,
        name="lab",
        title="a lab",
        flops_per_s=1e6,
        fp32_flops_per_s=1e6,
        memory_bytes_per_s=1e9,
        node_link=link,
        network_link=link,
        sources=dict.fromkeys(_SOURCES, "a test"),
        measured=Measured(1e6, 1e-3),
    )
    return identified(replace(plan, spec=replace(plan.spec, cluster=replace(plan.spec.cluster, preset=machine))))


def check_then_train(rank: int, plan: Plan, folder: str) -> dict[str, Any]:
    from parcompile.runtime import initialize
    from parcompile.runtime.preflight.live import facts

    facts.node_name = lambda: f"host-{rank // 2}"
    found = outcome(rank, plan, checkpoints=folder)
    engine, _, loader, _ = initialize(plan=plan, training_data=samples(plan))
    return {**found, "loss": float(engine.train_batch(iter(loader)))}


@pytest.mark.ranks
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_a_sound_job_passes_with_one_report_and_goes_on_to_train(axis: str, tmp_path: Path) -> None:
    plan = on_two_nodes(make_plan(4, {axis: 2, "dp": 2}))
    found = run_ranks(4, check_then_train, plan, str(tmp_path / "new" / "folder"))
    assert all(one["passed"] for one in found)
    assert [one["tree"] is not None for one in found] == [True, False, False, False]
    tree = found[0]["tree"]
    assert not of_verdict(tree, "differs")
    agreeing = of_verdict(tree, "agrees")
    for subject in ("ranks that came", "plan", "torch", "deepspeed", "parcompile", "python", "precision"):
        assert subject in agreeing
    assert agreeing["process groups"]["ranks"] == [0, 1, 2, 3]
    assert agreeing["losses of 2 steps"]["ranks"] == [0, 1, 2, 3]
    assert {"memory of a node", "disk for a checkpoint"} <= agreeing.keys()
    measured = {one["subject"]: one for one in tree["findings"]}
    for subject in ("rate in a node", "rate between nodes", "latency in a node", "latency between nodes"):
        assert measured[subject]["found"].endswith(("GB/s", "us", "ms"))
    assert [(one["name"], one["ranks"]) for one in tree["nodes"]] == [("host-0", [0, 1]), ("host-1", [2, 3])]
    assert not list(tmp_path.iterdir())  # nothing is left behind, nothing made
    assert found[0]["loss"] == found[1]["loss"] > 0


def with_own_plan(rank: int, plans: list[Plan]) -> dict[str, Any]:
    return outcome(rank, plans[rank])


@pytest.mark.ranks
def test_a_rank_with_another_plan_is_named_before_anything_is_joined() -> None:
    plans = [make_plan(2, {"tp": 2}), make_plan(2, {"cp": 2})]
    found = run_ranks(2, with_own_plan, plans)
    assert [(one["passed"], one["initialized"]) for one in found] == [(False, False)] * 2
    wrong = of_verdict(found[0]["tree"], "differs")
    assert set(wrong) == {"plan"}
    assert wrong["plan"]["ranks"] == [1]
    assert plans[1].plan_hash.startswith(wrong["plan"]["found"])


def unless_last(rank: int, plan: Plan, folder: str) -> dict[str, Any] | None:
    """The first two come together."""
    Path(folder, str(rank)).touch()
    while not all(Path(folder, str(one)).exists() for one in range(2)):
        time.sleep(0.02)
    return None if rank == 2 else outcome(rank, plan, replace(LIMITS, wait_seconds=6))


@pytest.mark.ranks
def test_a_rank_that_never_comes_is_named_in_bounded_time(tmp_path: Path) -> None:
    started = time.monotonic()
    first, second, _ = run_ranks(3, unless_last, make_plan(3, {}, training={"global_batch_size": 3}), str(tmp_path))
    assert time.monotonic() - started < 600
    assert not first["passed"]
    assert not second["passed"]
    missing = of_verdict(first["tree"], "differs")["ranks that came"]
    assert (missing["planned"], missing["found"]) == ("3", "2")
    assert "rank 2 did not report within 6 s" in missing["detail"]
    assert "whose other ranks came" in missing["detail"]


def with_nan(rank: int, plan: Plan) -> dict[str, Any]:
    from parcompile.runtime.loss import ParallelCausalLoss
    from parcompile.runtime.preflight.live import trial

    right, initialize = ParallelCausalLoss.__call__, trial.initialize

    def initialized(**options: Any) -> Any:
        made = initialize(**options)  # with the self-check, which a loss that is no number would not pass
        if rank == 1:
            ParallelCausalLoss.__call__ = lambda *args, **given: right(*args, **given) * float("nan")
        return made

    trial.initialize = initialized
    return outcome(rank, plan)


@pytest.mark.ranks
def test_a_loss_that_is_no_number_on_one_rank_is_named() -> None:
    first, second = run_ranks(2, with_nan, make_plan(2, {}))
    assert not first["passed"]
    assert not second["passed"]
    wrong = of_verdict(first["tree"], "differs")
    assert set(wrong) == {"losses of 2 steps"}
    assert wrong["losses of 2 steps"]["ranks"] == [1]
    assert wrong["losses of 2 steps"]["found"].startswith("nan")
    assert first["tree"]["nodes"][0]["remarks"]


def with_little(rank: int, plan: Plan) -> dict[str, Any]:
    from parcompile.runtime.preflight.live import facts

    facts.host_memory = lambda: 2**20
    facts.disk_of = lambda folder: (str(folder), 1000, "")
    return outcome(rank, plan)


@pytest.mark.ranks
def test_too_little_memory_and_disk_are_told_before_a_step_is_tried() -> None:
    first, _ = run_ranks(2, with_little, make_plan(2, {"tp": 2}))
    wrong = of_verdict(first["tree"], "differs")
    assert set(wrong) == {"memory of a node", "disk for a checkpoint"}
    assert wrong["memory of a node"]["found"] == "1.00 MiB free"
    assert "2 ranks ×" in wrong["memory of a node"]["detail"]
    assert "losses of 2 steps" in of_verdict(first["tree"], "not run")


def with_other_groups(rank: int, plan: Plan) -> dict[str, Any]:
    from parcompile.runtime.preflight import live

    right = live.join

    def joined(plan: Plan, **options: Any) -> Any:
        mesh = right(plan, **options)
        return replace(mesh, groups={**mesh.groups, "tp": mesh.groups["dp"], "dp": mesh.groups["tp"]})

    live.join = joined
    return outcome(rank, plan)


@pytest.mark.ranks
def test_groups_that_answer_otherwise_than_planned_are_named() -> None:
    first, _ = run_ranks(2, with_other_groups, make_plan(2, {"tp": 2}))
    details = [one["detail"] for one in first["tree"]["findings"] if one["verdict"] == "differs"]
    assert "group tp of rank 0 is [0], the plan says [0, 1]" in details
    assert "group dp of rank 1 is [0, 1], the plan says [1]" in details


def fails_on_one(rank: int, plan: Plan, file: str) -> None:
    from parcompile.runtime.preflight import live

    if rank == 1:
        live.compare_live_groups = lambda mesh: {}["x"]
    report = Path(file)
    check_job(
        plan,
        speak=lambda found: report.write_text(json.dumps(found.to_json())),
        checkpoints=report.parent,
        limits=LIMITS,
    )


@pytest.mark.ranks
def test_an_error_on_one_rank_is_reported_by_a_rank_that_waits_for_it_and_ends(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="exit code 1"):
        run_ranks(2, fails_on_one, make_plan(2, {}), str(tmp_path / "report.json"))
    tree = json.loads((tmp_path / "report.json").read_text())
    found = of_verdict(tree, "differs")["process groups"]
    assert found["ranks"] == [1]
    assert "KeyError: 'x' (test_live_preflight.py:" in found["detail"]
    assert [one.name for one in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.ranks
def test_links_slower_than_the_preset_says_are_odd_and_do_not_fail() -> None:
    first, _ = run_ranks(2, outcome, with_machine(make_plan(2, {}), 1e15))
    assert first["passed"]
    odd = of_verdict(first["tree"], "odd")["rate in a node"]
    assert odd["planned"] == "1000 TB/s"
    assert "of what the estimate counts on; preset cpu: loopback" in odd["detail"]


def raises(rank: int, plan: Plan) -> str:
    from parcompile.runtime import RunError

    try:
        live_check(plan, limits=LIMITS)
    except RunError as error:
        assert error.everywhere
        return str(error)
    return ""


@pytest.mark.ranks
def test_a_plan_that_no_rank_can_read_is_told_once(tmp_path: Path) -> None:
    first, second = run_ranks(2, outcome, str(tmp_path / "nowhere"))
    assert (first["passed"], second["passed"], second["tree"]) == (False, False, None)
    assert first["tree"]["reason"] == f"{tmp_path}/nowhere cannot be read: No such file or directory"


@pytest.mark.ranks
def test_a_script_gets_one_error_on_every_rank() -> None:
    first, second = run_ranks(2, raises, make_plan(4, {"tp": 2}))
    assert "start 4 on each of 1 node(s), or compile the spec for 2" in first
    assert second == "1 comparison(s) differ"


def check_with(folder: Path, plant: str, *options: str) -> None:
    """The command on two ranks, of which the second dies or hangs while links are measured."""
    from parcompile.cli import main
    from parcompile.runtime.preflight import live
    from parcompile.runtime.preflight.live import session

    session.SILENT_SECONDS = 6
    if os.environ["RANK"] == "1":
        plants = {"die": lambda *_: os.kill(os.getpid(), signal.SIGKILL), "hang": lambda *_: time.sleep(600)}
        live.measure = plants[plant]
    sys.argv = ["parcompile", "preflight", str(folder), "--live", "--seconds", "1", *options]
    main()


def two_ranks(folder: Path, plant: str, *options: str) -> Ranks:
    """As a launcher would start them, after they have ended."""
    (folder / "plan.json").write_text(to_text(plan_tree(make_plan(2, {}))), encoding="utf-8")
    job = Ranks(folder, 2, check_with, plant, *options, PARCOMPILE_HEARTBEAT="0")
    try:
        job.end(within=600)
    finally:
        job.kill()
    return job


@pytest.mark.ranks
def test_a_rank_that_dies_meanwhile_is_named_and_the_others_end(tmp_path: Path) -> None:
    job = two_ranks(tmp_path, "die")
    assert job.end(within=0) == [1, -9]
    assert job.text(0).count("live preflight of tiny") == 1
    assert "silent since links; its process has ended or is stopped" in job.text(0)
    assert "Traceback" not in job.text(0)


@pytest.mark.ranks
def test_a_rank_that_hangs_ends_with_all_others_at_the_limit(tmp_path: Path) -> None:
    job = two_ranks(tmp_path, "hang", "--wait", "15", "--limit", "5", "--format", "json")
    assert job.end(within=0) == [1, 1]
    text = job.text(0)
    tree = json.loads(text[text.index("{\n") : text.rindex("}") + 1])
    assert tree["reason"] == "the check was not through within 20 s"
    wrong = of_verdict(tree, "differs")
    assert set(wrong) == {"links"}
    assert "{" not in job.text(1)
    assert "Traceback" not in text + job.text(1)


@pytest.mark.ranks
def test_the_commands_of_the_page_run_under_the_launch_files_of_a_plan(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "preflight.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\$ (bash plan/launch/.*)$", page, re.MULTILINE)
    assert [line.split()[1] for line in shown] == ["plan/launch/torchrun.sh", "plan/launch/deepspeed.sh"]
    spec = {
        "version": 1,
        "name": "tiny",
        "model": {**make_plan(2, {}).spec.model.hf_config},
        "cluster": {"gpus_per_node": 2, "accelerator": "cpu"},
        "parallelism": {"tp": 2},
        "training": {"sequence_length": 16, "global_batch_size": 2, "precision": "fp32"},
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(line: str) -> subprocess.CompletedProcess[str]:
        environment["MASTER_PORT"] = str(free_port())
        command = shlex.split(line, comments=True)
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )

    assert run("parcompile spec.json -o plan").returncode == 0
    for line in shown:
        done = run(f"{line} --seconds 1")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("live preflight of tiny: 2 ranks on 1 node(s)") == 1


def facts_of(plan: Plan, **changes: dict[int, Any]) -> Arrived:
    """Ranks that report alike, but for what `changes` gives some of them."""
    common = {
        "world_size": plan.world_size,
        "node": "host-0",
        "plan": plan.plan_hash,
        "versions": {"torch": "2"},
        "dtypes": ["fp32", "bf16"],
        "device": "gpu",
        "device_free_bytes": 80 * GIB,
        "host_free_bytes": 500 * GIB,
        "shared_free_bytes": 16 * GIB,
        "disk_folder": "/runs",
        "disk_free_bytes": 500 * GIB,
        "disk_failure": "",
        "variables": {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    }
    ranks = (
        Facts(rank=rank, **{**common, **{name: by_rank[rank] for name, by_rank in changes.items() if rank in by_rank}})
        for rank in range(plan.world_size)
    )
    return Arrived(plan, plan.world_size, tuple(ranks))


def wrong(findings: Any) -> list[tuple[int, str, str, str]]:
    return [
        (one.rank, one.subject, one.found, one.verdict.value) for one in findings if one.verdict is not Verdict.AGREES
    ]


def test_stray_versions_and_precisions_are_named_and_not_the_many() -> None:
    plan = make_plan(4, {"tp": 2})
    arrived = facts_of(plan, versions={0: {"torch": "1"}}, dtypes={3: ["bf16"]})
    assert wrong(compare_arrival(arrived, 1)) == [
        (0, "torch", "1", "DIFFERS"),
        (3, "precision", "bf16", "DIFFERS"),
    ]


def test_ranks_that_are_not_numbered_node_by_node_are_refused() -> None:
    plan = on_two_nodes(make_plan(4, {"tp": 2}))
    around = {rank: f"host-{rank % 2}" for rank in range(4)}
    found = wrong(compare_places(facts_of(plan, node=around)))
    assert found == [
        (0, "ranks 0 to 1", "2 nodes: host-0, host-1", "DIFFERS"),
        (2, "ranks 2 to 3", "2 nodes: host-0, host-1", "DIFFERS"),
    ]
    in_order = {rank: f"host-{rank // 2}" for rank in range(4)}
    other = {rank: {"OMP_NUM_THREADS": "8", "DS_ACCELERATOR": "cpu"} for rank in (2, 3)}
    found = wrong(compare_places(facts_of(plan, node=in_order, variables=other, device={1: "older gpu"})))
    assert found == [
        (1, "device", "older gpu", "odd"),
        (2, "OMP_NUM_THREADS", "8", "odd"),
        (3, "OMP_NUM_THREADS", "8", "odd"),
    ]


def test_a_full_device_and_a_small_shm_are_named() -> None:
    plan = make_plan(2, {"tp": 2})
    found = wrong(compare_memory(facts_of(plan, device_free_bytes={1: 2**20})))
    assert found == [(1, "device memory", "1.00 MiB free", "DIFFERS")]
    small = dict.fromkeys(range(2), 64 * 2**20)
    found = wrong(compare_shared_memory(facts_of(plan, shared_free_bytes=small)))
    assert found == [(0, "shared memory of a node", "64.00 MiB free", "odd")]
    full = dict.fromkeys(range(2), 2**20)
    found = wrong(compare_shared_memory(facts_of(plan, shared_free_bytes=full)))
    assert found == [(0, "shared memory of a node", "1.00 MiB free", "DIFFERS")]


def test_a_checkpoint_takes_what_is_counted() -> None:
    # 2 tp ranks with 2 shards each: fp32 weights, master weights and two moments.
    plan = make_plan(4, {"tp": 2, "dp": 2})
    numel = plan_tree(plan)["static_memory"]["padded_numel"]
    assert checkpoint_bytes(plan) == pytest.approx(2 * numel * 16, rel=1e-3)


def test_a_slow_rank_is_the_one_whose_pairs_are_all_slow() -> None:
    ring = [(0, 1, 9.0), (1, 2, 2.0), (2, 3, 3.0), (3, 4, 10.0), (4, 0, 10.0)]
    pairs = [PairRate("node", rank, peer, rate) for rank, peer, rate in ring]
    assert list(slow_pairs(pairs)) == [2]
    one = [pair if pair.rank != 2 else replace(pair, bytes_per_s=9.0) for pair in pairs]
    assert list(slow_pairs(one)) == [1, 2]
    assert slow_pairs(pairs[:2]) == {}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_rounds_reach_every_neighbour_and_nobody_twice_in_one(count: int) -> None:
    found = rounds(list(range(10, 10 + count)))
    assert len(found) == 3
    for pairs in found:
        members = [rank for pair in pairs for rank in pair]
        assert len(members) == len(set(members))
    every = {frozenset(pair) for pairs in found for pair in pairs}
    assert every == {frozenset((10 + index, 10 + (index + 1) % count)) for index in range(count)}


def trials(losses: list[float], norms: list[float] | None = None) -> list[Trial]:
    return [
        Trial([loss, loss], [norm, norm], [1.0, 1.0], 1, False)
        for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True)
    ]


def faulty(plan: Plan, found: list[Trial]) -> list[Finding]:
    return [one for one in compare_trials(facts_of(plan), found) if one.verdict is not Verdict.AGREES]


def test_a_replica_that_computes_otherwise_is_named() -> None:
    plan = make_plan(4, {"cp": 2})
    assert not faulty(plan, trials([1.0, 2.0, 1.5, 1.5]))  # parts of a replica's loss may differ
    assert [
        one.rank for one in faulty(make_plan(3, {}, training={"global_batch_size": 3}), trials([3.0, 3.0, 3.1]))
    ] == [2]
    assert [one.rank for one in faulty(plan, trials([1.0, 2.0, 1.5, 1.5], [1.0, 1.0, 1.0, 1.2]))] == [3]


def test_a_loss_scale_that_is_still_too_high_is_no_fault() -> None:
    training = {"precision": "fp16", "global_batch_size": 2}
    infinite = trials([3.0, 3.0], [float("inf")] * 2)
    assert not faulty(make_plan(2, {}, training=training), infinite)
    assert [one.rank for one in faulty(make_plan(2, {}), infinite)] == [0, 1]
