"""A norm of what each expert gives, where tensor parallelism cuts the experts: a rank has parts of sums only.

Behind the norm each rank keeps 1/tp of the whole, so that the block still ends with a sum of the ranks' parts. Every
rank has the same rows.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.collectives import copy_to_group, group_size, reduce_from_group

EXPERT_NORM = "post_expert_norm"


def norm_whole_rows(block: nn.Module, group: dist.ProcessGroup) -> None:
    """Lets the norm of what the experts of a block give, where it has one, see sums over the ranks."""
    norm = getattr(getattr(block, "experts", None), EXPERT_NORM, None)
    if norm is None:
        return
    ranks = group_size(group)

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # Summed in backward too: each rank has 1/tp of the gradient.
        return copy_to_group(reduce_from_group(args[0], group), group), *args[1:]

    def leave(_: nn.Module, __: Any, whole: Tensor) -> Tensor:
        return whole / ranks

    norm.register_forward_pre_hook(enter)
    norm.register_forward_hook(leave)
