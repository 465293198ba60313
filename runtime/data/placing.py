"""Tensors of batches on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; the host does not wait for the copy.

    A GPU copies pages only that cannot move: from others the driver copies first, while the host waits. torch keeps the
    pinned pages until the copy is done.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
