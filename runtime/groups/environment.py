"""Where this process stands in the job, and what it runs on. A process that no launcher started is a world of one."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Environment:
    """What the launcher (deepspeed, torchrun) says through the environment."""

    rank: int
    world_size: int
    local_rank: int
    launched: bool

    @classmethod
    def read(cls) -> Environment:
        """Reads RANK, WORLD_SIZE and LOCAL_RANK; without RANK there is no launcher."""
        if "RANK" not in os.environ:
            return cls(0, 1, 0, launched=False)
        rank = int(os.environ["RANK"])
        return cls(rank, int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", rank)), launched=True)


def device_of(environment: Environment) -> torch.device:
    """The device of this rank: its GPU where DeepSpeed's accelerator is one, else the CPU."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    device = torch.device(accelerator.device_name(environment.local_rank))
    accelerator.set_device(environment.local_rank)
    return device


def backend_of(device: torch.device) -> str:
    """The communication backend for a device. gloo serves CPUs: DeepSpeed's own choice there would need a compiler."""
    if device.type == "cpu":
        return "gloo"
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().communication_backend_name())
