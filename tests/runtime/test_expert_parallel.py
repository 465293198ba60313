"""Contract: experts that are dealt over ranks train as in one process.

Three AdamW steps with clipping, in fp32 on live ranks: losses, gradient norms and every parameter, as `closeness.py`
judges them. `.ci/expert_matrix.py` runs every combination of the axes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close, judge
from expert_runs import Case, compare, one_sided
from ranks import forked_world, run_ranks
from torch import nn
from training_runs import initial_model, samples, train_with_engine

from parcompile.plan import Plan
from parcompile.runtime.inject.mechanisms.experts import add_once

CASES = {
    "dp2 × ep2 (mixtral)": Case("mixtral", {"dp": 2, "ep": 2}),
    "tp2 × cp2 × ep2, ZeRO stage 0": Case("deepseek_v3", {"tp": 2, "cp": 2, "ep": 2}, zero=0),
    "cp2 × ep2, full recomputation": Case("deepseek_v3", {"cp": 2, "ep": 2}, {"activation_checkpointing": "full"}),
    "tp2 × dp2 × ep2, sequence parallelism": Case(
        "deepseek_v3", {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}
    ),
    "tp2 × cp2 × ep4, each expert whole": Case(
        "deepseek_v3", {"tp": 2, "cp": 2, "ep": 4, "expert_tp": 1, "sequence_parallel": True}
    ),
    "tp2 × dp2 × ep2, experts that give back what they take": Case(
        "longcat_flash", {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}
    ),
    "tp2 × dp2 × ep4, such experts each whole": Case("longcat_flash", {"tp": 2, "dp": 2, "ep": 4, "expert_tp": 1}),
    "tp2 × dp2 × ep2, scores that scale what experts take": Case(
        "llama4_text", {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}
    ),
    "tp2 × dp2 × ep2, biases of experts": Case("gpt_oss", {"tp": 2, "dp": 2, "ep": 2}),
    "pp2 × dp2 × ep2, and no experts in the first stage": Case(
        "deepseek_v3", {"pp": 2, "dp": 2, "ep": 2}, {}, {"first_k_dense_replace": 2}
    ),
    "pp2 × dp2 × ep2, experts looked up by tokens, full recomputation": Case(
        "deepseek_v4", {"pp": 2, "dp": 2, "ep": 2}, {"activation_checkpointing": "full"}
    ),
    "pp2 × dp2 × ep2, embeddings of n-grams, full recomputation": Case(
        "qwen4_exp_text", {"pp": 2, "dp": 2, "ep": 2}, {"activation_checkpointing": "full"}
    ),
    "tp2 × cp2 × ep2, embeddings of n-grams, full recomputation": Case(
        "qwen4_exp_text",
        {"tp": 2, "cp": 2, "ep": 2, "sequence_parallel": True},
        {"activation_checkpointing": "full"},
    ),
    "tp2 × dp2 × ep4, experts looked up by tokens, each whole": Case(
        "deepseek_v4", {"tp": 2, "dp": 2, "ep": 4, "expert_tp": 1}
    ),
    "cp2 × ep2, keys of windows of tokens, full recomputation": Case(
        "deepseek_v4", {"cp": 2, "ep": 2}, {"activation_checkpointing": "full"}
    ),
    "pp2 × cp2 × dp2 × ep4, keys of windows of tokens": Case(
        "deepseek_v4", {"pp": 2, "cp": 2, "dp": 2, "ep": 4, "cp_layout": "contiguous"}
    ),
    "pp2, and a first stage that balances nothing": Case(
        "deepseek_v4",
        {"pp": 2},
        {"micro_batch_size": 4},
        {
            "output_router_logits": True,
            "router_aux_loss_coef": 0.1,
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
            "swiglu_limit": 7.0,  # at a smaller one rounding takes a value across it
        },
    ),
    "cp2 × dp2 × ep2, two ranks for each expert, ulysses, ZeRO stage 2": Case(
        "mixtral", {"cp": 2, "dp": 2, "ep": 2, "cp_implementation": "ulysses"}, zero=2
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_on_other_ranks_give_the_numbers_of_one_process(name: str) -> None:
    judge(compare(CASES[name]))


def order_of_messages(rank: int) -> list[str]:
    """In which order backward reaches a bias that the first rank adds, and the rows that were sent before."""
    events: list[str] = []

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(3))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            sent = rows.clone()
            sent.register_hook(lambda _: events.append("rows"))
            return sent + self.bias

    experts = Experts()
    experts.bias.register_hook(lambda _: events.append("bias"))
    add_once(experts, "bias", dist.group.WORLD)
    experts(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert experts.bias.grad is not None
    assert experts.bias.grad.tolist() == [2.0 * (rank == 0)] * 3
    return events


def test_ranks_sum_the_gradient_of_a_bias_in_the_same_place_among_their_messages() -> None:
    """They wait for one another for ever where the first rank sums before rows go back, and another one behind."""
    with forked_world(2) as world:
        first, second = world.run(order_of_messages, timeout=60)
    assert first == second


def test_a_rank_whose_experts_get_no_token_takes_part_in_everything() -> None:
    case = Case("deepseek_v3", {"dp": 4, "ep": 2}, {}, {"first_k_dense_replace": 1})
    judge(compare(case, built=one_sided))


def test_sums_in_fp32_of_bf16_gradients_count_each_expert_once() -> None:
    """DeepSpeed's bf16 optimizer; its norm would count experts of other tensor-parallel ranks not at all.

    Beside sums in bf16, whose norm ZeRO's own optimizer takes: the gradients of a micro-batch are the same bits.
    """
    layout, sums = {"tp": 2, "dp": 2, "ep": 2}, {"gradient_accumulation_dtype": "fp32"}
    plans = [Case("mixtral", layout, {"precision": "bf16", **more}).plan() for more in (sums, {})]
    found, expected = (run_ranks(4, train_with_engine, plan, False, 1)[0] for plan in plans)
    assert found["losses"] == expected["losses"]
    # Sums in bf16 round by about 1e-3; an expert left out, by more than a tenth.
    assert_close(found["norms"], expected["norms"], limit=1e-2)


def evaluate_and_generate(rank: int, plan: Plan) -> dict[str, Any]:
    """The loss of three samples, which two ranks do not share evenly, and texts of another length on each rank."""
    from parcompile.runtime import evaluate, initialize

    engine, _, _, _ = initialize(plan=plan, model=initial_model(plan))
    prompt = samples(plan)[rank]["input_ids"][None, : 4 + rank]
    text = engine.module.generate(prompt, max_new_tokens=3 + 2 * rank, do_sample=False)
    return {"loss": evaluate(engine, samples(plan)[:3]), "text": text.tolist()}


def test_evaluation_and_generation_are_those_of_one_process() -> None:
    plan = Case("mixtral", {"dp": 2, "ep": 2}).plan()
    model, data = initial_model(plan).eval(), samples(plan)
    with torch.no_grad():
        losses = [model(input_ids=one["input_ids"][None], labels=one["labels"][None]).loss for one in data[:3]]
    for rank, found in enumerate(run_ranks(2, evaluate_and_generate, plan)):
        assert_close(found["loss"], float(torch.stack(losses).mean()))
        prompt = data[rank]["input_ids"][None, : 4 + rank]
        assert found["text"] == model.generate(prompt, max_new_tokens=3 + 2 * rank, do_sample=False).tolist()


def adapt_attention(rank: int, plan: Plan) -> dict[str, Any]:
    """A step of LoRA on attention, beside experts that are frozen."""
    peft = pytest.importorskip("peft")
    from parcompile.runtime import adapter_state, initialize

    attention = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    model = peft.get_peft_model(initial_model(plan), attention)
    engine, _, loader, _ = initialize(plan=plan, model=model, training_data=samples(plan))
    loss = float(engine.train_batch(iter(loader)))
    state = adapter_state(engine.module, engine.mesh)
    return {"loss": loss, "norm": float(engine.get_global_grad_norm()), "adapters": state}


def test_lora_on_attention_trains_beside_dealt_experts() -> None:
    dealt, alone = (Case("mixtral", parallelism).plan() for parallelism in ({"dp": 2, "ep": 2}, {}))
    found, expected = run_ranks(2, adapt_attention, dealt)[0], run_ranks(1, adapt_attention, alone)[0]
    assert_close(found, expected)


NARROW = {
    "a slice of 12 features, bf16": Case("mixtral", {"tp": 2}, {"precision": "bf16"}, {"intermediate_size": 24}),
    "the same, fp16": Case("mixtral", {"tp": 2}, {"precision": "fp16"}, {"intermediate_size": 24}),
    "a hidden size of 36, bf16": Case(
        "mixtral", {"dp": 2, "ep": 2}, {"precision": "bf16"}, {"hidden_size": 36, "head_dim": 8}
    ),
    "scores that scale what experts take": Case(
        "llama4_text", {"tp": 2}, {"precision": "bf16"}, {"intermediate_size": 24}
    ),
}
"""Sizes that are no multiple of 16 bytes in the type of training, and are in fp32."""


def in_half_precision(rank: int, plans: list[Plan]) -> list[float]:
    from parcompile.runtime import join, leave
    from parcompile.runtime.inject import inject
    from parcompile.runtime.model.text_head import TORCH_DTYPES

    found = []
    for plan in plans:
        model = inject(initial_model(plan), join(plan)).to(TORCH_DTYPES[plan.spec.training.precision])
        loss = model(**tokens(plan)).loss
        loss.backward()
        assert all(bool(one.grad.isfinite().all()) for one in model.parameters() if one.grad is not None)
        found.append(float(loss.detach()))
        leave()
    return found


def tokens(plan: Plan) -> dict[str, Any]:
    sample = samples(plan)[0]
    ids = sample["input_ids"][None]
    return {"input_ids": ids, "labels": ids, "shift_labels": torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)}


def test_experts_that_are_too_narrow_for_a_grouped_product_train_in_half_precision() -> None:
    plans = [case.plan() for case in NARROW.values()]
    found = run_ranks(2, in_half_precision, plans)[0]
    for name, plan, loss in zip(NARROW, plans, found, strict=True):
        ids = tokens(plan)["input_ids"]
        # bf16 keeps eight bits: 1 part in 256, of a loss of 4.
        assert_close(loss, float(initial_model(plan)(input_ids=ids, labels=ids).loss), limit=2e-2, about=name)
