"""Which kernel computes attention over a local block of keys."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from .cuda_flash import CudaFlashKernel, FlashAttnKernel, installed_flash_attn
from .fused import CpuFlashKernel, CudaEfficientKernel
from .kernel import Kernel
from .plain import PlainKernel

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
    softcap: float | None = None,
    added: bool = False,
    dropout: bool = False,
) -> Kernel:
    """The fastest kernel that is right for these tensors' device, dtype and head dims, and for this mask.

    `banded`: tiles may be other than full or causal squares. `added`: something is added to the scores. A slower kernel
    than the device has is announced once.
    """
    fused, why = _fused_kernel(query, softcap)
    if fused is not None:
        why = ""
        any_mask = isinstance(fused, CpuFlashKernel)
        if dropout:
            why = "the dropout of fused kernels depends on how the sequence is split"
        elif softcap is not None and not isinstance(fused, FlashAttnKernel):
            why = f"{fused.name} has no soft-capping"
        elif query.shape[3] != value.shape[3] and not any_mask:
            why = f"the fused kernels want one head dim, not {query.shape[3]} for keys and {value.shape[3]} for values"
        elif banded and isinstance(fused, CudaEfficientKernel):
            why = f"{fused.name} has no sliding window between blocks"
        elif added and not any_mask:
            why = f"{fused.name} adds nothing to scores"
    if fused is None or why:
        _announce(f"ring attention takes the plain kernel, which is slower: {why}")
        return PlainKernel(softcap)
    return fused


def _fused_kernel(query: Tensor, softcap: float | None) -> tuple[Kernel | None, str]:
    """The fused kernel for a device, dtype and head dim, or why there is none."""
    head_dim, device, dtype = query.shape[3], query.device, query.dtype
    if device.type == "cpu" and dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        if dtype is torch.bfloat16 and tiles_are_faster():
            return CpuFlashKernel(tiles_from=TILES_FROM), ""
        return CpuFlashKernel(BACKWARD_ROWS if dtype is torch.bfloat16 else None), ""
    if device.type == "cuda" and head_dim % 8 == 0 and dtype in (torch.float32, torch.bfloat16, torch.float16):
        recent = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
        if recent and dtype.itemsize == 2 and head_dim <= 256:
            functions = installed_flash_attn() if torch.version.hip is None else None
            return CudaFlashKernel() if functions is None else FlashAttnKernel(functions, softcap), ""
        if recent or dtype is not torch.bfloat16:
            return CudaEfficientKernel(), ""
    if device.type == "meta":
        # Nothing is computed there: the kernels of a GPU, whose results and work space have its shapes.
        return CudaFlashKernel() if dtype.itemsize == 2 and head_dim <= 256 else CpuFlashKernel(), ""
    return None, f"there is no fused kernel for {dtype} with head dim {head_dim} on {device.type}"


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
    """Warn once for each message."""
    warnings.warn(message, stacklevel=2)
