"""Which kernel computes attention on a GPU: one table, by which the runtime chooses and the compiler warns and counts.

A fused kernel never writes scores to memory. Where none serves, attention is written out in matrix products of fp32
tiles, which is right for every type and mask, and slow.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

PLAIN = "plain"
FLASH_ATTN = "flash_attn"
FLASH_ATTN_3 = "flash_attn_3"
CUDA_CUDNN = "cuda-cudnn"
CUDA_FLASH = "cuda-flash"
CUDA_EFFICIENT = "cuda-efficient"
UNIT = 8
"""Widths of heads are a multiple of this; others are padded with zeros."""


class Fused(NamedTuple):
    """A fused kernel, and what it serves."""

    name: str
    title: str
    capability: tuple[int, int]
    """The least,"""
    types: tuple[str, ...]
    widest: int | None
    """and the widest head; None: any."""
    softcap: bool
    bands: bool
    """Whether tiles may be other than full or causal squares: windows."""
    packs: bool
    """Whether many documents are one launch."""
    package: bool = False
    """Only where a package of its own is installed."""
    unequal: bool = False
    """Keys and values may have heads of different widths; others are padded."""
    cudnn: int = 0
    """The least version of cuDNN, as torch.backends.cudnn.version() gives it."""


_HALF = ("bf16", "fp16")
FUSED = (
    Fused(CUDA_CUDNN, "cuDNN's, called by torch", (9, 0), _HALF, 256, False, False, False, unequal=True, cudnn=91900),
    Fused(FLASH_ATTN_3, "package `flash_attn_interface`", (9, 0), _HALF, 256, True, True, True, package=True),
    Fused(FLASH_ATTN, "package `flash_attn`", (8, 0), _HALF, 256, True, True, True, package=True),
    Fused(CUDA_FLASH, "torch's FlashAttention-2", (8, 0), _HALF, 256, False, True, True),
    Fused(CUDA_EFFICIENT, "torch's memory-efficient", (5, 0), ("fp32",), None, False, False, False),
)
"""From the fastest to the slowest."""


class Attention(NamedTuple):
    """What a layer asks of a kernel."""

    dtype: str
    key_width: int
    value_width: int
    bands: bool = False
    """Tiles may be other than full or causal squares."""
    packed: bool = False
    """A sequence may hold several documents."""
    softcap: bool = False
    added: bool = False
    """Something is added to the scores: a bias."""
    dropout: bool = False


class Choice(NamedTuple):
    """A kernel, the width to which heads are padded for it (None: they are not), and why it is the plain one."""

    kernel: str
    width: int | None
    reason: str = ""


def choose_kernel(
    attention: Attention, capability: tuple[int, int], *, packages: Collection[str] = (), cudnn: int | None = None
) -> Choice:
    """The fastest kernel that is right for this attention on a GPU of this compute capability.

    Args:
        attention: what a layer asks for.
        capability: of the GPU.
        packages: the kernels whose package is installed, and serves this GPU.
        cudnn: the version of cuDNN; None: one that serves.
    """
    widest = max(attention.key_width, attention.value_width)
    width = -(-widest // UNIT) * UNIT
    serving = [
        one
        for one in FUSED
        if capability >= one.capability
        and attention.dtype in one.types
        and (one.widest is None or width <= one.widest)
        and (one.name in packages or not one.package)
        and (cudnn is None or cudnn >= one.cudnn)
    ]
    if not serving:
        card = f"sm_{capability[0]}{capability[1]}"
        return Choice(PLAIN, None, f"there is no fused kernel for {attention.dtype} with head dim {widest} on {card}")
    if attention.dropout:
        return Choice(PLAIN, None, "the dropout of fused kernels depends on how the sequence is split")
    best = serving[0]
    if attention.packed and any(one.packs for one in serving):
        serving = [one for one in serving if one.packs]
    if attention.added:
        return Choice(PLAIN, None, f"{best.name} adds nothing to scores")
    for one in serving:
        if (one.softcap or not attention.softcap) and (one.bands or not attention.bands):
            fits = one.unequal or attention.key_width == attention.value_width
            whole = attention.key_width % UNIT == attention.value_width % UNIT == 0
            return Choice(one.name, None if fits and whole else width)
    lacks = "soft-capping" if attention.softcap else "sliding window between blocks"
    return Choice(PLAIN, None, f"{best.name} has no {lacks}")
