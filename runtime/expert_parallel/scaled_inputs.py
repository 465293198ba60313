"""Experts of which the router's scores scale what they take, not what they give (Llama 4).

transformers multiplies each token by its score for every expert, zero for those that were not chosen, and has all
experts compute all tokens in one product: a token costs as much as if it had chosen every expert. An expert gives zero
for a token of zeros, so that a token has to visit those alone that it has chosen. Blocks are called with the same names
and give the same numbers, and what they give to expert parallelism is what other types give to it.

Source: `Llama4TextMoe` and `Llama4TextExperts` of transformers 5.23.

Shapes: A tokens, E experts, k experts of a token, R rows, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .grouped import can_be_grouped, grouped


def visit_chosen(model: nn.Module) -> None:
    """Lets tokens visit the experts alone that they have chosen."""
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe":
            ScaledExperts(module.get_submodule("experts"))
            Block(module)


class Block:
    """Takes the place of the `forward` of a router with its experts and the shared one."""

    def __init__(self, module: nn.Module) -> None:
        block: Any = module
        self._block = block
        block.forward = self

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [.., H] give [A, H], and the router's logits [A, E]."""
        block = self._block
        hidden_AH = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores_AE, logits_AE = block.router(hidden_AH)
        # By the logits: large ones have the same score.
        chosen_Ak = logits_AE.topk(block.top_k, dim=1).indices
        routed_AH = block.experts(hidden_AH, chosen_Ak, scores_AE.gather(1, chosen_Ak))
        return block.shared_expert(hidden_AH) + routed_AH, logits_AE


class ScaledExperts:
    """Takes the place of the `forward` of a module of experts."""

    def __init__(self, module: nn.Module) -> None:
        experts: Any = module
        self._module = experts
        experts.forward = self

    def __call__(self, hidden_AH: Tensor, chosen_Ak: Tensor, scales_Ak: Tensor) -> Tensor:
        """[A, H]: of each token the sum of what its experts give for it, scaled for each."""
        rows_RH = (hidden_AH.unsqueeze(1) * scales_Ak.unsqueeze(2)).flatten(0, 1)
        done_RH = self.computed(rows_RH, chosen_Ak.reshape(-1, 1))
        return done_RH.view(*chosen_Ak.shape, -1).sum(1)

    def computed(self, rows_RH: Tensor, chosen_R1: Tensor) -> Tensor:
        """[R, H]: what the expert of each row gives for it."""
        module = self._module
        if can_be_grouped(module):
            return grouped(module, rows_RH, chosen_R1, torch.ones_like(rows_RH[:, :1]), transposed=True)
        # As transformers has it: all experts, with zeros for those that were not chosen.
        is_chosen_ER1 = F.one_hot(chosen_R1[:, 0], module.num_experts).to(rows_RH.dtype).t().unsqueeze(-1)
        own: Any = type(module).forward
        done: Tensor = own(module, (rows_RH * is_chosen_ER1).flatten(0, 1))
        return done.view(module.num_experts, *rows_RH.shape).sum(0)
