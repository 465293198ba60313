"""Contract: losses of one's own, from log-probabilities, entropy and divergence, train as in one process.

The loss looks at whole sequences (a preference), at single tokens (a penalty by a reference model), and at their
entropy; words and tokens are spread over ranks. Its definition in one process is that on whole logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from closeness import assert_close, nudge
from ranks import run_ranks
from torch import Tensor
from training_runs import compared, initial_model, make_plan, plain_optimizer, samples

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks

STEPS = 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2, "sequence_parallel": True}),
    "cp2": (2, {"cp": 2, "cp_layout": "contiguous"}),
    "tp2 x cp2": (4, {"tp": 2, "cp": 2}),
}


def loss_of(values: dict[str, Tensor]) -> Tensor:
    """From values of whole sequences [B, S]."""
    counts = (values["log_probs"] != 0).sum(-1)
    places = torch.arange(values["log_probs"].shape[1])
    preference = -torch.nn.functional.logsigmoid(0.3 * (values["log_probs"] * places.cos()).sum(-1))
    tokens = (0.4 * values["kl"] - 0.1 * values["entropy"]).sum(-1) / counts
    return (preference + tokens).mean()


def reference_model(plan: Plan) -> torch.nn.Module:
    model = initial_model(plan)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def on_ranks(rank: int, plan: Plan) -> dict[str, Any]:
    from parcompile.runtime import initialize
    from parcompile.runtime.inject import inject
    from parcompile.runtime.loss import entropy, kl_divergence, log_probs, whole_sequences

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan, masked=True))
    mesh, reference = engine.mesh, inject(reference_model(plan), engine.mesh)
    batches, found = iter(loader), {"rank": rank, "losses": [], "norms": [], "values": []}
    for _ in range(STEPS):
        batch = next(batches)
        with torch.no_grad():
            others = reference(**batch).logits
        logits, labels = engine(**batch).logits, batch["shift_labels"]
        values = {
            "log_probs": log_probs(logits, labels, mesh),
            "kl": kl_divergence(logits, others, mesh, labels),
            "entropy": entropy(logits, mesh, labels),
        }
        values = {name: whole_sequences(one, mesh) for name, one in values.items()}
        loss = loss_of(values)
        engine.backward(loss)
        engine.step()
        found["losses"].append(float(loss))
        found["norms"].append(float(engine.get_global_grad_norm()))
        found["values"].append({name: one.detach() for name, one in values.items()})
    found["parameters"] = {name: one.detach().clone() for name, one in engine.module.named_parameters()}
    try:
        entropy(logits, mesh, labels[:, 1:])
    except ValueError as error:
        found["said"] = str(error)
    return found


def in_one_process(plan: Plan) -> Callable[[int | None], dict[str, Any]]:
    def train(seed: int | None) -> dict[str, Any]:
        from parcompile.runtime import shift_labels

        model, reference = initial_model(plan), reference_model(plan)
        nudge(model, seed)
        optimizer, size = plain_optimizer(model, plan), plan.spec.training.global_batch_size
        data, found = samples(plan, masked=True), {"losses": [], "norms": [], "values": []}
        for step in range(STEPS):
            batch = data[step * size : (step + 1) * size]
            ids = torch.stack([sample["input_ids"] for sample in batch])
            labels = shift_labels(torch.stack([sample["labels"] for sample in batch]))
            with torch.no_grad():
                others = reference(input_ids=ids).logits.log_softmax(-1)
            logs = model(input_ids=ids).logits.log_softmax(-1)
            values = {
                "log_probs": logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1),
                "kl": (logs.exp() * (logs - others)).sum(-1),
                "entropy": -(logs.exp() * logs).sum(-1),
            }
            values = {name: one.masked_fill(labels == -100, 0.0) for name, one in values.items()}
            loss = loss_of(values)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), plan.spec.training.gradient_clipping)
            optimizer.step()
            found["losses"].append(float(loss.detach()))
            found["norms"].append(float(norm))
            found["values"].append({name: one.detach() for name, one in values.items()})
        return {**found, "parameters": {name: one.detach() for name, one in model.named_parameters()}}

    return train


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_of_log_probs_entropy_and_divergence_trains_as_in_one_process(layout: str) -> None:
    world, parallelism = LAYOUTS[layout]
    plan = make_plan(world, parallelism)
    ranks, train = run_ranks(world, on_ranks, plan), in_one_process(plan)
    expected = train(None)
    for margin in compared(plan, ranks, train):
        assert margin.ratio <= 1 / 3, margin.text
    for rank in ranks:
        assert_close(rank["values"], expected["values"], rerun=train_values(train))
        assert "do not match" in rank["said"]


def train_values(train: Callable[[int | None], dict[str, Any]]) -> Callable[[int | None], Any]:
    return lambda seed: train(seed)["values"]
