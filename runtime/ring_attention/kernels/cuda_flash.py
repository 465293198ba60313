"""FlashAttention-2 on CUDA: torch's own build of it, and the `flash_attn` package where it is installed.

Both know windows, counted from the bottom right corner of a block: query i of R sees key j of C if
i + C − R − left ≤ j ≤ i + C − R + right. Every trimmed tile can be said like this. Shapes: query [B, H, Q, D], key and
value [B, K, S, D], log-sum-exp [B, H, Q]; both kernels take [B, Q, H, D], which are views.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from .gradients import Gradients, Queries
from .terms import Terms
from .tiles import Band

_aten = torch.ops.aten


def window_of(band: Band, rows: int, columns: int) -> tuple[int, int]:
    """`left` and `right` of a band in a block of so many queries and keys; −1 is no bound."""
    ahead = columns - rows
    left = -1 if band.lower is None else ahead - band.lower
    right = -1 if band.upper is None else band.upper - ahead
    # Below −1 the kernels would take a bound for none: a tile that is not trimmed.
    assert left >= (-1 if band.lower is None else 0), f"{band} of {rows} × {columns} hides every key of a query"
    assert right >= (-1 if band.upper is None else 0), f"{band} of {rows} × {columns} hides every key of a query"
    return left, right


class CudaFlashKernel:
    """torch's own: bf16 and fp16, compute capability 8.0 or later, head dims that are multiples of 8, up to 256."""

    name = "cuda-flash"
    # The kernel sums the gradients of keys and values in fp32 over all rows of a call.
    backward_rows: int | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, band: Band, scale: float, terms: Terms | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, D] and log-sum-exp [B, H, Q] of one block."""
        assert terms is None, f"{self.name} has no further terms"
        rows, columns = query.shape[2], key.shape[2]
        left, right = window_of(band, rows, columns)
        out, lse, *_ = _aten._flash_attention_forward(
            *map(_token_major, (query, key, value)),
            None,
            None,
            rows,
            columns,
            0.0,
            (left, right) == (-1, 0),
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out.transpose(1, 2), lse

    def backward(
        self, read: Queries, key: Tensor, value: Tensor, *, band: Band, terms: Terms | None = None, into: Gradients
    ) -> None:
        """Add the gradients of one block, given output and log-sum-exp over all blocks."""
        query, grad_out, out, lse, scale = read
        assert terms is None, f"{self.name} has no further terms"
        rows, columns = query.shape[2], key.shape[2]
        left, right = window_of(band, rows, columns)
        # Without dropout the state of the random generator is not read.
        no_seed = torch.empty(2, dtype=torch.int64, device=query.device)
        grads = _aten._flash_attention_backward(
            *map(_token_major, (grad_out, query, key, value, out)),
            # The kernel ignores the strides of the log-sum-exp.
            lse.contiguous(),
            None,
            None,
            rows,
            columns,
            0.0,
            (left, right) == (-1, 0),
            no_seed,
            no_seed,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        into.add(*(grad.transpose(1, 2) for grad in grads))


class FlashAttnKernel:
    """The `flash_attn` package, 2.7 or later: as torch's own, and soft-capping too."""

    name = "flash_attn"
    backward_rows: int | None = None

    def __init__(self, functions: Any, softcap: float | None = None) -> None:
        """`functions`: the module `flash_attn.flash_attn_interface`."""
        self._functions, self.softcap = functions, softcap

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, band: Band, scale: float, terms: Terms | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, D] and log-sum-exp [B, H, Q] of one block."""
        assert terms is None, f"{self.name} has no further terms"
        out, lse, *_ = self._functions._flash_attn_forward(
            *map(_token_major, (query, key, value)),
            return_softmax=False,
            **self._arguments(band, query.shape[2], key.shape[2], scale),
        )
        return out.transpose(1, 2), lse

    def backward(
        self, read: Queries, key: Tensor, value: Tensor, *, band: Band, terms: Terms | None = None, into: Gradients
    ) -> None:
        """Add the gradients of one block, given output and log-sum-exp over all blocks."""
        query, grad_out, out, lse, scale = read
        assert terms is None, f"{self.name} has no further terms"
        inputs = [_token_major(tensor) for tensor in (query, key, value)]
        grads = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]
        self._functions._flash_attn_backward(
            _token_major(grad_out),
            *inputs,
            _token_major(out),
            lse.contiguous(),
            *grads,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._arguments(band, query.shape[2], key.shape[2], scale),
        )
        into.add(*(grad.transpose(1, 2) for grad in grads))

    def _arguments(self, band: Band, rows: int, columns: int, scale: float) -> dict[str, Any]:
        left, right = window_of(band, rows, columns)
        return {
            "dropout_p": 0.0,
            "softmax_scale": scale,
            "causal": (left, right) == (-1, 0),
            "window_size_left": left,
            "window_size_right": right,
            "softcap": self.softcap or 0.0,
            "alibi_slopes": None,
        }


@functools.lru_cache
def installed_flash_attn() -> Any | None:
    """The functions of `flash_attn`, None where it is not installed or not of a version whose arguments are known."""
    try:
        functions = importlib.import_module("flash_attn.flash_attn_interface")
        forward = inspect.signature(functions._flash_attn_forward).parameters
    # A build for another torch fails in its own ways; torch's kernel is right in any case.
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError):
        return None
    return functions if {"window_size_left", "window_size_right", "softcap"} <= forward.keys() else None


def _token_major(tensor: Tensor) -> Tensor:
    """[B, H, Q, D] → [B, Q, H, D] with a dense last dim, which the kernels read as such."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor.transpose(1, 2)
