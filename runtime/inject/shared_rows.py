"""Slices that several tensor-parallel ranks hold: kv heads, where there are fewer of them than ranks.

Their gradients are summed over the ranks that hold them, and count once in the gradient norm. A weight of keys, or of
values, is the same on those ranks as a whole, which the layers handle. Of a weight that fuses queries, keys and values
only some rows are, and of a Mamba-2 layer those that all heads share: their gradients are summed here, and count in the
norm of the first rank that holds them only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.deepspeed_patches.norm import count_in_norm
from parcompile.runtime.deepspeed_patches.optimizer_state import place_in_shard
from parcompile.runtime.errors import RunError
from parcompile.runtime.model.slices import Slice
from parcompile.runtime.tensor_parallel import mark_shard

_ROWS = "parcompile_repeated_rows"


def mark(parameter: nn.Parameter, piece: Slice) -> None:
    """Marks a slice so that each of its elements counts once in the gradient norm."""
    if piece.is_partly_repeated:
        mark_shard(parameter)
        if dist.get_rank(piece.replica_group) > 0:
            setattr(parameter, _ROWS, piece.repeated)
    else:
        mark_shard(parameter, piece.replica_group)


def sum_repeated_gradient(parameter: nn.Parameter, piece: Slice) -> None:
    """Adds up what several ranks hold of a slice's gradient over those ranks, in one message."""
    group, rows = piece.replica_group, piece.repeated

    def add_up(gradient: Tensor) -> Tensor:
        whole = gradient.contiguous().clone()
        shared = torch.cat([whole[start:stop] for start, stop in rows])
        dist.all_reduce(shared, group=group)
        offset = 0
        for start, stop in rows:
            whole[start:stop] = shared[offset : offset + stop - start]
            offset += stop - start
        return whole

    if parameter.requires_grad:
        parameter.register_hook(add_up)  # type: ignore[no-untyped-call]


def count_once(engine: Any) -> None:
    """Leaves repeated rows out of DeepSpeed's gradient norm, which takes a parameter wholly or not at all.

    Raises:
        RunError: there are such rows, and DeepSpeed computes the norm with another optimizer.
    """
    parameters = [one for one in engine.module.parameters() if hasattr(one, _ROWS) and one.requires_grad]
    if not parameters:
        return
    if not count_in_norm(engine.optimizer, _counted_of_shard):
        raise RunError(
            "a fused weight some of whose rows several tp ranks hold needs DeepSpeed's ZeRO-1 optimizer: "
            "leave gradient_accumulation_dtype to the precision"
        )


def _counted_of_shard(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """The gradient of what of a parameter lies in this rank's optimizer shard, zero where another rank's counts."""
    if not hasattr(parameter, _ROWS):
        return gradient
    place = place_in_shard(parameter)
    assert place is not None
    # The first and the last parameter of a shard may lie in it in part.
    return counted(parameter, gradient, place.of_parameter.start)


def counted(parameter: nn.Parameter, gradient: Tensor, first: int = 0) -> Tensor:
    """A gradient from the element `first` on, flat, and zero where another rank's counts in the norm."""
    flat, width = gradient.detach().reshape(-1), parameter.numel() // parameter.shape[0]
    rows: tuple[tuple[int, int], ...] = getattr(parameter, _ROWS, ())
    if rows:
        flat = flat.clone()
    for start, stop in rows:
        flat[max(start * width - first, 0) : max(stop * width - first, 0)] = 0
    return flat
