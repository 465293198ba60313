"""Contract: experts with a capacity refuse what Megatron-Core's would, and train as one process that refuses the same.

Three AdamW steps with clipping, in fp32 on live ranks: losses, gradient norms and every parameter, as `closeness.py`
judges them. With room for every choice that process refuses nothing: it is transformers as it is.
"""

from __future__ import annotations

from typing import Any

import expert_runs
import pytest
import torch
from capacity_runs import compare, limited, megatron_mask
from closeness import assert_close, judge
from device_waits import DeviceCounter
from expert_runs import Case
from ranks import run_ranks
from training_runs import initial_model, samples

from parcompile.plan import Plan
from parcompile.runtime.expert_parallel import Capacity
from parcompile.runtime.local.comparison import run_and_compare
from parcompile.runtime.preflight import preflight
from parcompile.runtime.preflight.stand_in import MetaTracker, stand_in
from parcompile.runtime.preflight.step import build_sharded, run_step

SEQUENCES = {"sequence_parallel": True}
PAIRS = {"global_batch_size": 8, "micro_batch_size": 2}
FULL = {"activation_checkpointing": "full"}
REFUSING = {
    "one rank": Case("mixtral", {}),
    "tp2, every expert on every rank": Case("gpt_oss", {"tp": 2}),
    "tp2 × dp2 × ep2 of two rows, ZeRO stage 2": Case("mixtral", {"tp": 2, "dp": 2, "ep": 2}, PAIRS, zero=2),
    "tp2 × dp2 × ep2, recomputed, a shared expert meanwhile": Case(
        "deepseek_v3", {"tp": 2, "dp": 2, "ep": 2, **SEQUENCES}, FULL
    ),
    "tp2 × cp2 × ep4, each expert whole": Case("deepseek_v3", {"tp": 2, "cp": 2, "ep": 4, "expert_tp": 1, **SEQUENCES}),
    "tp2 × dp2 × ep2, biases of experts": Case("gpt_oss", {"tp": 2, "dp": 2, "ep": 2}),
    "pp2 × dp2 × ep2": Case("deepseek_v3", {"pp": 2, "dp": 2, "ep": 2}, {}, {"first_k_dense_replace": 2}),
    "cp2 × dp2 × ep2, ZeRO stage 3": Case("mixtral", {"cp": 2, "dp": 2, "ep": 2}, zero=3),
    "tp2 × dp2 × ep2, scores that scale what experts take": Case("llama4_text", {"tp": 2, "dp": 2, "ep": 2}),
    "tp2, such scores": Case("llama4_text", {"tp": 2}),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", REFUSING)
def test_experts_refuse_what_one_process_refuses_of_the_same_tokens(name: str) -> None:
    case = limited(REFUSING[name], 0.8)
    found, refused, expected = compare(case)
    judge(found)
    # Without ep each rank of tp knows all choices of its tokens.
    every = 1 if case.parallelism.get("ep", 1) > 1 else case.parallelism.get("tp", 1)
    assert refused == expected * every
    assert expected > 50


ROOM = {
    "tp2 × dp2 × ep2": Case("mixtral", {"tp": 2, "dp": 2, "ep": 2}),
    "tp4 × dp2 × ep2, one rank of tp has no token": Case(
        "mixtral", {"tp": 4, "dp": 2, "ep": 2, "cp_layout": "contiguous"}, {"sequence_length": 9}
    ),
    "tp2 × cp2 × ep4, each expert whole, recomputed": Case(
        "deepseek_v3", {"tp": 2, "cp": 2, "ep": 4, "expert_tp": 1, **SEQUENCES}, FULL
    ),
    "tp2, every expert on every rank": Case("gpt_oss", {"tp": 2}),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", ROOM)
def test_with_room_for_all_choices_every_layout_is_one_process(name: str) -> None:
    judge(expert_runs.compare(limited(ROOM[name], 4.0)))


@pytest.mark.parametrize("factor", [0.1, 0.7, 1.0, 1.5])
def test_slots_are_megatrons_choice(factor: float) -> None:
    generator = torch.Generator().manual_seed(5)
    chosen = torch.rand(40, 6, generator=generator).argsort(1)[:, :2]
    weights = torch.rand(40, 2, generator=generator)
    capacity = Capacity(min(40, -(-int(1000 * factor * 40 * 2) // 6000)))
    slots = capacity.slots(chosen.flatten(), weights.flatten(), 6)
    whole = torch.zeros(40, 6).scatter(1, chosen, weights)
    expected = megatron_mask(whole, whole > 0, 2, factor).gather(1, chosen).flatten()
    assert (slots < 6 * capacity.rows).tolist() == expected.tolist()
    kept = slots[expected]
    assert len(set(kept.tolist())) == len(kept)
    assert (kept // capacity.rows).tolist() == chosen.flatten()[expected].tolist()
    assert capacity.told() == (int((~expected).sum()), 80)
    assert capacity.told() == (0, 0)


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tp": 2, "dp": 2, "ep": 2}, {}),
    ({"tp": 2, "dp": 2, "ep": 4, "expert_tp": 1, **SEQUENCES}, FULL),
]


@pytest.mark.parametrize(("layout", "training"), LAYOUTS)
def test_a_layer_waits_for_nothing_and_sends_what_is_planned(layout: dict[str, Any], training: dict[str, Any]) -> None:
    wide = {"moe_intermediate_size": 32}  # 16 bytes on each of two ranks: else experts run one after the other
    case = Case("deepseek_v3", layout, {**training, "precision": "bf16", "sequence_length": 64}, wide)
    waits = []
    for one in (case, limited(case, 1.25)):
        plan = one.plan()
        report = preflight(plan, [0])
        assert [found for found in report.differing if found.subject.startswith("sent")] == []
        with stand_in(plan, 1) as mesh, MetaTracker(mesh) as tracker:
            built, _ = build_sharded(mesh, tracker)
            with DeviceCounter() as device:
                run_step(built, mesh, tracker)
        waits.append([wait for wait in device.waits if "/deepspeed/" not in wait])
    assert len(waits[0]) >= 3
    assert waits[1] == []


def evaluate(rank: int, plan: Plan) -> list[float]:
    """The loss of three samples, and of a step of training."""
    from parcompile.runtime import evaluate, initialize

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan))
    return [evaluate(engine, samples(plan)[:3]), float(engine.train_batch(iter(loader)))]


@pytest.mark.ranks
def test_evaluation_refuses_nothing() -> None:
    case = Case("mixtral", {"dp": 2, "ep": 2})
    (plain, trained), (found, refusing) = (run_ranks(2, evaluate, one.plan())[0] for one in (case, limited(case, 0.5)))
    assert_close(found, plain)
    assert abs(refusing - trained) > 1e-3


def measure(rank: int, plan: Plan) -> list[dict[str, float]]:
    """Rows of three steps."""
    from parcompile.runtime import StepMeter, initialize

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan))
    meter, batches = StepMeter(engine), iter(loader)
    return [meter.train_batch(batches) for _ in range(3)]


@pytest.mark.ranks
def test_a_run_tells_the_share_of_choices_that_were_refused() -> None:
    case = limited(Case("mixtral", {"dp": 2, "ep": 2}, FULL), 0.5)
    rows = run_ranks(2, measure, case.plan())
    shares = [[row.get("refused_choices") for row in one] for one in rows]
    assert shares[0] == shares[1]
    assert shares[0][:2] == [None, None]
    # Each expert takes half of its even share: at most half of all choices stay.
    assert 0.5 <= shares[0][2] < 0.75


@pytest.mark.ranks
def test_a_step_on_this_machine_is_compared_with_nothing_refused() -> None:
    found = run_and_compare(limited(Case("mixtral", {"dp": 2, "ep": 2}), 0.5).plan())
    assert "one step, with no choice of an expert refused:" in found.text()
    assert found.equal, found.text()
