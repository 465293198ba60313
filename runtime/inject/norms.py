"""A norm over all heads whose heads are spread over the tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.collectives import copy_to_group, reduce_from_group


class SpreadRMSNorm(nn.Module):
    """RMSNorm over a width of which each rank holds a slice: [.., W/tp] to [.., W/tp].

    The squares are summed over the ranks; in backward so is what each rank's slice contributes to their gradient. Where
    `replicas` ranks hold the same slice, it counts once.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        epsilon: float,
        width: int,
        group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.weight, self.epsilon, self.width = weight, epsilon, width
        self.group, self.replica_group = group, replica_group
        self.replicas = 1 if replica_group is None else dist.get_world_size(replica_group)

    def forward(self, x: Tensor) -> Tensor:
        """Computed in float32, as Hugging Face's norms are."""
        wide = x.float()
        squares = copy_to_group(reduce_from_group(wide.square().sum(-1, keepdim=True), self.group), self.group)
        wide = wide * torch.rsqrt(squares / (self.width * self.replicas) + self.epsilon)
        return (copy_to_group(self.weight, self.replica_group) * wide).to(x.dtype)

    def extra_repr(self) -> str:
        """The whole width, and the slice."""
        return f"{self.width}, held={self.weight.numel()}, eps={self.epsilon}"
