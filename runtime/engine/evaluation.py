"""The loss on data that is not trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parcompile.layout.grid import Axis
from parcompile.runtime.data import Batch, split_batch, stack
from parcompile.runtime.labels import IGNORED_LABEL
from parcompile.runtime.loss.expert_balance import BalancedLoss
from parcompile.runtime.model.lora import without_peft

from .loop import evaluating

_LABELS = ("labels", "shift_labels")
"""Entries of a batch that say which tokens are predicted."""


def evaluate(engine: Any, dataset: Sequence[Any], *, batches: int | None = None) -> float:
    """The mean loss of a data set's predicted tokens, the same on every rank: nats per token.

    Forward passes take the plan's `eval_micro_batch_size` sequences. dp shares the sequences out; the result does not
    depend on the layout. A loss that balances experts is not counted.

    Args:
        engine: from `initialize`.
        dataset: samples, as for `PlanLoader`.
        batches: how many batches of the plan's `eval_global_batch_size` sequences to look at; None: the whole data set.
    """
    mesh, training = engine.mesh, engine.mesh.plan.spec.training
    micro, dp = training.eval_micro_batch_size, mesh.size("dp")
    count = len(dataset) if batches is None else min(len(dataset), batches * training.eval_global_batch_size)
    firsts = range(mesh.index("dp") * micro, count, dp * micro)
    passes = len(firsts)
    if mesh.parallel_group(Axis.EP) is not None:
        # Ranks that exchange tokens make equally many passes: the last ones may be of nothing that counts.
        passes = len(range(0, count, dp * micro))
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)

    def read() -> Iterator[Batch]:
        for number in range(passes):
            first = firsts[number] if number < len(firsts) else 0
            samples = [dataset[index] for index in range(first, min(first + micro, count))]
            batch = split_batch(stack(samples), mesh)
            if number >= len(firsts):
                batch = {**batch, **{name: torch.full_like(batch[name], IGNORED_LABEL) for name in _LABELS}}
            total[1] += (batch["shift_labels"] != IGNORED_LABEL).sum()
            yield {**batch, "num_items_in_batch": 1.0}

    with evaluating(engine), _without_balance(engine.module), engine.loop.together():
        for loss in engine.loop.evaluate(read(), passes):
            total[0] += loss
        dist.all_reduce(total, group=mesh.group("dp-cp"))
        if mesh.size("pp") > 1:
            dist.broadcast(total, group=mesh.group("pp"), group_src=mesh.size("pp") - 1)
    return float(total[0] / total[1].clamp(min=1))


@contextlib.contextmanager
def _without_balance(model: nn.Module) -> Iterator[None]:
    """Within it the loss of a model does not balance its experts."""
    causal: Any = without_peft(model)
    before = causal.loss_function
    if isinstance(before, BalancedLoss):
        causal.loss_function = before.causal
    try:
        yield
    finally:
        causal.loss_function = before
