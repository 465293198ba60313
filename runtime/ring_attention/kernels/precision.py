"""The dtypes in which kernels compute and sum."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over blocks and ranks are kept: fp32, or fp64 for fp64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Computes in the types that are given."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)
