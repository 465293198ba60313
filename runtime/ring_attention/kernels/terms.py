"""ALiBi, bias and dropout: numbers added to the scores and dropped weights, by positions in the whole sequence.

A dropout mask is a function of the seed, the row of the batch, the query head and the positions of query and key, so
that it is the same whatever ranks, layout and implementation compute it.

Shapes: B batch, H query heads, Q query tokens, S key tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .hashing import WORD, combined, of_seed


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one block.

    `slopes` [H]: ALiBi subtracts slope · distance from the scores (arXiv 2108.12409). `bias` [1 or B, 1 or H, Q, all
    tokens]: added to the scores. `dropout`: the chance that a weight is dropped; `rows` [B] and `heads` [H] are numbers
    in the whole batch and among all heads. `queries` [Q] and `keys` [S] are positions.
    """

    queries: Tensor
    keys: Tensor
    rows: Tensor
    heads: Tensor
    slopes: Tensor | None = None
    bias: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0

    def of_pass(self, rows: slice, heads: slice) -> Terms:
        """Only some rows of the batch and some heads."""
        bias = self.bias
        if bias is not None:
            bias = bias[rows if bias.shape[0] > 1 else slice(None), heads if bias.shape[1] > 1 else slice(None)]
        slopes = None if self.slopes is None else self.slopes[heads]
        return replace(self, rows=self.rows[rows], heads=self.heads[heads], slopes=slopes, bias=bias)

    def part(self, queries: slice, keys: slice) -> Terms:
        """Only some queries and keys."""
        bias = None if self.bias is None else self.bias[:, :, queries]
        return replace(self, queries=self.queries[queries], keys=self.keys[keys], bias=bias)

    @property
    def adds(self) -> bool:
        """Something is added to the scores."""
        return self.slopes is not None or self.bias is not None

    def added(self, dtype: torch.dtype) -> Tensor:
        """What is added to the scores: [1 or B, 1 or H, Q, S]."""
        assert self.adds, "nothing is added"
        found = None
        if self.slopes is not None:
            distance = (self.queries.unsqueeze(-1) - self.keys).abs().to(dtype)
            found = -self.slopes.to(dtype).view(1, -1, 1, 1) * distance
        if self.bias is not None:
            bias = self.bias.index_select(3, self.keys).to(dtype)
            found = bias if found is None else found + bias
        assert found is not None
        return found

    def weight_factors(self, dtype: torch.dtype) -> Tensor:
        """What each weight is multiplied by: 0 or 1 / (1 − dropout), [B, H, Q, S]."""
        bits = combined(of_seed(self.seed), self.rows, 0x3C6EF372)
        # One more dim at a time; the offsets keep equal numbers of different kinds apart.
        offsets = (0x1B873593, 0x5BD1E995, 0x2545F491)
        for numbers, offset in zip((self.heads, self.queries, self.keys), offsets, strict=True):
            bits = combined(bits.unsqueeze(-1), numbers, offset)
        return (bits >= round(self.dropout * (WORD + 1))).to(dtype).mul_(1 / (1 - self.dropout))
