"""Biases that are added to a part of a sum, which every tensor-parallel rank has: the first rank alone adds them.

The other ranks multiply them by zero, so that each rank has a gradient (zero there) and their sum is the whole one.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn


def add_once(module: nn.Module, name: str, group: dist.ProcessGroup) -> None:
    """Lets only the first rank of `group` add the bias `name`, which `module` reads in its forward.

    The bias stays a parameter of the module: its attribute is covered while the forward runs.
    """
    if dist.get_rank(group) == 0:
        return

    def cover(owner: nn.Module, _: Any) -> None:
        bias = owner.get_parameter(name)
        vars(owner)[name] = bias * 0.0

    def uncover(owner: nn.Module, _: Any, __: Any) -> None:
        vars(owner).pop(name, None)

    module.register_forward_pre_hook(cover)
    module.register_forward_hook(uncover, always_call=True)
