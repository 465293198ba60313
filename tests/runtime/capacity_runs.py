"""Experts with a capacity, on live ranks and in one process that refuses the same choices of the same tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from closeness import Margin
from expert_runs import STEPS, Case
from ranks import run_ranks
from torch import Tensor, nn
from training_runs import compared, initial_model, train_in_one_process, train_with_engine

from parcompile.layout.sequence import token_ranges
from parcompile.plan import Plan


def limited(case: Case, capacity: float) -> Case:
    """The same, with a capacity."""
    return case._replace(training={**case.training, "router": {"expert_capacity": capacity}})


def megatron_mask(weights_TE: Tensor, routed_TE: Tensor, per_token: int, capacity: float) -> Tensor:
    """Which choices of these tokens stay, as Megatron-Core has it: `get_capacity` and the policy "probs" of
    `apply_router_token_dropping` of core/transformer/moe/moe_utils.py."""
    tokens, experts = weights_TE.shape
    rows = math.ceil(tokens * per_token / experts * capacity)
    if rows > tokens:
        return torch.ones_like(routed_TE)
    kept = torch.topk(weights_TE, rows, dim=0)[1]
    return torch.zeros_like(weights_TE).scatter(0, kept, 1).bool() & routed_TE


def groups(plan: Plan) -> list[Tensor]:
    """The tokens of a step that one rank sends at a time, as places among all of them [samples · S]."""
    axes, training = plan.spec.parallelism, plan.spec.training
    length, found = training.sequence_length, []
    for first in range(0, training.global_batch_size, training.micro_batch_size):
        for cp_rank in range(axes.cp):
            ranges = token_ranges(axes.cp_layout, axes.cp, cp_rank, length)
            own = torch.tensor([place for one in ranges for place in one])
            rows = torch.arange(first, first + training.micro_batch_size)[:, None] * length
            found += (rows + own).flatten().chunk(axes.tp)
    return found


def refusing(plan: Plan) -> nn.Module:
    """The model, whose experts give nothing for what is refused; plain torch."""
    model, shape = initial_model(plan), plan.spec.model.shape
    assert shape.moe is not None
    assert plan.spec.training.router is not None
    capacity = plan.spec.training.router.expert_capacity
    assert capacity is not None
    per_token, experts, places = shape.moe.num_experts_per_token, shape.moe.num_experts, groups(plan)

    def kept(chosen: Tensor, weights: Tensor) -> Tensor:
        empty = torch.zeros(len(chosen), experts)
        whole = empty.to(weights.dtype).scatter(1, chosen, weights.detach())
        routed, found = empty.bool().scatter(1, chosen, value=True), empty.bool()
        for own in places:
            found[own] = megatron_mask(whole[own], routed[own], per_token, capacity)
        model.refused += int((routed & ~found).sum())
        return found

    def refuse(_: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, chosen, weights = given
        return hidden, chosen, weights * kept(chosen, weights).gather(1, chosen)

    def refuse_scores(_: nn.Module, __: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        scores, logits = output  # of Llama 4, for all experts
        chosen = logits.topk(per_token)[1]
        return scores * kept(chosen, scores.gather(1, chosen)), logits

    model.refused = 0
    for name, module in model.named_modules():
        if type(module).__name__ == "Llama4Router":
            module.register_forward_hook(refuse_scores)
        elif name.endswith(".experts") and type(module).__name__ != "Llama4TextExperts":
            module.register_forward_pre_hook(refuse)
    return model


def train(rank: int, plan: Plan) -> dict[str, Any]:
    """As `train_with_engine`, with the number of choices that this rank has refused."""
    from parcompile.runtime import expert_parallel

    kept: list[Any] = []
    init = expert_parallel.Capacity.__init__

    def remembered(self: Any, rows: int) -> None:
        init(self, rows)
        kept.append(self)

    expert_parallel.Capacity.__init__ = remembered  # type: ignore[method-assign]
    found = train_with_engine(rank, plan, True, STEPS)
    return {**found, "refused": sum(one.told()[0] for one in kept)}


def compare(case: Case) -> tuple[list[Margin], int, int]:
    """How far live ranks are from one process, and how many choices they and it have refused."""
    plan, models = case.plan(), list[Any]()

    def built(plan: Plan) -> nn.Module:
        models.append(refusing(plan))
        return models[-1]

    ranks = run_ranks(case.ranks, train, plan)
    found = compared(
        plan, ranks, lambda seed: train_in_one_process(plan, masked=True, steps=STEPS, built=built, seed=seed)
    )
    return found, sum(one["refused"] for one in ranks), models[0].refused
