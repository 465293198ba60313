"""Packed documents and padded sequences train as each text on its own would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from training_runs import initial_model, make_plan

from parcompile.plan import Plan
from parcompile.runtime.batches import shift_labels

LENGTHS = ((5, 8, 3), (16,))
"""Documents of the two rows of the batch."""


def packed(plan: Plan) -> dict[str, Tensor]:
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(3))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def padded(plan: Plan) -> dict[str, Tensor]:
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(16) < torch.tensor([[11], [16]])).long()
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def injected(rank: int, plan: Plan, batch: dict[str, Tensor]) -> dict[str, Any]:
    from parcompile.runtime import join, reduce_loss, split_batch
    from parcompile.runtime.inject import inject

    mesh = join(plan)
    model = inject(initial_model(plan), mesh)
    loss = model(**split_batch(batch, mesh)).loss
    loss.backward()
    gradient = model.model.norm.weight.grad
    torch.distributed.all_reduce(gradient)
    return {"loss": reduce_loss(loss, mesh), "gradient": gradient}


def texts_alone(plan: Plan, texts: list[Tensor]) -> tuple[float, Tensor]:
    model = initial_model(plan)
    total = sum(
        torch.nn.functional.cross_entropy(model(text[None]).logits[0, :-1], text[1:], reduction="sum") for text in texts
    )
    loss = total / sum(len(text) - 1 for text in texts)
    loss.backward()
    gradient = model.model.norm.weight.grad
    assert gradient is not None
    return float(loss.detach()), gradient


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_a_batch_trains_as_its_texts_alone(kind: str) -> None:
    plan = make_plan(2, {"cp": 2}, training={"global_batch_size": 2})
    batch = packed(plan) if kind == "packed" else padded(plan)
    ids = batch["input_ids"]
    texts = [*ids[0].split(LENGTHS[0]), ids[1]] if kind == "packed" else [ids[0, :11], ids[1]]
    loss, gradient = texts_alone(plan, texts)
    for found in run_ranks(2, injected, plan, batch):
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        assert float((found["gradient"] - gradient).norm() / gradient.norm()) < 1e-5


def test_the_last_token_of_a_document_predicts_nothing() -> None:
    labels, positions = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 0, 1]])
    assert shift_labels(labels, positions).tolist() == [[6, -100, 8, -100]]
