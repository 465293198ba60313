"""Walks a data set for the ranks of a plan: each gets its sequences (dp) and its tokens of them (cp).

The order of the data does not depend on the layout: step s trains on samples s·B … (s+1)·B − 1 whatever dp is, so that
any two layouts see the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.runtime.groups import Mesh
from parcompile.runtime.labels import IGNORED_LABEL, shift_labels
from parcompile.runtime.micro_batch import FIRST_SAMPLE
from parcompile.runtime.transport.backend import to_device

from .batches import Batch, split_batch, stack, without_padding


class PlanLoader:
    """Yields this rank's micro-batches, step after step, without end: the data set is walked round and round.

    Args:
        dataset: a sequence of samples, each a mapping of tensors, arrays or lists [S] (`input_ids`, `labels`) or token
            ids [S] alone; without labels, token ids are their own. Rows of `datasets.Dataset`, in any format.
        mesh: this rank's place.
        first_step: the step to begin with, after a resume.
    """

    def __init__(self, dataset: Sequence[Any], mesh: Mesh, first_step: int = 0) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"a {type(dataset).__name__} is not read: samples are looked up by number, so that every layout and "
                "every resumed run sees the same; give a sequence (a streamed data set: list(data.take(n)))"
            )
        if len(dataset) == 0:
            raise ValueError("the data set is empty")
        self._dataset = dataset
        self._mesh = mesh
        self.step = first_step

    def __iter__(self) -> Iterator[Batch]:
        """Micro-batches; the first of a step counts the step's tokens over dp."""
        while True:
            micro_batches = [self._whole(micro) for micro in range(self._steps)]
            divisor = self._divisor(micro_batches)
            for micro, batch in enumerate(micro_batches):
                first = self._first_sample(micro)
                yield {**self._part(batch), "num_items_in_batch": divisor, FIRST_SAMPLE: first}
            self.step += 1

    @property
    def _steps(self) -> int:
        return self._mesh.plan.spec.training.gradient_accumulation_steps

    def _first_sample(self, micro: int) -> int:
        """The number of the first sequence of this dp rank's micro-batch."""
        training, dp = self._mesh.plan.spec.training, self._mesh.size("dp")
        in_step = (micro * dp + self._mesh.index("dp")) * training.micro_batch_size
        return self.step * training.global_batch_size + in_step

    def _numbers(self, micro: int) -> list[int]:
        """Of the samples of this dp rank's micro-batch in the data set."""
        first, size = self._first_sample(micro), self._mesh.plan.spec.training.micro_batch_size
        return [index % len(self._dataset) for index in range(first, first + size)]

    def _part(self, batch: Batch) -> Batch:
        """This rank's tokens of it."""
        return split_batch(batch, self._mesh)

    def _whole(self, micro: int) -> Batch:
        """The whole sequences of this dp rank's micro-batch."""
        numbers = self._numbers(micro)
        batch = stack([self._dataset[number] for number in numbers], numbers)
        if "labels" in batch:
            batch["shift_labels"] = shift_labels(batch.pop("labels"), batch.get("position_ids"))
        if "attention_mask" in batch:
            batch["shift_labels"] = without_padding(batch["shift_labels"], batch["attention_mask"])
        return batch

    def _divisor(self, micro_batches: list[Batch]) -> Tensor:
        """Predicted tokens of the global batch / (steps · dp); see `parcompile.runtime.loss`."""
        count = torch.stack([(batch["shift_labels"] != IGNORED_LABEL).sum() for batch in micro_batches]).sum().float()
        count = to_device(count, self._mesh.device)
        dp = self._mesh.size("dp")
        if dp > 1:
            dist.all_reduce(count, group=self._mesh.group("dp"))
        return count.clamp(min=1) / (self._steps * dp)
