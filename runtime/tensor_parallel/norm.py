"""Norms in the sequence-parallel region.

Each rank normalises its own tokens, so that its gradient of the norm's weight is a part; the parts are summed over the
ranks.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from ..collectives import Group, copy_to_group

__all__ = ["SequenceParallelLayerNorm", "SequenceParallelRMSNorm"]


class SequenceParallelRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` of this rank's part of the sequence; `group` None is the plain norm."""

    def __init__(self, *args: Any, group: Group = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    @classmethod
    def from_norm(cls, norm: nn.RMSNorm, group: Group) -> Self:
        """The same norm, on the same parameters."""
        new = cls(norm.normalized_shape, norm.eps, norm.elementwise_affine, group=group, device="meta")
        new.weight = norm.weight
        return new

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] to [.., H]."""
        weight = None if self.weight is None else copy_to_group(self.weight, self.group)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class SequenceParallelLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` of this rank's part of the sequence; `group` None is the plain norm."""

    def __init__(self, *args: Any, group: Group = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    @classmethod
    def from_norm(cls, norm: nn.LayerNorm, group: Group) -> Self:
        """The same norm, on the same parameters."""
        new = cls(
            norm.normalized_shape, norm.eps, norm.elementwise_affine, norm.bias is not None, group=group, device="meta"
        )
        new.weight, new.bias = norm.weight, norm.bias
        return new

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] to [.., H]."""
        weight = None if self.weight is None else copy_to_group(self.weight, self.group)
        bias = None if self.bias is None else copy_to_group(self.bias, self.group)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
