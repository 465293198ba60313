"""Random numbers inside and outside the tensor-parallel region.

Outside, activations are replicated: every rank must drop the same elements, and does so as long as torch's default
generators agree. Inside, and in the sequence-parallel region, each rank holds other elements and must draw other
numbers.

No second generator is kept. On entry the inside takes a seed from the default CPU generator, which therefore stays in
step on all ranks; seed + rank seeds the inside; on exit the default state is back. Activation checkpointing restores
the default state before it computes again, and so draws the same seed, and the same numbers, again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.runtime.collectives import Group, group_rank, group_size

__all__ = ["ParallelDropout", "rank_random"]


@contextmanager
def rank_random(group: Group, device: torch.device | str = "cpu") -> Iterator[None]:
    """Draw other random numbers on each rank of `group`, on the CPU and on `device`; a group of one changes nothing."""
    if group_size(group) == 1:
        yield
        return
    device = torch.device(device)
    seed = int(torch.randint(2**62, ()).item()) + group_rank(group)
    devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
    with torch.random.fork_rng(devices=devices, device_type=kind):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.get_device_module(device).manual_seed(seed)
        yield


class ParallelDropout(nn.Dropout):
    """`nn.Dropout` of what each rank holds a part of: heads, intermediate features, or tokens of a split sequence.

    For replicated activations, `nn.Dropout` is right.
    """

    def __init__(self, p: float = 0.5, *, group: Group = None) -> None:
        super().__init__(p)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """[..] to [..]."""
        if not self.training or self.p == 0.0:
            return x
        with rank_random(self.group, x.device):
            return F.dropout(x, self.p)
