"""Mixtures of experts with every expert cut over the tensor-parallel ranks.

The whole block is one region: each rank routes all tokens alike, runs its slice of every expert (and of the shared
one), and the outputs are parts of a sum. Everything in the block that every rank holds, the router above all, gets a
part of its gradient on each rank.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from parcompile.runtime.drawing import draws
from parcompile.runtime.errors import RunError
from parcompile.runtime.model.slices import Slices
from parcompile.runtime.tensor_parallel import mark_shard, take_ranges

from .regions import Region


def cut_experts(name: str, block: nn.Module, slices: Slices, region: Region) -> None:
    """Cuts everything in `block`, a router with its experts, in place.

    Raises:
        RunError: a cut linear has a bias that would be added on every rank.
    """
    for child_name, module in block.named_modules():
        for kind, parameter in list(module.named_parameters(recurse=False)):
            whole = ".".join(part for part in (name, child_name, kind) if part)
            piece = slices.of(whole)
            if piece.ranges is None or piece.dim is None:
                if isinstance(module, nn.Linear) and kind == "bias" and slices.of(f"{whole[:-4]}weight").ranges:
                    raise RunError(f"{whole} would be added on every tensor-parallel rank", everywhere=True)
                continue
            local = nn.Parameter(
                take_ranges(parameter.detach(), piece.dim, piece.ranges), requires_grad=parameter.requires_grad
            )
            mark_shard(local)
            setattr(module, kind, local)
            if isinstance(module, nn.Linear) and kind == "weight":
                module.out_features, module.in_features = local.shape
    # Jitter is multiplied into the hidden states in place.
    region.enter_block(block, writes=draws(block))

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        parts = output[0] if isinstance(output, tuple) else output
        whole = region.leave(parts)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    block.register_forward_hook(leave)
