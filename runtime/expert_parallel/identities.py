"""Experts that give back what they take (LongCat-Flash, arXiv 2509.01322, section 2.2.1), beside experts that compute.

transformers visits experts one after the other, those that give back too. Here those that compute do so in one grouped
product, and what is given back is weighted once for each token. Tensor-parallel ranks have the same tokens, and their
outputs are parts of a sum: the first rank gives back.

Shapes: A tokens, k experts of a token, H hidden size, F width of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parcompile.layout.grid import Axis
from parcompile.runtime.groups import Mesh
from parcompile.runtime.transport import group_rank

from .grouped import can_be_grouped, grouped


def pass_on(model: nn.Module, mesh: Mesh) -> None:
    """Lets modules of experts, some of which give back what they take, compute as this module does."""
    moe = mesh.plan.spec.model.shape.moe
    if moe is None or not hasattr(model, "config"):
        return
    gives_back = group_rank(mesh.parallel_group(Axis.TP)) == 0
    for module in model.modules():
        if hasattr(module, "identity_expert"):
            PassedOn(module, moe.num_experts, moe.num_identities, gives_back=gives_back)


class PassedOn:
    """Takes the place of the `forward` of a module of experts.

    Args:
        module: the experts of transformers. `num_experts` becomes the number of those on this rank that compute.
        experts: how many compute, over all ranks.
        count: how many give back what they take.
        gives_back: whether this rank does that for them.
    """

    def __init__(self, module: nn.Module, experts: int, count: int, *, gives_back: bool) -> None:
        experts_: Any = module
        self.count, self._gives_back, self._module, self._experts = count, gives_back, experts_, experts
        experts_.num_experts = experts
        experts_.identity_expert = _Nothing()
        experts_.forward = self

    def __call__(self, hidden_AH: Tensor, chosen_Ak: Tensor, weights_Ak: Tensor) -> Tensor:
        """As the experts of transformers: of each token the sum of what its experts give, by their weights."""
        done_AH = self.computed(hidden_AH, chosen_Ak, weights_Ak)
        if not self._gives_back or not self.count:
            return done_AH
        share_A1 = weights_Ak.masked_fill(chosen_Ak < self._experts, 0.0).sum(-1, keepdim=True)
        return done_AH + (hidden_AH * share_A1).to(hidden_AH.dtype)

    def computed(self, hidden_AH: Tensor, chosen_Ak: Tensor, weights_Ak: Tensor) -> Tensor:
        """The part of that sum of the experts that compute."""
        module = self._module
        if can_be_grouped(module):
            return grouped(module, hidden_AH, chosen_Ak, weights_Ak, beyond=True)
        own: Any = type(module).forward
        return own(module, hidden_AH, chosen_Ak, weights_Ak)  # type: ignore[no-any-return]


class _Nothing(nn.Module):
    """Stands for what gives back, where transformers' own loop runs."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Zeros."""
        return torch.zeros_like(hidden)
