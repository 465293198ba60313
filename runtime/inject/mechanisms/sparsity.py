"""MLPs that keep their largest activations only (Gemma 3n): mean and deviation over all features, not a rank's own.

Source: `Gemma3nTextMLP._gaussian_topk` of transformers 5.23.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.collectives import copy_to_group, reduce_from_group
from parcompile.runtime.transport import group_size

from .mechanism import Placed


def share_cutoffs(placed: Placed) -> None:
    """Lets each such MLP, whose features are cut over tp, take its cutoff from all of them."""
    if placed.region is None:
        return
    for module in placed.model.modules():
        own: Any = module
        if hasattr(module, "_gaussian_topk") and own.activation_sparsity > 0.0:
            own._gaussian_topk = functools.partial(_largest, own.activation_sparsity, placed.region.group)


def _largest(sparsity: float, group: dist.ProcessGroup, features: Tensor) -> Tensor:
    """What of [.., F/tp] is above the quantile `sparsity` of a normal distribution with the moments of all F."""
    width = features.shape[-1] * group_size(group)

    def mean(parts: Tensor) -> Tensor:
        return copy_to_group(reduce_from_group(parts.sum(-1, keepdim=True), group), group) / width

    middle = mean(features)
    deviation = mean((features - middle).square()).sqrt()
    return nn.functional.relu(features - (middle + deviation * _quantile(sparsity, features.dtype)))


@functools.lru_cache
def _quantile(share: float, dtype: torch.dtype) -> float:
    """Of the normal distribution, rounded as transformers rounds it; computed on the host, so that none is copied."""
    found = torch.erfinv(2 * torch.tensor(share, dtype=torch.float32, device="cpu") - 1) * math.sqrt(2)
    return float(found.type(dtype))
