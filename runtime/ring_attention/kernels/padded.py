"""A kernel that wants heads of one width, given others: padded with zeros, which change neither scores nor sums.

Latent attention has keys of 192 features and values of 128; other heads are no multiple of 8. Only what a kernel reads
is padded, block by block: messages and what is kept stay as they are.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .gradients import Gradients, Queries
from .kernel import Kernel, PackingKernel, Terms
from .packs import Launch
from .tiles import Band


def padded(kernel: Kernel, width: int) -> Kernel:
    """`kernel`, with heads padded to `width` features."""
    return _PaddedPacks(kernel, width) if isinstance(kernel, PackingKernel) else _Padded(kernel, width)


class _Padded:
    """Gradients are added without what stands in the padding."""

    def __init__(self, kernel: Kernel, width: int) -> None:
        self._kernel, self._width = kernel, width
        self.name = f"{kernel.name}, padded to {width}"
        self.backward_rows = kernel.backward_rows

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, band: Band, scale: float, terms: Terms | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the block."""
        wide = map(self._wide, (query, key, value))
        out, lse = self._kernel.forward(*wide, band=band, scale=scale, terms=terms)
        return out[..., : value.shape[3]], lse

    def backward(
        self, read: Queries, key: Tensor, value: Tensor, *, band: Band, terms: Terms | None = None, into: Gradients
    ) -> None:
        """Add the gradients of the block."""
        wide = map(self._wide, (key, value))
        self._kernel.backward(self._read(read), *wide, band=band, terms=terms, into=into)

    def _read(self, read: Queries) -> Queries:
        query, grad_out, out = map(self._wide, (read.query, read.grad_out, read.out))
        return Queries(query, grad_out, out, read.lse, read.scale)

    def _wide(self, heads: Tensor) -> Tensor:
        return F.pad(heads, (0, self._width - heads.shape[3])) if heads.shape[3] < self._width else heads


class _PaddedPacks(_Padded):
    """Of a kernel that computes many tiles in one launch."""

    _kernel: PackingKernel

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, *, launch: Launch, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of all queries of many tiles."""
        out, lse = self._kernel.forward_packed(*map(self._wide, (query, key, value)), launch=launch, scale=scale)
        return out[..., : value.shape[3]], lse

    def backward_packed(self, read: Queries, key: Tensor, value: Tensor, *, launch: Launch, into: Gradients) -> None:
        """Add the gradients of many tiles."""
        self._kernel.backward_packed(self._read(read), *map(self._wide, (key, value)), launch=launch, into=into)
