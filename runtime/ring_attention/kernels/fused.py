"""torch's own fused attention operators, called so that they return the log-sum-exp and take a global one back.

Every class here is a thin, stateless wrapper; which one serves which inputs is decided in `selection`. Shapes: query
[B, H, Q, D], key and value [B, K, S, D] with H a multiple of K, log-sum-exp [B, H, Q] as natural logarithm. A causal
block is square.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Queries

from . import CAUSAL, FULL, Band
from .cpu_tiles import CpuTileKernel
from .kernel import Kernel, Terms

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


class CpuFlashKernel(Kernel):
    """The flash attention of CPUs: fp64, fp32, bf16 and fp16; key/value heads are shared inside the kernel.

    Other blocks than full and causal squares with one head dim and nothing added go to `CpuTileKernel`.
    """

    def __init__(self, backward_rows: int | None = None, tiles_from: int | None = None) -> None:
        """`backward_rows`: the most query rows of one backward call (see `selection.BACKWARD_ROWS`).

        `tiles_from`: so many query rows and more go to `CpuTileKernel` too, and all of them backward.
        """
        self.name = "cpu-flash" if tiles_from is None else "cpu-tiles"
        self.backward_rows = backward_rows
        self.one_call = backward_rows is None and tiles_from is None
        self._tiles, self._tiles_from = CpuTileKernel(), tiles_from

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, band: Band, scale: float, terms: Terms | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, E] and log-sum-exp [B, H, Q] of one block."""
        many = self._tiles_from is not None and query.shape[2] >= self._tiles_from
        if many or not is_fused_on_cpus(query, key, value, band, terms):
            return self._tiles.forward(query, key, value, band=band, scale=scale, terms=terms)
        query, key, value = map(_computable, (query, key, value))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, _is_causal(query, key, band), scale=scale
        )
        return out, lse

    def backward(
        self, read: Queries, key: Tensor, value: Tensor, *, band: Band, terms: Terms | None = None, into: Gradients
    ) -> None:
        """Add the gradients of one block, given output and log-sum-exp over all blocks."""
        query, grad_out, out, lse, scale = read
        if self._tiles_from is not None or not is_fused_on_cpus(query, key, value, band, terms):
            self._tiles.backward(read, key, value, band=band, terms=terms, into=into)
            return
        into.add(
            *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *map(_computable, (grad_out, query, key, value, out)),
                lse,
                0.0,
                _is_causal(query, key, band),
                scale=scale,
            )
        )


def is_fused_on_cpus(query: Tensor, key: Tensor, value: Tensor, band: Band, terms: Terms | None) -> bool:
    """Whether the fused kernel has this block; its causal diagonal begins at the top left."""
    simple = band == FULL or (band == CAUSAL and query.shape[2] == key.shape[2])
    return simple and terms is None and query.shape[3] == value.shape[3]


class CudnnKernel(Kernel):
    """cuDNN's, which computes by the matrix units of Hopper: bf16 and fp16; key/value heads are shared inside."""

    name = "cuda-cudnn"
    one_call = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, band: Band, scale: float, terms: Terms | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, E] and log-sum-exp [B, H, Q] of one block."""
        assert terms is None, f"{self.name} has no further terms"
        causal = _is_causal(query, key, band)
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            *map(_dense_rows, (query, key, value)), None, True, 0.0, causal, False, scale=scale
        )
        return out, lse.view(query.shape[:3])

    def backward(
        self, read: Queries, key: Tensor, value: Tensor, *, band: Band, terms: Terms | None = None, into: Gradients
    ) -> None:
        """Add the gradients of one block, given output and log-sum-exp over all blocks."""
        query, grad_out, out, lse, scale = read
        assert terms is None, f"{self.name} has no further terms"
        # Without dropout the state of the random generator is not read.
        no_seed = torch.empty((), dtype=torch.int64, device=query.device)
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *map(_dense_rows, (grad_out, query, key, value, out)),
            lse.contiguous().unsqueeze(-1),
            no_seed,
            no_seed,
            None,
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            _is_causal(query, key, band),
            scale=scale,
        )
        into.add(*grads)


class CudaEfficientKernel(Kernel):
    """Memory-efficient attention of torch on CUDA: also fp32, and GPUs before compute capability 8.0.

    It has no shared key/value heads. The query heads h, h + G, h + 2G, … (G = H / K) read K different key/value heads
    in order, so G calls on strided views do without a repeated copy.
    """

    name = "cuda-efficient"
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
        self, read: Queries, key: Tensor, value: Tensor, *, band: Band, terms: Terms | None = None, into: Gradients
    ) -> None:
        """Add the gradients of one block, given output and log-sum-exp over all blocks."""
        query, grad_out, out, lse, scale = read
        assert terms is None, f"{self.name} has no further terms"
        query, key, value = _dense_rows(query), _dense_rows(key), _dense_rows(value)
        share = query.shape[1] // key.shape[1]
        no_seed = torch.zeros((), dtype=torch.int64, device=query.device)
        padding = -query.shape[2] % self._lse_alignment
        padded_lse = torch.nn.functional.pad(lse, (0, padding), value=math.inf)
        for head in range(share):
            grad_query, grad_key, grad_value, _ = _aten._scaled_dot_product_efficient_attention_backward(
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
            into.part(slice(head, None, share), slice(None), slice(None)).add(grad_query, grad_key, grad_value)
