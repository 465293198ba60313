"""Joins the attention of one block of keys after another into the attention over all of them.

Shapes: B batch, H query heads, S query tokens, D head dim. Log-sum-exp is the natural logarithm; −inf says "no key was
seen".

Source: the online softmax of arXiv 1805.02867, in the form with normalised partial outputs (arXiv 2112.05682).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over blocks and ranks are kept: fp32, or fp64 for fp64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def unseen_rows_to_infinity(lse: Tensor) -> Tensor:
    """Log-sum-exp for a backward kernel: `exp(score − lse)` must be 0, not NaN, in rows that saw no key."""
    return lse.masked_fill(lse == -math.inf, math.inf)


class RunningAttention:
    """Attention of queries over the keys seen so far: `out` [B, H, S, D] and `lse` [B, H, S], both in fp32 or fp64."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        """Start with no key seen; the contents of both tensors do not matter and are overwritten."""
        self.out, self.lse = out, lse
        self._started = False

    def add(self, rows: slice, block_out: Tensor, block_lse: Tensor) -> None:
        """Merge the attention of the queries `rows` over keys that were not seen before."""
        if not self._started:
            self._started = True
            if block_out.shape[2] == self.out.shape[2]:
                self.out.copy_(block_out)
                self.lse.copy_(block_lse)
                return
            self._clear()
        lse = self.lse[:, :, rows]
        # new = old + weight · (block − old): one pass over the output, a convex combination whatever the magnitudes.
        weight = torch.sigmoid(block_lse - lse).masked_fill_(block_lse == -math.inf, 0.0)
        self.out[:, :, rows].lerp_(block_out.to(self.out.dtype), weight.unsqueeze(-1))
        lse.copy_(torch.logaddexp(lse, block_lse))

    def add_sinks(self, logits_H: Tensor) -> None:
        """Merge one more key for every query of a head, with this score and a value of 0."""
        self.finish()
        lse = torch.logaddexp(self.lse, logits_H.to(self.lse.dtype).view(1, -1, 1))
        self.out.mul_(torch.exp(self.lse - lse).unsqueeze(-1))
        self.lse.copy_(lse)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp; queries that saw no key have output 0 and log-sum-exp −inf."""
        if not self._started:
            self._started = True
            self._clear()
        return self.out, self.lse

    def _clear(self) -> None:
        self.out.zero_()
        self.lse.fill_(-math.inf)
