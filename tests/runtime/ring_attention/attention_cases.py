"""Attention in float64 on one process, and how far a ring of live ranks is from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.runtime.ring_attention import ring, ring_attention, split_sequence

Errors = dict[str, float]
"""Relative L2 error of `out`, `dq`, `dk` and `dv`."""


@dataclass(frozen=True)
class Case:
    layout: str = "zigzag"
    causal: bool = True
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    chunk: int = 48
    batch: int = 2
    dtype: torch.dtype = torch.float64
    scale: float | None = None
    heads_at_once: int | None = None
    """Key/value heads of one pass around the ring, None as the ring chooses (all of them at these sizes)."""

    def __str__(self) -> str:
        mask = "causal" if self.causal else "bidirectional"
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = f"h{self.heads}-kv{self.kv_heads}-d{self.head_dim}-c{self.chunk}-b{self.batch}"
        return f"{self.layout}-{mask}-{sizes}-{dtype}" + "".join(
            f"-{name}{given}" for name, given in (("scale", self.scale), ("at-once", self.heads_at_once)) if given
        )

    def sequence_length(self, cp: int) -> int:
        return self.chunk * cp * (2 if self.layout == "zigzag" else 1)

    def inputs(self, cp: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """query, key, value and the gradient of the output over the whole sequence, equal on all ranks."""
        generator = torch.Generator().manual_seed(hash((self.heads, self.kv_heads, self.head_dim, self.chunk)) % 2**31)
        length = self.sequence_length(cp)

        def draw(heads: int) -> Tensor:
            full = torch.randn(self.batch, heads, length, self.head_dim, generator=generator, dtype=torch.float64)
            return full.to(self.dtype)

        return draw(self.heads), draw(self.kv_heads), draw(self.kv_heads), draw(self.heads)


def reference(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """Attention as its definition says, in float64."""
    share = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(share, 1), value.double().repeat_interleave(share, 1)
    scores = query.double() @ key.mT * (scale or 1 / math.sqrt(query.shape[3]))
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ value


def reference_results(case: Case, cp: int) -> dict[str, Tensor]:
    query, key, value, grad = case.inputs(cp)
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    out = reference(*leaves, causal=case.causal, scale=case.scale)
    out.backward(grad.double())
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True)}}


def ring_results(case: Case, group: dist.ProcessGroup | None, cp: int, rank: int) -> dict[str, Tensor]:
    """What this rank of the ring holds of the output and of the gradients."""
    *full, grad = case.inputs(cp)
    local = [split_sequence(tensor, 2, case.layout, cp, rank).clone().requires_grad_() for tensor in full]
    if case.heads_at_once:
        key = local[1][:, : case.heads_at_once]
        ring._SMALLEST_MESSAGE_BYTES = 2 * key.numel() * key.element_size()
    out = ring_attention(*local, group=group, layout=case.layout, causal=case.causal, scale=case.scale)
    out.backward(split_sequence(grad, 2, case.layout, cp, rank))
    ring._SMALLEST_MESSAGE_BYTES = 1 << 20
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in zip(("dq", "dk", "dv"), local, strict=True)}}


def errors(case: Case, group: dist.ProcessGroup | None, cp: int, rank: int) -> Errors:
    wanted, got = reference_results(case, cp), ring_results(case, group, cp, rank)
    for name, tensor in got.items():
        assert tensor.dtype == case.dtype, f"{name} is {tensor.dtype}"
    return {name: relative_error(got[name], split_sequence(wanted[name], 2, case.layout, cp, rank)) for name in wanted}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Relative L2 error; absolute where the wanted values are (nearly) 0, as the first token's query gradient is."""
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1.0))
