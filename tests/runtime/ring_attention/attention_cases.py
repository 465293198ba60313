"""Attention in float64 on one process, and how far a ring of live ranks is from it."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout import sequence as token_sequence
from parcompile.runtime.ring_attention import UspGroups, attention, split_sequence
from parcompile.runtime.ring_attention.kernels.kernel import Terms

Errors = dict[str, float]
"""Relative L2 error of `out`, `dq`, `dk`, `dv` and, with sinks, `dsinks`."""

_SHORT = {"kv_heads": "kv", "head_dim": "d", "value_dim": "dv", "batch": "b"}


@dataclass(frozen=True)
class Case:
    layout: str = "zigzag"
    causal: bool = True
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int | None = None
    chunk: int = 48
    batch: int = 2
    dtype: torch.dtype = torch.float64
    scale: float | None = None
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    """Relative lengths of documents for all rows of the batch, or for each row."""
    per_document: bool = False
    implementation: str = "ring"
    inner_ranks: int | None = None
    """Neighbours of a double ring, or those that exchange heads in USP."""
    sinks: bool = False
    softcap: float | None = None
    alibi: bool = False
    bias: tuple[int, int] | None = None
    """Its first two sizes: 1 or the batch, 1 or the heads."""
    dropout: float = 0.0
    heads_at_once: int | None = None
    """Key/value heads of one pass around the ring, None as the ring chooses (all of them at these sizes)."""

    def __str__(self) -> str:
        """What differs from the default."""
        given = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        words = [
            name if value is True else f"{_SHORT.get(name, name)}={str(value).removeprefix('torch.')}"
            for name, value, default in given
            if value != default
        ]
        return " ".join(words) or "default"

    def sequence_length(self, cp: int) -> int:
        return self.chunk * cp * (2 if self.layout == "zigzag" else 1)

    def borders(self, cp: int) -> list[list[int]] | None:
        """Borders of the documents of each row."""
        if self.documents is None:
            return None
        length = self.sequence_length(cp)
        unit = cp * (2 if self.layout == "zigzag" else 1) if self.per_document else 1
        return [
            [length // unit * part // sum(row) * unit for part in itertools.accumulate(row, initial=0)]
            for row in self.documents
        ]

    def terms(self, cp: int) -> dict[str, Any]:
        """ALiBi's slopes, the bias of the whole sequence and dropout."""
        found: dict[str, Any] = {"dropout": self.dropout, "dropout_seed": 77}
        if self.alibi:
            found["alibi_slopes"] = 0.5 ** torch.arange(1, self.heads + 1)
        if self.bias is not None:
            length = self.sequence_length(cp)
            bias = torch.randn(*self.bias, length, length, generator=torch.Generator().manual_seed(9))
            # Every query keeps itself.
            hidden = (bias > 1.5) & ~torch.eye(length, dtype=torch.bool)
            found["bias"] = bias.masked_fill(hidden, -math.inf)
        return found

    def inputs(self, cp: int) -> tuple[list[Tensor], Tensor]:
        """Query, key, value over the whole sequence (and the sinks), and the output's gradient; equal on all ranks."""
        generator = torch.Generator().manual_seed(self.chunk + self.heads)

        def draw(heads: int, width: int) -> Tensor:
            full = torch.randn(self.batch, heads, length, width, generator=generator, dtype=torch.float64)
            return full.to(self.dtype)

        length, value_dim = self.sequence_length(cp), self.value_dim or self.head_dim
        tensors = [draw(self.heads, self.head_dim), draw(self.kv_heads, self.head_dim), draw(self.kv_heads, value_dim)]
        if self.sinks:
            tensors.append(torch.randn(self.heads, generator=generator, dtype=torch.float64).to(self.dtype))
        return tensors, draw(self.heads, value_dim)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    borders: list[list[int]] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    dropout_seed: int = 0,
) -> Tensor:
    """Attention as its definition says, in float64."""
    share = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(share, 1), value.double().repeat_interleave(share, 1)
    scores = query.double() @ key.mT * (scale or 1 / math.sqrt(query.shape[3]))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    row, column = torch.arange(scores.shape[-2]).unsqueeze(-1), torch.arange(scores.shape[-1])
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double().view(1, -1, 1, 1) * (row - column).abs()
    if bias is not None:
        scores = scores + bias.double()
    factors = torch.ones(())
    if dropout:
        # The mask of one process; what matters is that every layout draws the same.
        numbers = [torch.arange(size) for size in (query.shape[2], key.shape[2], query.shape[0], query.shape[1])]
        factors = Terms(*numbers, dropout=dropout, seed=dropout_seed).weight_factors(torch.float64)
    seen = column <= row if causal else torch.ones(scores.shape[-2:], dtype=torch.bool)
    if window is not None:
        seen = seen & ((column - row).abs() < window)
    if borders is not None:
        documents = torch.stack([torch.bucketize(column, torch.tensor(row), right=True) for row in borders])
        seen = seen & (documents.unsqueeze(-1) == documents.unsqueeze(-2)).unsqueeze(1)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        sink = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return (torch.cat([scores, sink], -1).softmax(-1)[..., :-1] * factors) @ value
    return (scores.softmax(-1) * factors) @ value


