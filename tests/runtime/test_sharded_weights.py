"""Contract: ZeRO stage 3 trains as one process does, and its checkpoints go to other stages and layouts and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close, judge
from families import tiny_config
from ranks import run_ranks
from training_runs import (
    compared,
    initial_model,
    make_plan,
    samples,
    train_in_one_process,
    whole_parameters,
    whole_weights,
)

from parcompile.cost.memory import static_memory
from parcompile.plan import Plan
from parcompile.runtime.checkpoint.adapting import convert
from parcompile.runtime.checkpoint.exporting import export
from parcompile.runtime.preflight import preflight
from parcompile.spec.values import workload_of

STEPS = 3
ZERO = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 2000}
"""Small weights are sharded like large ones."""
AGAIN = "again"
"""Where a resumed run saves what it has loaded."""


def plan_of(
    world: int,
    parallelism: dict[str, Any],
    stage: int,
    *,
    on_host: bool = False,
    weights_on_host: bool = False,
    implementation: str = "torch",
    **options: Any,
) -> Plan:
    further = {"deepspeed": {"zero_optimization": ZERO}} if stage == 3 else {}
    parts = {"offload_optimizer": on_host, "offload_param": weights_on_host}
    zero: dict[str, Any] = {"stage": stage, **{part: {"device": "cpu"} for part, there in parts.items() if there}}
    if on_host:
        zero["offload_optimizer"]["implementation"] = implementation
    return make_plan(world, parallelism, extra={"zero": zero, **further}, **options)


def train(rank: int, plan: Plan, folder: str, resumes: bool = False) -> dict[str, Any]:
    """What three steps give. The first run saves behind the second, a resumed one goes on from there."""
    from parcompile.runtime import RunError, evaluate, initialize
    from parcompile.runtime.checkpoint import load, save
    from parcompile.runtime.deepspeed_patches.optimizer_state import held

    model, data = None if resumes else initial_model(plan), samples(plan, masked=True)
    engine, _, loader, _ = initialize(
        plan=plan, model=model, training_data=data, first_step=2 * resumes, self_check=not resumes
    )
    found: dict[str, Any] = {"rank": rank, "losses": [], "norms": []}
    batches = iter(loader)
    first = load(engine, folder) if resumes else 0
    found["loaded"] = whole_weights(engine.module) if resumes else {}
    if resumes:
        save(engine, f"{folder}/{AGAIN}", 2)
    for step in range(first, STEPS):
        found["losses"].append(float(engine.train_batch(batches)))
        found["norms"].append(float(engine.get_global_grad_norm()))
        if step == 1:
            save(engine, folder, 2)
    found["parameters"] = whole_weights(engine.module)
    if resumes and plan.spec.zero_stage == 3:  # in the same layout, to the bit
        load(engine, f"{folder}/{AGAIN}")
        assert float(engine.train_batch(iter(loader))) == found["losses"][-1]
        assert all(torch.equal(one, found["parameters"][name]) for name, one in whole_weights(engine.module).items())
    found["elements"] = sum(held(one).numel() for one in engine.module.parameters())
    found["text"] = engine.module.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=3, do_sample=False).tolist()
    # An odd number: one rank of dp has nothing left in the last pass, and gathers weights for the others.
    found["loss"] = evaluate(engine, data[:3])
    if plan.spec.zero_stage == 3:
        with pytest.raises(RunError, match="would hold nothing"):
            engine.module_state_dict()
    engine.module.save_pretrained(f"{folder}/{plan.spec.zero_stage}")
    return found


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            plan_of(
                4,
                {"tp": 2, "sequence_parallel": True},
                3,
                model={"tie_word_embeddings": True},
                training={"micro_batch_size": 1, "activation_checkpointing": "full"},
            ),
            plan_of(2, {"cp": 2}, 1, model={"tie_word_embeddings": True}),
        ),
        (
            plan_of(2, {"tp": 2}, 2, model=tiny_config("mixtral"), whole_model=True),
            plan_of(2, {"ep": 2, "cp": 2}, 3, model=tiny_config("mixtral"), whole_model=True),
        ),
    ],
    ids=["tp2 dp2 recomputed, then cp2 at stage 1", "tp2 at stage 2, then cp2 with experts over ep"],
)
def test_weights_in_shards_train_as_one_process(first: Plan, second: Plan, tmp_path: Path) -> None:
    train_and_go_on(first, second, tmp_path)


def train_and_go_on(first: Plan, second: Plan, tmp_path: Path) -> None:
    """Trains and saves by the first plan, beside one process; goes on by the second, beside the first."""
    ranks = run_ranks(first.world_size, train, first, str(tmp_path))
    judge(compared(first, ranks, lambda seed: train_in_one_process(first, masked=True, steps=STEPS, seed=seed)))
    if second.spec.zero_stage == 3:  # written for it without ranks
        convert(tmp_path, second, tmp_path / "converted")
    start = tmp_path / ("converted" if second.spec.zero_stage == 3 else "")
    resumed = run_ranks(second.world_size, train, second, str(start), True)
    for rank in resumed:
        for key in ("losses", "norms"):
            assert_close(rank[key], ranks[0][key][2:], limit=3e-5)
        assert rank["text"] == ranks[0]["text"]
        assert_close(rank["loss"], ranks[0]["loss"], limit=3e-5)
    for plan, found in ((first, ranks), (second, resumed)):
        if plan.spec.zero_stage == 3:
            assert found[0]["elements"] == static_memory(workload_of(plan.spec)).shard_numel
    one, other = weights_in(tmp_path / str(first.spec.zero_stage)), weights_in(start / str(second.spec.zero_stage))
    assert_close(one, other, limit=3e-5)
    # The files of stage 3, exported without ranks.
    export(tmp_path if start == tmp_path else start / AGAIN, tmp_path / "exported")
    loaded = whole_parameters(second, [{**rank, "parameters": rank["loaded"]} for rank in resumed])
    exported = weights_in(tmp_path / "exported")
    assert all(torch.equal(exported[name], weight) for name, weight in loaded.items())


def test_preflight_counts_what_stage_3_holds_and_sends() -> None:
    plan = plan_of(4, {"tp": 2, "cp": 2, "sequence_parallel": True}, 3, training={"sequence_length": 64})
    report = preflight(plan, ranks=[3])
    assert report.agrees, [finding for finding in report.findings if finding.detail]
