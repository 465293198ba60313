"""One grouped product for modules of experts that transformers has compute in another way.

Shapes: A tokens, k experts of a token, H hidden size, F width of an expert.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

_ALIGNMENT = 16
"""Bytes that the rows of torch's grouped product are a multiple of."""


def can_be_grouped(module: nn.Module, dtype: torch.dtype | None = None) -> bool:
    """Whether torch's grouped product takes the weights of a module of experts, as they are or in another type.

    It wants rows of a multiple of 16 bytes, in the weights and in what they give.
    """
    stacks = [one for one in module.parameters(recurse=False) if one.dim() == 3]
    return not any(size * (dtype or one.dtype).itemsize % _ALIGNMENT for one in stacks for size in one.shape[1:])


def loop_where_narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Lets experts multiply one after the other where their slices are too narrow for torch's grouped product.

    Args:
        model: of Hugging Face, with this rank's slices of the experts.
        dtype: in which they train.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) is None:
            continue
        if not all(can_be_grouped(module, one) for one in (None, dtype)):
            own: Any = copy.copy(config)
            own._experts_implementation = "eager"
            module.config = own


def grouped(
    module: Any,
    hidden_AH: Tensor,
    chosen_Ak: Tensor,
    weights_Ak: Tensor,
    *,
    transposed: bool = False,
    beyond: bool = False,
) -> Tensor:
    """[A, H]: of each token the sum of what its experts give, by their weights.

    Args:
        module: `gate_up_proj` and `down_proj` of `num_experts` experts.
        hidden_AH: the tokens.
        chosen_Ak: the experts of each.
        weights_Ak: their weights.
        transposed: the weights are stored as [E, H, 2 F] and [E, F, H], not as [E, 2 F, H] and [E, H, F].
        beyond: there may be choices of `num_experts` and beyond, which give nothing.
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    def gated(both: Tensor) -> Tensor:
        gate, value = both.chunk(2, dim=-1)
        product: Tensor = module.act_fn(gate) * value
        return product

    experts = SimpleNamespace(
        num_experts=module.num_experts,
        gate_up_proj=module.gate_up_proj[: module.num_experts],
        down_proj=module.down_proj,
        act_fn=module.act_fn,
        _apply_gate=gated,
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=transposed,
        is_concatenated=True,
        _is_expert_parallel=beyond,
    )
    found: Tensor = grouped_mm_experts_forward(experts, hidden_AH, chosen_Ak, weights_Ak)
    return found
