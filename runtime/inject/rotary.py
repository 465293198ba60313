"""Rotary embeddings that choose their frequencies by the last position, on ranks that hold different positions.

`longrope` and `dynamic` of Hugging Face look at the largest position they are given: one rank would take the
frequencies of a long sequence and another those of a short one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.micro_batch import current


def see_last_position(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Lets each such embedding see the largest position of all ranks of `group`."""
    if group is None:
        return
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = kinds.values() if isinstance(kinds, Mapping) else [kinds]
        if any("dynamic" in str(kind) or kind == "longrope" for kind in named):
            module.register_forward_pre_hook(functools.partial(_with_last, group), with_kwargs=True)
            module.register_forward_hook(_without_last)


def _with_last(
    group: dist.ProcessGroup, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One more token behind those of the rank, at the last position of all ranks."""
    if current().alone:
        return args, kwargs
    hidden, positions = args[0], kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    last = positions.max().view(1)
    dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
    longer = torch.cat([positions, last.expand(*positions.shape[:-1], 1)], -1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": longer}
    return (hidden, longer, *args[2:]), kwargs


def _without_last(_: nn.Module, __: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> Any:
    """[B, S + 1, D] → [B, S, D], for cosines and sines or both in one."""
    if current().alone:
        return output
    return output[..., :-1, :] if isinstance(output, Tensor) else tuple(each[..., :-1, :] for each in output)
