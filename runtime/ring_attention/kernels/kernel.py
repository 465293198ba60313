"""What a kernel is, the dtypes in which it computes, and numbers that are added to scores: ALiBi, bias, dropout.

A dropout mask is a function of the seed, the row of the batch, the query head and the positions of query and key, so
that it is the same whatever ranks, layout and implementation compute it.

A kernel returns the output *and the log-sum-exp* of a block, and its backward accepts the output and log-sum-exp over
*all* blocks: with these the gradients of blocks simply add up.

Shapes: query [B, H, Q, D], key [B, K, S, D], value [B, K, S, E], log-sum-exp [B, H, Q] for B rows of a batch, Q query
tokens and S key tokens; the query heads H are a multiple of K (grouped queries).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from parcompile.runtime.ring_attention.kernels import Band
from parcompile.runtime.ring_attention.kernels.packs import Launch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over blocks and ranks are kept: fp32, or fp64 for fp64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Computes in the types that are given."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


# 32-bit words in place of random numbers: the same wherever they are computed, as far apart as random ones.

WORD = 0xFFFFFFFF

Words = TypeVar("Words", int, Tensor)


def mixed(words: Words) -> Words:
    """32-bit words, in int64, of which every bit depends on every bit of those given.

    Factors are below 2^31, so that no product leaves int64.
    """
    words = ((words ^ (words >> 16)) * 0x7FEB352D) & WORD
    words = ((words ^ (words >> 15)) * 0x735A2D97) & WORD
    return words ^ (words >> 16)


def of_seed(seed: int) -> int:
    """A word for a seed of up to 64 bits."""
    return mixed((seed & WORD) + 1) ^ (seed >> 32 & WORD)


def combined(words: Tensor | int, numbers: Tensor, offset: int) -> Tensor:
    """Words for pairs: `words` and `numbers`, broadcast. Another offset keeps equal numbers of another kind apart."""
    return mixed(words ^ mixed((numbers + offset) & WORD))


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
        slopes = None if self.slopes is None else self.slopes[heads]
        found = replace(self, rows=self.rows[rows], heads=self.heads[heads], slopes=slopes)
        return found.biased(self.bias, rows, heads)

    def biased(self, bias: Tensor | None, rows: slice, heads: slice) -> Terms:
        """With another bias, of which these are the rows and heads."""
        if bias is not None:
            bias = bias[rows if bias.shape[0] > 1 else slice(None), heads if bias.shape[1] > 1 else slice(None)]
        return replace(self, bias=bias)

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


class Kernel(Protocol):
    """Attention of queries over one block of keys and values, none of them empty; each query sees a key."""

    name: str
    """For messages and benchmarks."""
    backward_rows: int | None = None
    """The most query rows of one backward call, None for any number."""
    one_call: bool = False
    """Whether backward of a block is one call of a fused kernel, whose gradients are added at once."""

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


class Queries(NamedTuple):
    """The query side of backward: `out` and `lse` cover all keys, and `lse` is +inf in rows that saw none."""

    query: Tensor
    grad_out: Tensor
    out: Tensor
    lse: Tensor
    scale: float

    def part(self, heads: slice, rows: slice) -> Queries:
        """Only some query heads and some rows."""
        here = slice(None), heads, rows
        return Queries(self.query[here], self.grad_out[here], self.out[here], self.lse[here], self.scale)


class QueriesOfPass(Queries):
    """The same for all tiles of a pass: what several of them read is laid out for the kernel once.

    FlashAttention reads the output, its gradient and the log-sum-exp without strides, and torch's operator would copy
    them in each call.
    """

    _parts: dict[tuple[slice | int | None, ...], Queries]

    def part(self, heads: slice, rows: slice) -> Queries:
        """As `Queries`."""
        if self.query.device.type == "cpu":
            return super().part(heads, rows)
        if not hasattr(self, "_parts"):
            self._parts = {}
        name = heads.start, heads.stop, heads.step, *rows.indices(self.query.shape[2])
        found = self._parts.get(name)
        if found is None:
            query, grad_out, out, lse, scale = super().part(heads, rows)
            found = Queries(query, _dense_tokens(grad_out), _dense_tokens(out), lse.contiguous(), scale)
            self._parts[name] = found
        return found


def _dense_tokens(x_BHQD: Tensor) -> Tensor:
    """The same tensor with a memory layout of [B, Q, H, D]."""
    return x_BHQD.transpose(1, 2).contiguous().transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Sums of gradients over blocks, in fp32 or fp64, shaped as query, key and value."""

    query: Tensor
    key: Tensor
    value: Tensor

    def part(self, heads: slice, rows: slice, keys: slice) -> Gradients:
        """Only some query heads, some rows and some keys; sums of the whole are added to."""
        return Gradients(self.query[:, heads, rows], self.key[:, :, keys], self.value[:, :, keys])

    def add(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Add the gradients of a block; what a kernel gives beyond the width of these is padding."""
        for total, found in ((self.query, query), (self.key, key), (self.value, value)):
            total.add_(found[..., : total.shape[-1]])


class BlockGradients(Gradients):
    """In place of sums: what the only block gives, in the dtype and memory in which the kernel gives it."""

    given: tuple[Tensor, ...] = ()

    def add(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Take the gradients of the block."""
        likes = (self.query, self.key, self.value)
        found = tuple(one[..., : like.shape[-1]] for like, one in zip(likes, (query, key, value), strict=True))
        object.__setattr__(self, "given", found)
