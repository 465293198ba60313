"""The borders of the tensor-parallel region: where activations enter it, and which gradients are partial in it.

Query, key and value (and gate and up) share one entry: their input is copied (or gathered from the sequence shards)
once, and their input gradients are summed locally before the one all-reduce (or reduce-scatter) of the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..collectives import copy_to_group, gather_from_sequence

SEQUENCE_DIM = 1
"""Hugging Face activations are [B, S, H]."""


def enter_region(module: nn.Module, group: dist.ProcessGroup, *, sequence_parallel: bool) -> None:
    """Makes the hidden states that `module` is called with enter the tensor-parallel region."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_entered(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": _entered(kwargs["hidden_states"])}

    def _entered(hidden: Tensor) -> Tensor:
        if sequence_parallel:
            return gather_from_sequence(hidden, SEQUENCE_DIM, group)
        return copy_to_group(hidden, group)

    module.register_forward_pre_hook(enter, with_kwargs=True)


def sum_gradient(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Adds up the gradient of a parameter that every rank holds but uses on its own tokens or heads only."""

    def add_up(gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    if parameter.requires_grad:
        parameter.register_hook(add_up)  # type: ignore[no-untyped-call]
