"""Which kernel computes attention over a local block of keys.

FlashAttention on CUDA: torch's own build of the second, and the packages of the second and third if installed.

All know windows, counted from the bottom right corner of a block (`packs.window_of`): every trimmed tile can be said
like this. All compute many tiles in one launch, of one row of the batch: the form for packed sequences, of which a
query without a key gets log-sum-exp +inf. Shapes: query [B, H, Q, D], key and value [B, K, S, D], log-sum-exp
[B, H, Q]; the kernels take [B, Q, H, D], or [Q, H, D] in the packed form, which are views.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import math
import os
import socket
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.machines.attention_kernels import (
    CUDA_CUDNN,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    FLASH_ATTN,
    FLASH_ATTN_3,
    PLAIN,
    Attention,
    choose_kernel,
)
from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Queries

from . import Band
from .fused import CpuFlashKernel, CudaEfficientKernel, CudnnKernel
from .kernel import Kernel, Terms
from .packs import Launch, window_of
from .plain import PlainKernel, padded

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


BACKWARD_ROWS = 1536
"""Query rows of one backward call of CPUs' fused kernel in bf16, which then has one query head for each key/value head.

It sums the gradients of keys and values in the dtype of its inputs, over rows and over the heads that share them.
Slices whose sums are added in fp32 cut the error of the key gradients in bf16 from 1.4e-2 to 0.4e-2 at 8k tokens with
four query heads for each, and take up to 7 % more time.
"""

TILES_FROM = 384
"""Query rows of a block from which our own tiles are faster than CPUs' fused kernel forward, where they are at all."""


def select_kernel(
    query: Tensor,
    value: Tensor,
    *,
    banded: bool = False,
    packed: bool = False,
    softcap: float | None = None,
    added: bool = False,
    dropout: bool = False,
) -> Kernel:
    """The fastest kernel that is right for these tensors' device, dtype and head dims, and for this mask.

    `banded`: tiles may be other than full or causal squares. `packed`: a sequence holds several documents. `added`:
    something is added to the scores. A slower kernel than the device has is announced once.
    """
    if query.device.type == "cuda":
        dtype, widths = _NAMES.get(query.dtype, str(query.dtype)), (query.shape[3], value.shape[3])
        capped = softcap is not None
        asked = Attention(dtype, *widths, bands=banded, packed=packed, softcap=capped, added=added, dropout=dropout)
        return _on_gpu(query.device, asked, softcap)
    fused = _elsewhere(query)
    any_mask, why = isinstance(fused, CpuFlashKernel), ""
    if fused is None:
        why = f"there is no fused kernel for {query.dtype} with head dim {query.shape[3]} on {query.device.type}"
    elif dropout:
        why = "the dropout of fused kernels depends on how the sequence is split"
    elif softcap is not None:
        why = f"{fused.name} has no soft-capping"
    elif added and not any_mask:
        why = f"{fused.name} adds nothing to scores"
    elif query.shape[3] != value.shape[3] and not any_mask:
        assert isinstance(fused, CudaFlashKernel)
        return padded(fused, max(query.shape[3], value.shape[3]))
    return _plain(softcap, why) if fused is None or why else fused


def _plain(softcap: float | None, why: str) -> PlainKernel:
    _announce(f"ring attention takes the plain kernel, which is slower: {why}")
    return PlainKernel(softcap, why)


def _on_gpu(device: torch.device, asked: Attention, softcap: float | None) -> Kernel:
    """By the table that the compiler has, too."""
    # ROCm's kernels serve what those of compute capability 8.0 do.
    capability, packages = (8, 0), dict[str, Any]()
    # cuDNN sums in an order that changes from run to run, and so does FlashAttention-3.
    in_order = torch.are_deterministic_algorithms_enabled()
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        is_hopper = capability[0] == 9
        packages = {
            FLASH_ATTN: installed_flash_attn(),
            FLASH_ATTN_3: installed_flash_attn_3() if is_hopper and not in_order else None,
        }
    installed = [name for name, functions in packages.items() if functions is not None]
    cudnn = 0 if in_order else torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    choice = choose_kernel(asked, capability, packages=installed, cudnn=cudnn)
    if choice.kernel == PLAIN:
        return _plain(softcap, choice.reason)
    makers: dict[str, Callable[[], Kernel]] = {
        FLASH_ATTN: lambda: FlashAttnKernel(packages[FLASH_ATTN], softcap),
        FLASH_ATTN_3: lambda: FlashAttn3Kernel(packages[FLASH_ATTN_3], softcap),
        CUDA_CUDNN: CudnnKernel,
        CUDA_FLASH: CudaFlashKernel,
        CUDA_EFFICIENT: CudaEfficientKernel,
    }
    kernel = makers[choice.kernel]()
    return kernel if choice.width is None else padded(kernel, choice.width)


_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _elsewhere(query: Tensor) -> Kernel | None:
    """The fused kernel of a CPU, or of what stands for another device."""
    dtype = query.dtype
    if query.device.type == "cpu" and dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        if dtype is torch.bfloat16 and tiles_are_faster():
            return CpuFlashKernel(tiles_from=TILES_FROM)
        return CpuFlashKernel(BACKWARD_ROWS if dtype is torch.bfloat16 else None)
    if query.device.type == "meta":
        # Nothing is computed there: the kernels of a GPU, whose results and work space have its shapes.
        return CudaFlashKernel() if dtype.itemsize == 2 and query.shape[3] <= 256 else CpuFlashKernel()
    return None


def tiles_are_faster() -> bool:
    """Whether bf16 on this CPU goes to our own tiles.

    torch's fused kernel spreads heads over threads, and makes use of a matrix unit.
    """
    return torch.get_num_threads() == 1 and has_bf16_products_alone()


@functools.lru_cache
def has_bf16_products_alone() -> bool:
    """This CPU has dot products of bf16 vectors, but no matrix unit."""
    vectors, matrices = (
        bool(getattr(torch.cpu, f"_is_{name}_supported", lambda: False)()) for name in ("avx512_bf16", "amx_tile")
    )
    return vectors and not matrices


@functools.lru_cache
def _announce(message: str) -> None:
    """Warns once for each message, and of the ranks of a host one."""
    if _is_first_on_host(message):
        warnings.warn(message, stacklevel=2)


def _is_first_on_host(message: str) -> bool:
    """Whether no other rank of this host has asked so about a message before; waits for none of them."""
    if not dist.is_initialized():
        return True
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"parcompile/said/{restarts}/{socket.gethostname()}/{hashlib.sha256(message.encode()).hexdigest()[:16]}"
    try:
        return dist.distributed_c10d._get_default_store().add(key, 1) == 1
    except RuntimeError:  # the store of torch's fake group keeps nothing; another one may be gone
        return True