def _names(case: Case) -> list[str]:
    return ["dq", "dk", "dv", *(["dsinks"] if case.sinks else [])]


def reference_results(case: Case, cp: int) -> dict[str, Tensor]:
    tensors, grad = case.inputs(cp)
    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    out = reference(
        *leaves,
        causal=case.causal,
        scale=case.scale,
        window=case.window,
        borders=case.borders(cp),
        softcap=case.softcap,
        **case.terms(cp),
    )
    out.backward(grad.double())
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in zip(_names(case), leaves, strict=True)}}


def local_part(case: Case, tensor: Tensor, cp: int, rank: int) -> Tensor:
    borders = case.borders(cp)
    return split_sequence(tensor, 2, case.layout, cp, rank, borders[0] if borders and case.per_document else None)


def ring_results(case: Case, group: dist.ProcessGroup | None, cp: int, rank: int) -> dict[str, Tensor]:
    """What this rank of the ring holds of the output and of the gradients."""
    tensors, grad = case.inputs(cp)
    local = [local_part(case, tensor, cp, rank) if tensor.dim() == 4 else tensor for tensor in tensors]
    leaves = [tensor.clone().requires_grad_() for tensor in local]
    if case.heads_at_once:
        key = leaves[1][:, : case.heads_at_once]
        token_sequence.SMALLEST_MESSAGE_BYTES = 2 * key.numel() * key.element_size()
    borders = case.borders(cp)
    terms = case.terms(cp)
    if "bias" in terms:
        terms["bias"] = local_part(case, terms["bias"], cp, rank)
    place: dict[str, Any] = {"group": group}
    if case.implementation == "double_ring":
        place["inner_ranks"] = case.inner_ranks
    elif case.implementation == "usp":
        assert group is not None
        assert case.inner_ranks is not None
        place = {"groups": _usp_groups(group, case.inner_ranks)}
    out = attention(
        *leaves[:3],
        **place,
        implementation=case.implementation,
        layout=case.layout,
        causal=case.causal,
        scale=case.scale,
        window=case.window,
        documents=borders[0] if borders and len(borders) == 1 else borders,
        per_document=case.per_document,
        sinks=leaves[3] if case.sinks else None,
        softcap=case.softcap,
        **terms,
    )
    out.backward(local_part(case, grad, cp, rank))
    token_sequence.SMALLEST_MESSAGE_BYTES = 1 << 20
    if case.sinks and group is not None:
        dist.all_reduce(leaves[3].grad, group=group)
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in zip(_names(case), leaves, strict=True)}}


@functools.lru_cache
def _usp_groups(group: dist.ProcessGroup, heads_ranks: int) -> UspGroups:
    return UspGroups.of(group, heads_ranks)


def errors(case: Case, group: dist.ProcessGroup | None, cp: int, rank: int) -> Errors:
    wanted, got = reference_results(case, cp), ring_results(case, group, cp, rank)
    for name, tensor in got.items():
        assert tensor.dtype == case.dtype, f"{name} is {tensor.dtype}"
    return {
        name: relative_error(got[name], tensor if name == "dsinks" else local_part(case, tensor, cp, rank))
        for name, tensor in wanted.items()
    }


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Relative L2 error; absolute where the wanted values are (nearly) 0, as the first token's query gradient is."""
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1.0))
