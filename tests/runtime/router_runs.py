"""Losses of routers on live ranks and in one process, whose losses are upstream's: micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from closeness import Margin, nudge
from expert_runs import Case
from ranks import run_ranks
from torch import Tensor
from training_runs import compared, initial_model, plain_optimizer, samples, train_with_engine

from parcompile.model.catalogue import router_scores
from parcompile.plan import Plan

STEPS = 2
BOTH = {"aux_loss": 0.3, "z_loss": 0.02}


def router(scope: str, **more: Any) -> dict[str, Any]:
    """A section of training; its weights are so large that a factor that is missing is seen."""
    return {"router": {**BOTH, "aux_loss_scope": scope, **more}}


def megatron_balance(logits: Tensor, per_token: int, scores: str) -> Tensor:
    """Of the tokens [T, E] of one layer, as Megatron-Core computes it: `compute_routing_scores_for_aux_loss` and
    `switch_load_balancing_loss_func` of core/transformer/moe/moe_utils.py, with a weight of 1."""
    shares = torch.softmax(logits, -1) if scores == "softmax" else torch.sigmoid(logits)
    shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) if scores == "sigmoid" else shares
    chosen = torch.zeros_like(logits).int().scatter(1, torch.topk(shares, per_token, dim=1)[1], 1).bool()
    tokens, experts = logits.shape
    return torch.sum(shares.sum(0) * chosen.sum(0)) * (experts / (per_token * tokens * tokens))


def padded(plan: Plan) -> list[dict[str, Tensor]]:
    """Samples of which every other one ends early."""
    found = samples(plan, masked=True)
    for number, sample in enumerate(found):
        mask = torch.arange(len(sample["labels"])) < len(sample["labels"]) - 5 * (number % 2)
        sample |= {"labels": sample["labels"].masked_fill(~mask, -100), "attention_mask": mask.long()}
    return found


def of_routers(plan: Plan, layers: list[Tensor], real: Tensor) -> Tensor:
    """What the routers of a step add to its loss.

    Args:
        plan: the plan.
        layers: of each layer the logits [samples, S, E].
        real: False for padding [samples, S].
    """
    training, moe = plan.spec.training, plan.spec.model.shape.moe
    given, micro = training.router, training.micro_batch_size
    assert given is not None
    assert moe is not None
    scores, per_token = router_scores(plan.spec.model.shape.model_type), moe.num_experts_per_token
    assert scores is not None
    found = torch.zeros(())
    for layer in layers:
        of_rows = [torch.logsumexp(row[mask], -1).square().mean() for row, mask in zip(layer, real, strict=True)]
        found = found + given.z_loss * torch.stack(of_rows).mean()
    size = {"sequence": 1, "global_batch": len(real)}.get(given.aux_loss_scope, micro)
    groups = list(zip(real.split(size), *(one.split(size) for one in layers), strict=True))
    for mask, *group in groups:
        flat = tuple(one[mask] for one in group)
        if given.aux_loss_scope == "micro_batch":
            import transformers.models.mixtral.modeling_mixtral as upstream

            balance = upstream.load_balancing_loss_func(flat, moe.num_choices, per_token)
        else:
            balance = sum(megatron_balance(one, per_token, scores) for one in flat)
        found = found + given.aux_loss * balance / len(groups)
    return found


def train_in_one_process(plan: Plan, seed: int | None = None, batches: Sequence[slice] | None = None) -> dict[str, Any]:
    """With transformers and torch alone: all samples of a step at once; on these `batches`, where they are said."""
    training, model = plan.spec.training, initial_model(plan)
    nudge(model, seed)
    optimizer, data, seen = plain_optimizer(model, plan), padded(plan), list[Tensor]()
    owners = [one._can_record_outputs for one in model.modules() if hasattr(one, "_can_record_outputs")]
    kind = next(one["router_logits"] for one in owners if one and "router_logits" in one)
    for module in model.modules():
        if isinstance(module, kind.target_class):
            module.register_forward_hook(lambda _, __, output: seen.append(output[kind.index]))
    losses, norms = [], []
    size = training.global_batch_size
    for place in batches or [slice(step * size, (step + 1) * size) for step in range(STEPS)]:
        seen.clear()
        batch = data[place]
        whole = {name: torch.stack([sample[name] for sample in batch]) for name in batch[0]}
        loss = model(**whole).loss
        real = whole["attention_mask"].bool()
        loss = loss + of_routers(plan, [one.view(*real.shape, -1) for one in seen], real)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clipping)))
        optimizer.step()
        losses.append(float(loss.detach()))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "parameters": parameters}


def compare(case: Case) -> list[Margin]:
    """How far live ranks are from one process."""
    plan = case.plan()
    ranks = run_ranks(case.ranks, train_with_engine, plan, True, STEPS, 0.0, initial_model, padded)
    return compared(plan, ranks, lambda seed: train_in_one_process(plan, seed))


def drawn() -> list[Case]:
    """Every scope over layouts of all axes, with and without accumulation; two of each kind of scores."""
    pairs = {"global_batch_size": 8, "micro_batch_size": 2}
    layouts: list[tuple[dict[str, Any], dict[str, Any], int]] = [
        ({}, pairs, 1),
        ({"dp": 2}, pairs, 2),
        ({"tp": 2, "cp": 2}, pairs, 1),
        ({"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}, {"activation_checkpointing": "full"}, 1),
        ({"cp": 2, "dp": 2, "ep": 2}, pairs, 0),
        ({"pp": 2, "cp": 2, "ep": 2}, pairs, 1),
        ({"pp": 2, "tp": 2, "sequence_parallel": True}, {"activation_checkpointing": "full"}, 1),
        ({"pp": 2, "dp": 2, "ep": 2, "virtual_pipeline_model_parallel_size": 2}, pairs, 1),
        ({"tp": 2, "cp": 2, "dp": 2, "ep": 4, "sequence_parallel": True}, {"global_batch_size": 8}, 1),
        ({"tp": 2, "dp": 2, "ep": 4, "expert_tp": 1}, pairs, 1),
        ({"dp": 2, "ep": 2}, pairs, 3),
    ]
    scopes = ("sequence", "global_batch", "micro_batch_per_layer", "micro_batch")
    return [
        Case(model, layout, {**training, **router(scope)}, zero=zero)
        for number, (layout, training, zero) in enumerate(layouts)
        for scope in scopes
        for model in ("mixtral", "deepseek_v3")
        if model == "mixtral" or (number + scopes.index(scope)) % 2
    ]
