"""A tied embedding: the first stage looks tokens up in it, the last computes logits with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parcompile.layout.groups import EMBEDDING
from parcompile.plan.holding import Holding
from parcompile.runtime.deepspeed_patches.norm import count_on_another_stage
from parcompile.runtime.deepspeed_patches.optimizer_state import accumulated_gradient
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.lora import plain_name
from parcompile.runtime.transport import start_all_reduce


class TiedEmbedding:
    """The weight, where this rank shares it with another stage.

    Its gradient is summed over both once in a step, and counts once in the gradient norm: on the first stage.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._group = mesh.parallel_group(EMBEDDING)
        self._weight: nn.Parameter | None = None
        if self._group is None:
            return
        name = mesh.plan.parameters.before[0].name
        self._weight = next(one for found, one in model.named_parameters() if plain_name(found) == name)
        if not Holding(mesh.plan, mesh.index("pp")).has_embedding:
            count_on_another_stage(self._weight)

    def sum_gradient(self, optimizer: Any) -> None:
        """Adds up what both stages have."""
        if self._weight is None or not self._weight.requires_grad:
            return
        assert self._group is not None
        gradient = accumulated_gradient(optimizer, self._weight)
        with torch.no_grad():
            gradient.copy_(start_all_reduce(gradient, self._group).wait())
