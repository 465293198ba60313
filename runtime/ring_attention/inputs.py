"""What attention over ranks accepts: its arguments, dtypes as autocast wants them, and shapes that fit together."""

from __future__ import annotations

from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.sequence import CpLayout

from .packing import Documents


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments, all of them optional."""

    group: dist.ProcessGroup | None
    layout: CpLayout | str
    causal: bool
    scale: float | None
    window: int | None
    documents: Documents | None
    per_document: bool
    sinks: Tensor | None
    softcap: float | None
    alibi_slopes: Tensor | None
    bias: Tensor | None
    dropout: float
    dropout_seed: int | None
    first_row: int
    first_head: int


class RingOptions(AttentionOptions, total=False):
    """Those of the ring."""

    inner_ranks: int | None


def autocast(tensor: Tensor) -> Tensor:
    """What autocast does for `scaled_dot_product_attention`: fp64 stays as it is."""
    device = tensor.device.type
    if tensor.is_meta:  # a device that autocast does not know
        return tensor
    if tensor.dtype is not torch.float64 and torch.is_autocast_enabled(device):
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def check_inputs(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> None:
    """Raise ValueError, with the numbers, where the tensors do not fit together."""
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"ring attention: expected [batch, heads, local tokens, head dim] three times, got {shapes}")
    if not (query.dtype == key.dtype == value.dtype and query.device == key.device == value.device):
        raise ValueError(
            f"ring attention: query, key and value must have one dtype and one device, got query {query.dtype} on "
            f"{query.device}, key {key.dtype} on {key.device}, value {value.dtype} on {value.device}"
        )
    if not query.dtype.is_floating_point:
        raise ValueError(f"ring attention: expected a floating-point dtype, got {query.dtype}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[2] != key.shape[2]:
        raise ValueError(f"ring attention: batch, key/value heads and local tokens must be equal, got {shapes}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"ring attention: query and key must have one head dim, got {shapes}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"ring attention: {query.shape[1]} query heads are no multiple of {key.shape[1]} key/value heads ({shapes})"
        )
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise ValueError(f"ring attention: sinks {list(sinks.shape)} must be one score for each query head ({shapes})")


def check_terms(
    query: Tensor,
    ranks: int,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    dropout: float,
    dropout_seed: int | None,
) -> None:
    """Raise ValueError, with the numbers, where what is added to the scores or dropped does not fit."""
    batch, heads, length, _ = query.shape
    for name, tensor in (("alibi_slopes", alibi_slopes), ("bias", bias)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"ring attention: {name} would get no gradient: give {name}.detach()")
    if alibi_slopes is not None and alibi_slopes.shape != (heads,):
        raise ValueError(
            f"ring attention: alibi_slopes {list(alibi_slopes.shape)} must be one for each of {heads} query heads"
        )
    if bias is not None and (
        bias.dim() != 4
        or bias.shape[0] not in (1, batch)
        or bias.shape[1] not in (1, heads)
        or bias.shape[2:] != (length, length * ranks)
    ):
        raise ValueError(
            f"ring attention: bias {list(bias.shape)} must be [1 or {batch}, 1 or {heads}, {length} local tokens, "
            f"{length} · {ranks} ranks = {length * ranks}]"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"ring attention: dropout {dropout} must be at least 0 and below 1")
    if dropout and dropout_seed is None:
        raise ValueError("ring attention: dropout wants a dropout_seed that is equal on all ranks")
