"""FlashAttention on CUDA: torch's own build of the second, and the packages of the second and third if installed.

All know windows, counted from the bottom right corner of a block (`packs.window_of`): every trimmed tile can be said
like this. All compute many tiles in one launch, of one row of the batch: the form for packed sequences, of which a
query without a key gets log-sum-exp +inf. Shapes: query [B, H, Q, D], key and value [B, K, S, D], log-sum-exp
[B, H, Q]; the kernels take [B, Q, H, D], or [Q, H, D] in the packed form, which are views.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from parcompile.machines.attention_kernels import CUDA_FLASH, FLASH_ATTN, FLASH_ATTN_3
from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Queries

from . import Band
from .kernel import Kernel, Terms
from .packs import Launch, window_of

_aten = torch.ops.aten


class _FlashKernel(Kernel):
    """bf16 and fp16, compute capability 8.0 or later, head dims that are multiples of 8, up to 256."""

    # The kernel sums the gradients of keys and values in fp32 over all rows of a call: `backward_rows` is None.
    one_call = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, band: Band, scale: float, terms: Terms | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, D] and log-sum-exp [B, H, Q] of one block."""
        assert terms is None, f"{self.name} has no further terms"
        window = window_of(band, query.shape[2], key.shape[2])
        out, lse = self._forward(*map(_token_major, (query, key, value)), window=window, scale=scale)
        return out.transpose(1, 2), lse

    def backward(
        self, read: Queries, key: Tensor, value: Tensor, *, band: Band, terms: Terms | None = None, into: Gradients
    ) -> None:
        """Add the gradients of one block, given output and log-sum-exp over all blocks."""
        query, grad_out, out, lse, scale = read
        assert terms is None, f"{self.name} has no further terms"
        inputs = map(_token_major, (grad_out, query, key, value, out))
        window = window_of(band, query.shape[2], key.shape[2])
        # The kernels ignore the strides of the log-sum-exp.
        grads = self._backward(*inputs, lse.contiguous(), window=window, scale=scale)
        into.add(*(grad.transpose(1, 2) for grad in grads))

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, *, launch: Launch, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, D] and log-sum-exp [B, H, Q] of many tiles."""
        lengths = _lengths(launch)
        return _forward_rows(
            lambda *row: self._forward(*row, window=launch.window, scale=scale, **lengths), query, key, value
        )

    def backward_packed(self, read: Queries, key: Tensor, value: Tensor, *, launch: Launch, into: Gradients) -> None:
        """Add the gradients of many tiles."""
        lengths = _lengths(launch)
        _backward_rows(
            lambda *row: self._backward(*row, window=launch.window, scale=read.scale, **lengths), read, key, value, into
        )

    @abstractmethod
    def _forward(self, *inputs: Tensor, window: tuple[int, int], scale: float, **lengths: Any) -> tuple[Tensor, Tensor]:
        """Of query, key and value."""

    @abstractmethod
    def _backward(self, *inputs: Tensor, window: tuple[int, int], scale: float, **lengths: Any) -> Sequence[Tensor]:
        """Of the output's gradient, query, key, value, output and log-sum-exp: those of query, key and value."""


class CudaFlashKernel(_FlashKernel):
    """torch's own."""

    name = CUDA_FLASH

    def _forward(self, *inputs: Tensor, window: tuple[int, int], scale: float, **lengths: Any) -> tuple[Tensor, Tensor]:
        sizes, sides = self._sizes(inputs[0], inputs[1], lengths), _sides(window)
        causal = window == (-1, 0)
        out, lse, *_ = _aten._flash_attention_forward(*inputs, *sizes, 0.0, causal, False, scale=scale, **sides)
        return out, lse

    def _backward(self, *inputs: Tensor, window: tuple[int, int], scale: float, **lengths: Any) -> Sequence[Tensor]:
        sizes, sides = self._sizes(inputs[1], inputs[2], lengths), _sides(window)
        # Without dropout the state of the random generator is not read.
        no_seed = torch.empty(2, dtype=torch.int64, device=inputs[1].device)
        grads: tuple[Tensor, ...] = _aten._flash_attention_backward(
            *inputs, *sizes, 0.0, window == (-1, 0), no_seed, no_seed, scale=scale, **sides
        )
        return grads

    def _sizes(self, query: Tensor, key: Tensor, lengths: dict[str, Any]) -> tuple[Any, ...]:
        """Those of a launch in their order, or of one block."""
        return tuple(lengths.values()) or (None, None, query.shape[1], key.shape[1])


