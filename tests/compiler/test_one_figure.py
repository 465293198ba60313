"""The same thing has the same figure wherever it is shown: compile, estimate, diff, view, search and the plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from layout_cases import compile_tree, spec_tree

from parcompile.cli import cli
from parcompile.cost.footprint import footprint
from parcompile.cost.memory import static_memory
from parcompile.cost.step import timing
from parcompile.machines import accelerators
from parcompile.model.presets import presets
from parcompile.plan import Plan, plan_tree
from parcompile.plan.diff import difference
from parcompile.plan.sections import summary
from parcompile.show.markdown import as_markdown
from parcompile.show.page.render import page
from parcompile.show.pictures import Subject
from parcompile.spec.values import workload_of
from parcompile.units import format_bytes, format_seconds

LARGE = {"preset": "llama-3-70b"}
SMALL = {"preset": "llama-3.2-1b"}
TRAINING = {"sequence_length": 4096, "global_batch_size": 64}
SPECS: dict[str, dict[str, Any]] = {
    "ZeRO-3": spec_tree(16, model=LARGE, training=TRAINING | {"global_batch_size": 256}, zero={"stage": 3}),
    "ZeRO-2": spec_tree(2, model=LARGE, parallelism={"tp": 8}, training=TRAINING, zero={"stage": 2}),
    "ZeRO-0": spec_tree(1, model=SMALL, training=TRAINING, zero={"stage": 0}),
    "fp32": spec_tree(1, model=SMALL, parallelism={"tp": 2}, training=TRAINING | {"precision": "fp32"}),
    "fp32 sums": spec_tree(
        1, model=SMALL, training=TRAINING | {"gradient_accumulation_dtype": "fp32"}, parallelism={"pp": 2}
    ),
    "stages": spec_tree(4, model=LARGE, parallelism={"tp": 4, "pp": 4, "cp": 2}, training=TRAINING),
    "interleaved": spec_tree(
        4,
        model=LARGE,
        parallelism={"tp": 4, "pp": 4, "num_virtual_stages_per_pipeline_rank": 2},
        training=TRAINING,
    ),
    "experts": spec_tree(8, model={"preset": "mixtral-8x7b"}, parallelism={"tp": 4, "ep": 4}, training=TRAINING),
}


@pytest.fixture(params=SPECS)
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> Plan:
    return compile_tree(SPECS[request.param], tmp_path)


def other_than(plan: Plan) -> Plan:
    """The same plan with another micro-batch: its peak and its step are others."""
    training = dataclasses.replace(plan.spec.training, micro_batch_size=plan.spec.training.micro_batch_size * 3)
    return dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, training=training))


def said(text: str) -> str:
    return " ".join(text.split())


def test_the_peak_is_the_same_everywhere(plan: Plan) -> None:
    found = plan.estimate()
    peak = format_bytes(found.memory.peak.total_bytes)
    assert footprint(workload_of(plan.spec)).peak.total_bytes == found.memory.peak.total_bytes
    assert f"memory {peak} on rank {found.memory.peak.rank} " in said(summary(plan))
    assert f"<dt>Peak memory</dt><dd><b>{peak}</b>" in page(Subject.of(plan), None, None)
    changed = difference(plan, other_than(plan))
    (change,) = (one for one in changed.changes if one.what == "peak memory per rank, estimated")
    assert change.texts[0] == peak
    assert f"| peak memory of a rank, estimated | {peak} |" in as_markdown(plan, other_than(plan), changed)


def test_the_static_part_is_the_same_everywhere(plan: Plan) -> None:
    static = static_memory(workload_of(plan.spec))
    assert plan.estimate().memory.static_bytes == static.total_bytes
    text = format_bytes(static.total_bytes)
    assert f"static {text} on each rank" in said(summary(plan))
    held = [static_memory(workload_of(plan.spec), stage).total_bytes for stage in workload_of(plan.spec).stages]
    which = f" of stage {held.index(max(held))}, which holds most" if len(held) > 1 else ""
    assert f"static {text} on each rank{which}, without activations" in said(summary(plan))
    stored = plan_tree(plan)["static_memory"]
    assert sum(value for name, value in stored.items() if name.endswith("_bytes")) == static.total_bytes
    assert f"<dt>Static memory, exact</dt><dd><b>{text}</b>" in page(Subject.of(plan), None, None)
    markdown = as_markdown(plan, other_than(plan), difference(plan, other_than(plan)))
    assert f"| static memory of a rank, exact | {text} |" in markdown


def test_the_step_is_the_same_everywhere(plan: Plan) -> None:
    step = format_seconds(plan.estimate().time.step.seconds)
    assert f"<dt>Step</dt><dd><b>{step}</b>" in page(Subject.of(plan), None, None)
    changed = difference(plan, other_than(plan))
    assert f"| step, estimated | {step} |" in as_markdown(plan, other_than(plan), changed)


def test_zero_3_shards_weights_and_gradients_in_every_figure(tmp_path: Path) -> None:
    """70B on 128 ranks: 18 bytes of each parameter, the fp32 sums among them, over all ranks; the bucket is whole."""
    plan = compile_tree(SPECS["ZeRO-3"], tmp_path)
    held = static_memory(workload_of(plan.spec))
    shards = held.total_bytes - held.bucket_bytes
    assert shards == pytest.approx(plan.parameters.numel * (2 + 4 + 12) / 128, rel=1e-3)


def test_what_a_search_chooses_is_what_estimate_says_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree = spec_tree(2, model={"preset": "llama-3-8b"}, training={"sequence_length": 8192, "global_batch_size": 64})
    del tree["training"]["micro_batch_size"]
    Path("open.json").write_text(json.dumps(tree), encoding="utf-8")
    run = CliRunner()
    best = json.loads(run.invoke(cli, ["search", "open.json", "--format", "json", "-o", "chosen.json"]).stdout)["best"]
    found = json.loads(run.invoke(cli, ["estimate", "chosen.json", "--format", "json"]).stdout)
    assert best["step_seconds"] == found["time"]["step_seconds"]
    assert best["interval_90_seconds"] == found["time"]["interval_90_seconds"]
    assert best["peak_bytes"] == found["memory"]["peak_bytes"]


@pytest.mark.parametrize("name", accelerators())
def test_fp32_is_timed_at_the_rate_of_fp32(name: str, tmp_path: Path) -> None:
    """bf16's peak was used for fp32: no step is shorter than its operations at the peak of its own precision."""
    machine = accelerators()[name]
    assert machine.fp32_flops_per_s <= machine.flops_per_s
    for precision, peak in (("bf16", machine.flops_per_s), ("fp32", machine.fp32_flops_per_s)):
        tree = spec_tree(1, model=SMALL, training=TRAINING | {"precision": precision})
        tree["cluster"]["accelerator"] = name
        work = workload_of(compile_tree(tree, tmp_path).spec)
        timed = timing(work)
        per_token = 6 * (presets()["llama-3.2-1b"].parameters)
        assert timed.tokens_per_second_per_gpu * per_token < peak
        assert 0 < timed.utilisation < 1
    tree["training"]["precision"] = "bf16"
    fast = timing(workload_of(compile_tree(tree, tmp_path).spec))
    if machine.fp32_flops_per_s < machine.flops_per_s:
        assert timed.step.compute > fast.step.compute
