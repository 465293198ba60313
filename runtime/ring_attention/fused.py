"""torch's own fused attention operators, called so that they return the log-sum-exp and take a global one back.

Every class here is a thin, stateless wrapper; which one serves which inputs is decided in `kernels`. Shapes: query [B,
H, Q, D], key and value [B, K, S, D] with H a multiple of K, log-sum-exp [B, H, Q] as natural logarithm. A causal block
is square.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .merge import accumulation_dtype
from .terms import Terms
from .tiles import CAUSAL, FULL, Band

_aten = torch.ops.aten


def _dense_rows(tensor: Tensor) -> Tensor:
    """The operators read the last dim as if its stride were 1 and return garbage where it is not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _computable(tensor: Tensor) -> Tensor:
    """`_dense_rows`, and fp32 for fp16, whose kernel on CPUs takes 9 times as long backward."""
    return _dense_rows(tensor.float() if tensor.dtype is torch.float16 else tensor)


def _is_causal(query: Tensor, key: Tensor, band: Band) -> bool:
    """For kernels that know only full and causal squares: they align the diagonal of a rectangle differently."""
    assert band == FULL or (band == CAUSAL and query.shape[2] == key.shape[2]), f"{band} is not for this kernel"
    return band == CAUSAL


def _cpu_mask(query: Tensor, key: Tensor, band: Band, terms: Terms | None) -> tuple[bool, Tensor | None]:
    """Whether the kernel's own causal mask is wanted (its diagonal begins at the top left), and what is added."""
    rows, columns = query.shape[2], key.shape[2]
    if terms is None:
        return band == CAUSAL, None if band in (FULL, CAUSAL) else _additive_mask(rows, columns, band, query.dtype)
    # The kernel takes fp32 for 16 bit, and wants one row for each query head.
    dtype = accumulation_dtype(query.dtype)
    added = terms.added(dtype)
    if band != FULL:
        added = added + _additive_mask(rows, columns, band, dtype)
    return False, added.expand(query.shape[0], query.shape[1], rows, columns)


@functools.lru_cache(maxsize=8)
def _additive_mask(rows: int, columns: int, band: Band, dtype: torch.dtype) -> Tensor:
    distance = torch.arange(columns) - torch.arange(rows).unsqueeze(-1)
    unseen = torch.zeros(rows, columns, dtype=torch.bool)
    if band.lower is not None:
        unseen |= distance < band.lower
    if band.upper is not None:
        unseen |= distance > band.upper
    return torch.zeros(rows, columns, dtype=dtype).masked_fill_(unseen, -math.inf)


class CpuFlashKernel:
    """The flash attention of CPUs: fp64, fp32, bf16 and fp16; key/value heads are shared inside the kernel."""

    name = "cpu-flash"
    # Bands that are cut by more than the causal diagonal need a mask in memory: small ones stay in the cache.
    band_rows: int | None = 512

    def __init__(self, backward_rows: int | None = None) -> None:
        """`backward_rows`: the most query rows of one backward call (see `kernels.BACKWARD_ROWS`)."""
        self.backward_rows = backward_rows

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, band: Band, scale: float, terms: Terms | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, D] and log-sum-exp [B, H, Q] of one block."""
        query, key, value = map(_computable, (query, key, value))
        causal, mask = _cpu_mask(query, key, band, terms)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        if terms is not None and terms.bias is not None and mask is not None:
            # A bias may hide all keys of a row; the kernel then says 0.
            lse = lse.masked_fill(mask.amax(-1) == -math.inf, -math.inf)
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        band: Band,
        scale: float,
        terms: Terms | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value of one block, given output and log-sum-exp over all blocks."""
        query, key, value, out = map(_computable, (query, key, value, out))
        causal, mask = _cpu_mask(query, key, band, terms)
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _computable(grad_out),
            query,
            key,
            value,
            out,
            lse,
            0.0,
            causal,
            attn_mask=mask,
            scale=scale,
        )
        return grads


class CudaEfficientKernel:
    """Memory-efficient attention of torch on CUDA: also fp32, and GPUs before compute capability 8.0.

    It has no shared key/value heads. The query heads h, h + G, h + 2G, … (G = H / K) read K different key/value heads
    in order, so G calls on strided views do without a repeated copy.
    """

    name = "cuda-efficient"
    backward_rows: int | None = None
    band_rows: int | None = None
    # Rows of the log-sum-exp are padded to this in memory.
    _lse_alignment = 32

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, band: Band, scale: float, terms: Terms | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, D] and log-sum-exp [B, H, Q] of one block."""
        assert terms is None, f"{self.name} has no further terms"
        query, key, value = _dense_rows(query), _dense_rows(key), _dense_rows(value)
        share = query.shape[1] // key.shape[1]
        out = query.new_empty((*query.shape[:3], value.shape[3]))
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        for head in range(share):
            part, part_lse, *_ = _aten._scaled_dot_product_efficient_attention(
                query[:, head::share], key, value, None, True, 0.0, _is_causal(query, key, band), scale=scale
            )
            out[:, head::share] = part
            lse[:, head::share] = part_lse[:, :, : query.shape[2]]
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        band: Band,
        scale: float,
        terms: Terms | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value of one block, given output and log-sum-exp over all blocks."""
        assert terms is None, f"{self.name} has no further terms"
        query, key, value = _dense_rows(query), _dense_rows(key), _dense_rows(value)
        share = query.shape[1] // key.shape[1]
        no_seed = torch.zeros((), dtype=torch.int64, device=query.device)
        padding = -query.shape[2] % self._lse_alignment
        padded_lse = torch.nn.functional.pad(lse, (0, padding), value=math.inf)
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros_like(key, dtype=torch.float32)
        grad_value = torch.zeros_like(value, dtype=torch.float32)
        for head in range(share):
            part_query, part_key, part_value, _ = _aten._scaled_dot_product_efficient_attention_backward(
                grad_out[:, head::share],
                query[:, head::share],
                key,
                value,
                None,
                out[:, head::share],
                padded_lse[:, head::share].contiguous(),
                no_seed,
                no_seed,
                0.0,
                [True, True, True, False],
                _is_causal(query, key, band),
                scale=scale,
            )
            grad_query[:, head::share] = part_query
            grad_key += part_key
            grad_value += part_value
        return grad_query, grad_key, grad_value
