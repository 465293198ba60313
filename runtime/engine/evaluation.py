"""The loss on data that is not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from parcompile.runtime.data import Batch, split_batch, stack
from parcompile.runtime.labels import IGNORED_LABEL
from parcompile.runtime.loss.expert_balance import BalancedLoss


def evaluate(engine: Any, dataset: Sequence[Any], *, batches: int | None = None) -> float:
    """The mean loss of a data set's predicted tokens, the same on every rank: nats per token.

    Forward passes take the plan's `eval_micro_batch_size` sequences. dp shares the sequences out; the result does not
    depend on the layout. A loss that balances experts is not counted.

    Args:
        engine: from `initialize`.
        dataset: samples, as for `PlanLoader`.
        batches: how many batches of the plan's `eval_global_batch_size` sequences to look at; None: the whole data set.
    """
    mesh, training, model = engine.mesh, engine.mesh.plan.spec.training, engine.module
    micro, dp = training.eval_micro_batch_size, mesh.size("dp")
    count = len(dataset) if batches is None else min(len(dataset), batches * training.eval_global_batch_size)
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    was_training, loss_function = model.training, model.loss_function
    engine.eval()
    if isinstance(loss_function, BalancedLoss):
        model.loss_function = loss_function.causal
    try:
        with torch.no_grad():
            for first in range(mesh.index("dp") * micro, count, dp * micro):
                batch = [dataset[index] for index in range(first, min(first + micro, count))]
                total += _sums(engine, split_batch(stack(batch), mesh))
    finally:
        model.loss_function = loss_function
        engine.train(was_training)
    dist.all_reduce(total, group=mesh.group("dp-cp"))
    return float(total[0] / total[1].clamp(min=1))


def _sums(engine: Any, batch: Batch) -> torch.Tensor:
    """Loss and number of this rank's tokens."""
    loss = engine(**batch, num_items_in_batch=1.0).loss
    return torch.stack([loss.double(), (batch["shift_labels"] != IGNORED_LABEL).sum().double()])
