"""A debug mode: finds the first tensor that should be the same on all tensor-parallel ranks and is not.

Unequal replicas raise nothing by themselves; the run only drifts. Every check here hashes whole tensors on the host and
gathers the hashes: use it to look for a mistake, not in training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from parcompile.runtime.collectives import Group, group_size

from .columns import ColumnParallelLinear
from .embedding import VocabParallelEmbedding
from .marking import is_sharded

__all__ = ["ReplicasDifferError", "check_replicated", "watch_replicas"]


class ReplicasDifferError(ValueError):
    """Ranks hold different values of a tensor that should be replicated."""


def check_replicated(tensors: Iterable[tuple[str, Tensor]], group: Group) -> None:
    """Compare named tensors bit for bit over the ranks of `group`; a collective call.

    Raises:
        ReplicasDifferError: On every rank, naming the first tensor that differs and who holds which value.
    """
    if group_size(group) == 1:
        return
    mine = [(name, tuple(tensor.shape), str(tensor.dtype), digest(tensor)) for name, tensor in tensors]
    everyones: list[Any] = [None] * group_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    lengths = [len(entries) for entries in everyones]
    for entries in zip(*everyones, strict=False):
        if any(entry != entries[0] for entry in entries):
            held = "; ".join(
                f"rank {rank}: {name} {list(shape)} {dtype} {digest}"
                for rank, (name, shape, dtype, digest) in enumerate(entries)
            )
            raise ReplicasDifferError(
                f"{entries[0][0]} should be the same on all ranks of the group, but is not ({held})"
            )
    if len(set(lengths)) > 1:
        raise ReplicasDifferError(f"the ranks compare different numbers of tensors: {lengths}")


def watch_replicas(model: nn.Module, group: Group) -> list[RemovableHandle]:
    """Check the replicated parameters of `model` now, and the replicated inputs of its parallel layers in every call.

    Returns the hooks; call `remove` on each to end the checks.
    """
    replicated = [(name, parameter) for name, parameter in model.named_parameters() if not is_sharded(parameter)]
    check_replicated(replicated, group)
    handles = []
    for name, module in model.named_modules():
        split = getattr(module, "sequence_parallel", False) and not getattr(module, "input_is_ready", False)
        if isinstance(module, VocabParallelEmbedding) or (isinstance(module, ColumnParallelLinear) and not split):

            def check(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:  # noqa: ARG001 -- a hook
                check_replicated([(f"the input of {name}", args[0])], group)

            handles.append(module.register_forward_pre_hook(check))
    return handles


def digest(tensor: Tensor) -> str:
    """A hash of the bytes of a tensor."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=8).hexdigest()
