"""What a kernel is: attention over one local block of keys, forward and backward.

A kernel returns the output *and the log-sum-exp* of a block, and its backward accepts the output and log-sum-exp over
*all* blocks: with these the gradients of blocks simply add up.

Shapes: query [B, H, Q, D], key [B, K, S, D], value [B, K, S, E], log-sum-exp [B, H, Q]; H is a multiple of K (grouped
queries).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from .gradients import Gradients, Queries
from .packs import Launch
from .terms import Terms
from .tiles import Band


class Kernel(Protocol):
    """Attention of queries over one block of keys and values, none of them empty; each query sees a key."""

    @property
    def name(self) -> str:
        """For messages and benchmarks."""

    @property
    def backward_rows(self) -> int | None:
        """The most query rows of one backward call, None for any number."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, band: Band, scale: float, terms: Terms | None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the block."""

    def backward(
        self, read: Queries, key: Tensor, value: Tensor, *, band: Band, terms: Terms | None, into: Gradients
    ) -> None:
        """Add the gradients; `out` and `lse` cover all blocks, `lse` +inf in rows that saw no key."""


@runtime_checkable
class PackingKernel(Kernel, Protocol):
    """A kernel that computes many tiles in one launch."""

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, *, launch: Launch, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of all queries; of those without a tile 0 and −inf."""

    def backward_packed(self, read: Queries, key: Tensor, value: Tensor, *, launch: Launch, into: Gradients) -> None:
        """Add the gradients of all tiles."""
