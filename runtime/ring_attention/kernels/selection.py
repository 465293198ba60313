"""Which kernel computes attention over a local block of keys."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import warnings
from collections.abc import Callable
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

from .cuda_flash import (
    CudaFlashKernel,
    FlashAttn3Kernel,
    FlashAttnKernel,
    installed_flash_attn,
    installed_flash_attn_3,
)
from .fused import CpuFlashKernel, CudaEfficientKernel, CudnnKernel
from .kernel import Kernel
from .plain import PlainKernel, padded

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
    choice = choose_kernel(asked, capability, packages=installed, cudnn=0 if in_order else _cudnn_version())
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


def _cudnn_version() -> int:
    return torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]


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
