"""Transformer blocks that several layers use: one module for all uses, and the parts of it that adapters stand in.

transformers builds a module for each use and ties its parameters to those of the first. What injection replaces in a
module, the modules of the other uses would keep: here all uses have the first one's.
"""

from __future__ import annotations

from torch import nn

from parcompile.model.shape import ModelShape
from parcompile.model.shared_blocks import BLOCK
from parcompile.runtime.errors import everywhere

from .mechanism import Placed


def share_blocks_here(placed: Placed) -> None:
    """Gives all uses of a block of this model the module of the first."""
    share_blocks(placed.model, placed.stack, placed.shape)


def share_blocks(model: nn.Module, path: str, shape: ModelShape) -> None:
    """Gives all uses of a block the module of the first.

    Args:
        model: whole, with tied parameters.
        path: of its layers.
        shape: of the model.

    Raises:
        RunError: a use has parameters of its own.
    """
    if shape.stack.shared_blocks is None:
        return
    for _, layer, first in shape.stack.shared_blocks.uses:
        if layer == first:
            continue
        user, block = model.get_submodule(f"{path}.{layer}"), model.get_submodule(f"{path}.{first}.{BLOCK}")
        shared = dict(block.named_parameters())
        for name, parameter in getattr(user, BLOCK).named_parameters():
            if shared.get(name) is not parameter:
                raise everywhere(
                    f"{path}.{layer}.{BLOCK}.{name} is not tied to {path}.{first}.{BLOCK}.{name}: layers that share a "
                    "block have the same parameters there. Tie them (model.tie_weights()), without adapters of peft"
                )
        setattr(user, BLOCK, block)


def parts_with_adapters(placed: Placed) -> list[str]:
    """The modules of shared blocks in which columns of adapters take what their module is called with."""
    if (shared := placed.shape.stack.shared_blocks) is None:
        return []
    blocks = [f"{placed.stack}.{layer}.{BLOCK}" for layer in shared.first_layers]
    return [f"{block}.{part}" for block in blocks for part in ("self_attn", "feed_forward")]
