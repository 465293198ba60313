"""Contract: gradients that are reduced under backward are counted as they are sent and held, and train as without.

`.ci/pipeline_matrix.py --draws overlap` draws as many plans as one likes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from closeness import judge
from drawn_stages import compare, draw
from families import tiny_config
from ranks import run_ranks
from training_runs import make_plan, train_with_engine

from parcompile.backends.deepspeed.write import ds_config
from parcompile.cost.collectives import collectives
from parcompile.cost.footprint import footprint
from parcompile.cost.step import step_terms, step_time, values_of
from parcompile.plan import Plan
from parcompile.rules import check
from parcompile.runtime.preflight import preflight
from parcompile.spec.resolve import Resolution
from parcompile.spec.values import workload_of

SP = {"tp": 2, "sequence_parallel": True}
SIZES = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}


def plan_of(world: int, parallelism: dict[str, Any], overlap: bool | None = None, **extra: Any) -> Plan:
    """Of a model with several buckets, on H100; `overlap`: what the spec says of it."""
    training = {"sequence_length": 2048, "micro_batch_size": 1, "global_batch_size": 2 * world, "precision": "bf16"}
    zero = {} if overlap is None else {"deepspeed": {"zero_optimization": {"overlap_comm": overlap}}}
    cluster = {"cluster": {"gpus_per_node": world, "accelerator": "h100-sxm"}}
    return make_plan(world, parallelism, model=SIZES, whole_model=True, training=training, extra=cluster | zero | extra)


@pytest.mark.ranks
@pytest.mark.parametrize("number", [0, 3, 6, 9, 11, 26])
def test_drawn_plans_train_as_one_process(number: int) -> None:
    """A pipeline with the key; experts over all axes; sequence parallelism; cp; small buckets."""
    plan, _ = draw(number, 4, overlaps=True)
    judge(compare(plan))


@pytest.mark.ranks
@pytest.mark.parametrize("sums", ["fp32", "bf16"])
def test_sums_of_16_bit_weights_are_those_without(sums: str) -> None:
    """Each gradient is summed over tp and dp in the same order: weights are equal to the last bit."""
    training = {"micro_batch_size": 1, "precision": "bf16", "gradient_accumulation_dtype": sums}
    found = []
    for overlap in (True, False):
        zero = {"overlap_comm": overlap, "reduce_bucket_size": 2_000}
        extra = {"deepspeed": {"zero_optimization": zero}}
        plan = make_plan(4, SP, model=tiny_config("qwen3"), whole_model=True, training=training, extra=extra)
        found.append(run_ranks(4, train_with_engine, plan, True, 3))
    for first, second in zip(*found, strict=True):
        assert first["losses"] == second["losses"]
        assert first["norms"] == second["norms"]
        for name, weight in first["parameters"].items():
            assert torch.equal(weight, second["parameters"][name]), name


@pytest.mark.parametrize(
    ("plan", "overlaps"),
    [
        (plan_of(8, SP), True),
        (plan_of(8, {"cp": 2}, zero={"stage": 2}), False),
        (plan_of(8, {"cp": 2}, overlap=True, zero={"stage": 2}), True),
        (plan_of(8, {}, overlap=False), False),
        (plan_of(8, {"pp": 2}), False),
        (plan_of(2, {"tp": 2}), False),
        (plan_of(8, {}, zero={"stage": 0}), False),
        (plan_of(8, {}, zero={"stage": 1, "offload_optimizer": {"device": "cpu"}}), False),
        (make_plan(2, {}), False),
    ],
    ids=["stage 1", "stage 2", "stage 2, wanted", "not wanted", "stages", "one shard", "stage 0", "on the host", "cpu"],
)
def test_the_plan_overlaps_where_something_hides_it(plan: Plan, overlaps: bool) -> None:
    zero = ds_config(plan)["zero_optimization"]
    assert zero["overlap_comm"] is overlaps
    assert workload_of(plan.spec).overlaps_gradients is overlaps
    if overlaps:
        assert zero["reduce_bucket_size"] == 40_000_000
        assert zero["allgather_bucket_size"] > zero["reduce_bucket_size"]


@pytest.mark.parametrize(
    ("world", "parallelism", "extra"),
    [
        (8, SP, {}),
        (8, {"cp": 2}, {"zero": {"stage": 2}, "deepspeed": {"zero_optimization": {"overlap_comm": True}}}),
        (8, {}, {"training": {"gradient_accumulation_dtype": "bf16"}}),
        (8, {**SP, "cp": 2}, {"training": {"activation_checkpointing": "full"}}),
        (8, {}, {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 5e8}}}),
        (8, {"pp": 2}, {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 3_000_000}}}),
    ],
    ids=["tp", "stage 2", "bf16 sums", "recomputed", "large bucket", "small bucket"],
)
def test_memory_and_messages_are_those_of_preflight(
    world: int, parallelism: dict[str, Any], extra: dict[str, Any]
) -> None:
    training = {
        "sequence_length": 2048,
        "micro_batch_size": 2,
        "global_batch_size": 32,
        "precision": "bf16",
        **extra.pop("training", {}),
    }
    cluster = {"cluster": {"gpus_per_node": world, "accelerator": "h100-sxm"}}
    plan = make_plan(world, parallelism, model=SIZES, whole_model=True, training=training, extra={**cluster, **extra})
    report = preflight(plan, ranks=[0])
    for one in report.findings:
        assert one.verdict.value in ("agrees", "not run"), report.text()
    (peak,) = [one for one in report.findings if one.subject == "peak of the step"]
    off = re.findall(r"\(([-+][\d.]+)%\)", peak.found) or ["0"]
    assert abs(float(off[0])) < 1


def test_norms_are_summed_once_in_a_step_and_less_is_waited_for() -> None:
    plan = plan_of(8, SP)
    work = workload_of(plan.spec)
    assert work.overlaps_gradients
    without = replace(work, overlap_comm=False)
    first, second = (collectives(one, plan.spec.stages[0])["tp", "all-reduce"] for one in (work, without))
    assert first == second
    hidden, exposed = (step_time(step_terms(one), values_of(one)) for one in (work, without))
    assert exposed.hidden_gradients == 0 < hidden.hidden_gradients
    assert hidden.gradients + hidden.hidden_gradients == pytest.approx(exposed.gradients)
    assert hidden.seconds < exposed.seconds
    # A second bucket of 40M elements; while activations are there, nothing else.
    second = footprint(work).peak.total_bytes - footprint(without).peak.total_bytes
    assert second == pytest.approx(4 * 40_000_000)


def test_a_pipeline_is_told_that_the_key_does_nothing() -> None:
    tree = {
        "version": 1,
        "name": "stages",
        "model": SIZES,
        "cluster": {"gpus_per_node": 8, "accelerator": "h100-sxm"},
        "parallelism": {"pp": 2},
        "training": {"sequence_length": 2048, "micro_batch_size": 1, "global_batch_size": 8},
        "deepspeed": {"zero_optimization": {"overlap_comm": True}},
    }
    (found,) = [one for one in check(Resolution(tree)) if one.code == "D006"]
    assert "overlap_comm True does nothing in a pipeline" in found.message
