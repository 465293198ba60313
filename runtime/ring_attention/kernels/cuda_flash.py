"""FlashAttention-2 on CUDA: torch's own build of it, and the `flash_attn` package where it is installed.

Both know windows, counted from the bottom right corner of a block (`packs.window_of`): every trimmed tile can be said
like this. Both compute many tiles in one launch, of one row of the batch: the form for packed sequences, of which a
query without a key gets log-sum-exp +inf. Shapes: query [B, H, Q, D], key and value [B, K, S, D], log-sum-exp
[B, H, Q]; both kernels take [B, Q, H, D], or [Q, H, D] in the packed form, which are views.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Queries

from . import Band
from .kernel import Terms
from .packs import Launch, window_of

_aten = torch.ops.aten


class CudaFlashKernel:
    """torch's own: bf16 and fp16, compute capability 8.0 or later, head dims that are multiples of 8, up to 256."""

    name = "cuda-flash"
    # The kernel sums the gradients of keys and values in fp32 over all rows of a call.
    backward_rows: int | None = None
    one_call = True

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

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, *, launch: Launch, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, D] and log-sum-exp [B, H, Q] of many tiles."""

        def forward_row(*row: Tensor) -> tuple[Tensor, Tensor]:
            out, lse, *_ = _aten._flash_attention_forward(
                *row,
                launch.cum_queries,
                launch.cum_keys,
                launch.most_queries,
                launch.most_keys,
                0.0,
                launch.window == (-1, 0),
                False,
                scale=scale,
                window_size_left=launch.window[0],
                window_size_right=launch.window[1],
            )
            return out, lse

        return _forward_rows(forward_row, query, key, value)

    def backward_packed(self, read: Queries, key: Tensor, value: Tensor, *, launch: Launch, into: Gradients) -> None:
        """Add the gradients of many tiles."""
        no_seed = torch.empty(2, dtype=torch.int64, device=key.device)

        def backward_row(grad_out: Tensor, *row: Tensor) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = _aten._flash_attention_backward(
                grad_out,
                *row,
                launch.cum_queries,
                launch.cum_keys,
                launch.most_queries,
                launch.most_keys,
                0.0,
                launch.window == (-1, 0),
                no_seed,
                no_seed,
                scale=read.scale,
                window_size_left=launch.window[0],
                window_size_right=launch.window[1],
            )
            return found

        _backward_rows(backward_row, read, key, value, into)


class FlashAttnKernel:
    """The `flash_attn` package, 2.7 or later: as torch's own, and soft-capping too."""

    name = "flash_attn"
    backward_rows: int | None = None
    one_call = True

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

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, *, launch: Launch, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, D] and log-sum-exp [B, H, Q] of many tiles."""

        def forward_row(*row: Tensor) -> tuple[Tensor, Tensor]:
            out, lse, *_ = self._functions._flash_attn_varlen_forward(
                *row, **_lengths(launch), return_softmax=False, **self._of_window(launch.window, scale)
            )
            return out, lse

        return _forward_rows(forward_row, query, key, value)

    def backward_packed(self, read: Queries, key: Tensor, value: Tensor, *, launch: Launch, into: Gradients) -> None:
        """Add the gradients of many tiles."""

        def backward_row(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> list[Tensor]:
            inputs = query, key, value
            grads = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]
            self._functions._flash_attn_varlen_backward(
                grad_out,
                *inputs,
                *rest,
                *grads,
                **_lengths(launch),
                deterministic=torch.are_deterministic_algorithms_enabled(),
                **self._of_window(launch.window, read.scale),
            )
            return grads

        _backward_rows(backward_row, read, key, value, into)

    def _arguments(self, band: Band, rows: int, columns: int, scale: float) -> dict[str, Any]:
        return self._of_window(window_of(band, rows, columns), scale)

    def _of_window(self, window: tuple[int, int], scale: float) -> dict[str, Any]:
        left, right = window
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
    known = {"window_size_left", "window_size_right", "softcap"} <= forward.keys()
    return functions if known and hasattr(functions, "_flash_attn_varlen_backward") else None


def _lengths(launch: Launch) -> dict[str, Any]:
    """As the package names them."""
    return {
        "cu_seqlens_q": launch.cum_queries,
        "cu_seqlens_k": launch.cum_keys,
        "max_seqlen_q": launch.most_queries,
        "max_seqlen_k": launch.most_keys,
    }


def _forward_rows(
    function: Callable[..., tuple[Tensor, Tensor]], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Row by row of the batch."""
    rows = [function(*row) for row in zip(*map(_token_major, (query, key, value)), strict=True)]
    outs, lses = zip(*rows, strict=True)
    out, lse = (parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts) for parts in (outs, lses))
    return out.transpose(1, 2), lse.masked_fill(lse == math.inf, -math.inf)


def _backward_rows(
    function: Callable[..., Sequence[Tensor]], read: Queries, key: Tensor, value: Tensor, into: Gradients
) -> None:
    """Row by row of the batch."""
    query, grad_out, out, lse, _ = read
    tensors = [_token_major(tensor) for tensor in (grad_out, query, key, value, out)]
    for number, row in enumerate(zip(*tensors, strict=True)):
        grads = function(*row, lse[number].contiguous())
        one = slice(number, number + 1)
        sums = Gradients(into.query[one], into.key[one], into.value[one])
        sums.add(*(grad.transpose(0, 1) for grad in grads))


def _token_major(tensor: Tensor) -> Tensor:
    """[B, H, Q, D] → [B, Q, H, D] with a dense last dim, which the kernels read as such."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor.transpose(1, 2)
