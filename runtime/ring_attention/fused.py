"""torch's own fused attention operators, called so that they return the log-sum-exp and take a global one back.

Every class here is a thin, stateless wrapper; which one serves which inputs is decided in `kernels`. Shapes: query [B,
H, Q, D], key and value [B, K, S, D] with H a multiple of K, log-sum-exp [B, H, Q] as natural logarithm. A causal block
is square.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_aten = torch.ops.aten


def _dense_rows(tensor: Tensor) -> Tensor:
    """The operators read the last dim as if its stride were 1 and return garbage where it is not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class CpuFlashKernel:
    """The flash attention of CPUs: fp64, fp32, bf16 and fp16; key/value heads are shared inside the kernel."""

    name = "cpu-flash"

    def __init__(self, backward_rows: int | None = None) -> None:
        """`backward_rows`: the most query rows of one backward call (see `kernels.BACKWARD_ROWS`)."""
        self.backward_rows = backward_rows

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, D] and log-sum-exp [B, H, Q] of one block."""
        query, key, value = _dense_rows(query), _dense_rows(key), _dense_rows(value)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
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
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value of one block, given output and log-sum-exp over all blocks."""
        query, key, value, out = _dense_rows(query), _dense_rows(key), _dense_rows(value), _dense_rows(out)
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _dense_rows(grad_out), query, key, value, out, lse, 0.0, causal, scale=scale
        )
        return grads


class CudaFlashKernel:
    """FlashAttention-2 of torch: bf16 and fp16, compute capability 8.0 or later, head dims that are multiples of 8."""

    name = "cuda-flash"
    # The kernel sums the gradients of keys and values in fp32 over all rows of a call.
    backward_rows: int | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, D] and log-sum-exp [B, H, Q] of one block."""
        query, key, value = _dense_rows(query), _dense_rows(key), _dense_rows(value)
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
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
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value of one block, given output and log-sum-exp over all blocks."""
        # Without dropout the state of the random generator is not read.
        no_seed = torch.empty(2, dtype=torch.int64, device=query.device)
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_backward(
            grad_out,
            _dense_rows(query),
            _dense_rows(key),
            _dense_rows(value),
            out,
            # The kernel ignores the strides of the log-sum-exp.
            lse.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            no_seed,
            no_seed,
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
    # Rows of the log-sum-exp are padded to this in memory.
    _lse_alignment = 32

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, D] and log-sum-exp [B, H, Q] of one block."""
        query, key, value = _dense_rows(query), _dense_rows(key), _dense_rows(value)
        share = query.shape[1] // key.shape[1]
        out = query.new_empty((*query.shape[:3], value.shape[3]))
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        for head in range(share):
            part, part_lse, *_ = _aten._scaled_dot_product_efficient_attention(
                query[:, head::share], key, value, None, True, 0.0, causal, scale=scale
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
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value of one block, given output and log-sum-exp over all blocks."""
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
                causal,
                scale=scale,
            )
            grad_query[:, head::share] = part_query
            grad_key += part_key
            grad_value += part_value
        return grad_query, grad_key, grad_value
