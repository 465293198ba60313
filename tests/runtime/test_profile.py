"""`parcompile profile`: what it measures, and that a spec can use what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import RankError, forked_world, free_port

from parcompile import schema
from parcompile.cost.step import timing
from parcompile.machines import read_preset
from parcompile.pipeline import compile_file
from parcompile.plan import plan_from_tree, plan_tree
from parcompile.runtime.profiling import RankProfile, measure_rank, preset, slowest
from parcompile.runtime.profiling.links import NETWORK, NODE, LinkRate, Rate, link_classes
from parcompile.spec.values import workload_of


def command(*arguments: str, folder: Path, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    line = [*(launcher or (sys.executable, "-m", "parcompile")), "profile", *arguments]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.ranks
def test_ranks_under_the_launcher_write_one_preset_that_a_spec_can_use(tmp_path: Path) -> None:
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    start = (launcher, "--num_gpus", "2", "--master_port", str(free_port()), "--module", "parcompile")
    done = command("--seconds", "1", "-o", "box.json", folder=tmp_path, launcher=start)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("wrote box.json") == 1
    tree = json.loads((tmp_path / "box.json").read_text(encoding="utf-8"))
    assert schema.validate(tree, "accelerator").valid
    assert tree["node_link"]["bytes_per_s"] > 1e6
    assert tree["node_link"]["latency_seconds"] > 0
    assert tree["network_link"]["source"].startswith("not measured but assumed; ranks on two nodes measure it")
    collectives = {one["collective"] for one in tree["measurements"]["links"]}
    assert collectives == {"all-reduce", "all-gather", "reduce-scatter", "ring exchange"}

    spec = {
        "version": 1,
        "model": {"preset": "llama-3.2-1b"},
        "cluster": {"gpus_per_node": 2, "accelerator": "box.json"},
        "parallelism": {"tp": 2},
        "training": {"sequence_length": 512, "global_batch_size": 1, "precision": "fp32"},
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    plan, checked = compile_file(tmp_path / "spec.json")
    assert plan is not None, checked.diagnostics
    assert plan_from_tree(plan_tree(plan)).spec.cluster.preset == read_preset(tmp_path / "box.json")
    # No work of this plan runs faster than what was measured.
    work = workload_of(plan.spec)
    products = 6 * 1_235_814_400 / 2 * 512 / tree["fp32_flops_per_s"]
    assert timing(work).step.compute >= products
    assert timing(work).step.tensor >= 4 * 16 * 512 * 2048 * 4 / tree["node_link"]["bytes_per_s"]


def test_one_process_measures_itself_and_takes_its_links_from_the_preset_it_is_like(tmp_path: Path) -> None:
    done = command("--seconds", "1", "-o", "alone.json", "--name", "alone", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    machine = read_preset(tmp_path / "alone.json")
    assert machine.name == "alone"
    assert machine.measured is not None
    assert machine.like == "cpu"
    # A bf16 product may be slow on a CPU, an fp32 one of a core is between these whatever the machine.
    assert 1e9 < machine.fp32_flops_per_s < 1e14
    assert machine.node_link.source.startswith("not measured but assumed; --ranks 2 measures it")
    assert "0.00 s" not in done.stdout  # a latency that is not known
    assert [one.name for one in tmp_path.iterdir()] == ["alone.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "box.txt"), "write box.txt.json"),
        (("-o", "nowhere/box.json"), "there is no folder nowhere; create it first"),
        (("--seconds", "nan"), "nan is not a finite number above 0"),
        (("--seconds", "0.5"), "0.5 is not in the range 1<=x<=3600"),
        (("--ranks", "1"), "--ranks"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_measured(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = command(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def broken_measurement(rank: int) -> object:
    from parcompile.runtime.profiling import links

    if rank == 1:
        links.MATMUL_SIZES = (10**9,)  # type: ignore[assignment]
    return measure_rank(rank, 1.0, None, None)


@pytest.mark.ranks
def test_a_rank_that_cannot_measure_ends_all_with_its_name() -> None:
    with forked_world(2) as world, pytest.raises(RankError, match="rank 1 could not be measured"):
        world.run(broken_measurement, timeout=600)


def test_links_are_measured_in_nodes_and_between_the_same_places_of_nodes() -> None:
    assert link_classes(["a", "a", "b", "b"]) == {NODE: [[0, 1], [2, 3]], NETWORK: [[0, 2], [1, 3]]}
    assert link_classes(["a", "b", "a", "b"]) == {NODE: [[0, 2], [1, 3]], NETWORK: [[0, 1], [2, 3]]}
    assert link_classes(["a", "b"]) == {NETWORK: [[0, 1]]}
    assert link_classes(["a"]) == {}
    with pytest.raises(ValueError, match="different numbers of ranks"):
        link_classes(["a", "a", "b"])


def own(node: str, speed: float, largest: int) -> RankProfile:
    kinds = [
        ("matmul", "bf16"),
        ("matmul", "fp32"),
        ("attention", "fp32"),
        ("memory", "fp32"),
        ("layer launch", "fp32"),
    ]
    sizes = (256, largest) if largest > 256 else (256,)
    rates = [Rate(what, dtype, size, 1.0, speed) for what, dtype in kinds for size in sizes]
    return RankProfile(node, "a machine", 80 * 2**30, tuple(rates))


def test_the_slowest_rank_and_what_all_measured_make_the_preset() -> None:
    ranks = [own("a", 3e12, 512), own("b", 2e12, 256)]
    assert {rate.size for rate in slowest(ranks)} == {256}
    links = [
        LinkRate(NETWORK, "all-reduce", 2, 2**10, 2**10, 1e-5),
        LinkRate(NETWORK, "all-reduce", 2, 2**28, 2**28, 1e-2),
        LinkRate(NETWORK, "ring exchange", 2, 2**28, 2**28, 1e-4),
    ]
    found = preset(ranks, links, "h100-sxm", None, threads=None)
    assert found.flops_per_s == 2e12
    assert found.memory_bytes == 80 * 2**30
    assert found.network_link.bytes_per_s == pytest.approx(2**28 / 1e-2, rel=1e-3)
    assert found.network_link.latency_seconds == 1e-5
    assert found.node_link.source.startswith("not measured")