class _PackageKernel(_FlashKernel):
    """A package's functions: as torch's own, and soft-capping too."""

    def __init__(self, functions: Any, softcap: float | None = None) -> None:
        """`functions`: the module that has them."""
        self._functions, self.softcap = functions, softcap

    def _of_window(self, window: tuple[int, int], scale: float) -> dict[str, Any]:
        return {"softmax_scale": scale, **_sides(window), "softcap": self.softcap or 0.0}


class FlashAttnKernel(_PackageKernel):
    """The `flash_attn` package, 2.7 or later (its module `flash_attn_interface`)."""

    name = FLASH_ATTN

    def _forward(self, *inputs: Tensor, window: tuple[int, int], scale: float, **lengths: Any) -> tuple[Tensor, Tensor]:
        call = self._functions._flash_attn_varlen_forward if lengths else self._functions._flash_attn_forward
        out, lse, *_ = call(*inputs, **lengths, return_softmax=False, **self._of_window(window, scale))
        return out, lse

    def _backward(self, *inputs: Tensor, window: tuple[int, int], scale: float, **lengths: Any) -> list[Tensor]:
        call = self._functions._flash_attn_varlen_backward if lengths else self._functions._flash_attn_backward
        grads = _unwritten(inputs[1:4])
        deterministic = torch.are_deterministic_algorithms_enabled()
        call(*inputs, *grads, **lengths, deterministic=deterministic, **self._of_window(window, scale))
        return grads

    def _of_window(self, window: tuple[int, int], scale: float) -> dict[str, Any]:
        without = {"dropout_p": 0.0, "alibi_slopes": None}
        return {**super()._of_window(window, scale), **without, "causal": window == (-1, 0)}


class FlashAttn3Kernel(_PackageKernel):
    """FlashAttention-3, the module `flash_attn_interface` of its own package: for Hopper.

    Source: hopper/flash_attn_interface.py of github.com/Dao-AILab/flash-attention. No GPU has run it here.
    """

    name = FLASH_ATTN_3

    def _forward(self, *inputs: Tensor, window: tuple[int, int], scale: float, **lengths: Any) -> tuple[Tensor, Tensor]:
        named = {**lengths, **self._of_window(window, scale), "causal": window == (-1, 0)}
        out, lse, *_ = self._functions._flash_attn_forward(*inputs, **named)
        return out, lse

    def _backward(self, *inputs: Tensor, window: tuple[int, int], scale: float, **lengths: Any) -> list[Tensor]:
        grads = _unwritten(inputs[1:4])
        named = {**lengths, **self._of_window(window, scale), "is_causal": window == (-1, 0)}
        self._functions._flash_attn_backward(*inputs, **dict(zip(("dq", "dk", "dv"), grads, strict=True)), **named)
        return grads


def _unwritten(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]


@functools.lru_cache
def installed_flash_attn() -> Any | None:
    """The functions of `flash_attn`, None where it is not installed or not of a version whose arguments are known."""
    functions = _installed("flash_attn.flash_attn_interface", _OF_FORWARD, {"window_size_left", "softcap"})
    return functions if hasattr(functions, "_flash_attn_varlen_backward") else None


@functools.lru_cache
def installed_flash_attn_3() -> Any | None:
    """The functions of FlashAttention-3, by the same rule."""
    return _installed("flash_attn_interface", {*_OF_FORWARD, "cu_seqlens_q"}, {"is_causal", "cu_seqlens_k", "dq"})


_OF_FORWARD = {"window_size_left", "window_size_right", "softcap"}


def _installed(module: str, forward: Collection[str], backward: Collection[str]) -> Any | None:
    """A module whose functions have these arguments."""
    try:
        functions = importlib.import_module(module)
        known = set(forward) <= _arguments(functions._flash_attn_forward)
        return functions if known and set(backward) <= _arguments(functions._flash_attn_backward) else None
    # A build for another torch fails in its own ways; torch's kernel is right in any case.
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError):
        return None


def _arguments(function: Any) -> set[str]:
    """The names of its arguments; of an operator, which the packages make of it, those of its schema."""
    operator = getattr(function, "_opoverload", None)
    return {one.name for one in operator._schema.arguments} if operator else set(inspect.signature(function).parameters)


def _sides(window: tuple[int, int]) -> dict[str, int]:
    return {"window_size_left": window[0], "window_size_right": window[1]}


def _lengths(launch: Launch) -> dict[str, Any]:
    """As the packages name them, in the order in which torch takes them."""
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
