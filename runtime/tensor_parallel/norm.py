"""Norms in the sequence-parallel region.

Each rank normalises its own tokens, so that its gradient of the norm's weight is a part; the parts are summed over the
ranks in backward or, with `sum_later`, by `sum_partial_gradients` for all norms of a model together.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from parcompile.runtime.collectives import Group, copy_to_group, group_size

from .partial import mark_partial

__all__ = ["SequenceParallelLayerNorm", "SequenceParallelRMSNorm"]


class _Partial(nn.Module):
    """What both norms share: whose gradients are summed, and when."""

    def __init__(self, *args: Any, group: Group = None, sum_later: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self._summing = None if sum_later else group
        self.sum_later = sum_later and group_size(group) > 1
        self._mark()

    def _mark(self) -> None:
        for parameter in self.parameters() if self.sum_later else ():
            mark_partial(parameter)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # `to_empty` and the like make new parameters, which know nothing of the old ones' marks.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()
        return self


class SequenceParallelRMSNorm(_Partial, nn.RMSNorm):
    """`nn.RMSNorm` of this rank's part of the sequence; `group` None is the plain norm."""

    @classmethod
    def from_norm(cls, norm: nn.RMSNorm, group: Group, *, sum_later: bool = False) -> Self:
        """The same norm, on the same parameters."""
        new = cls(
            norm.normalized_shape, norm.eps, norm.elementwise_affine, group=group, sum_later=sum_later, device="meta"
        )
        new.weight = norm.weight
        new._mark()
        return new

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] to [.., H]."""
        weight = None if self.weight is None else copy_to_group(self.weight, self._summing)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class SequenceParallelLayerNorm(_Partial, nn.LayerNorm):
    """`nn.LayerNorm` of this rank's part of the sequence; `group` None is the plain norm."""

    @classmethod
    def from_norm(cls, norm: nn.LayerNorm, group: Group, *, sum_later: bool = False) -> Self:
        """The same norm, on the same parameters."""
        options: dict[str, Any] = {"group": group, "sum_later": sum_later, "device": "meta"}
        new = cls(norm.normalized_shape, norm.eps, norm.elementwise_affine, norm.bias is not None, **options)
        new.weight, new.bias = norm.weight, norm.bias
        new._mark()
        return new

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] to [.., H]."""
        weight = None if self.weight is None else copy_to_group(self.weight, self._summing)
        bias = None if self.bias is None else copy_to_group(self.bias, self._summing)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
