"""Where this process stands in the job, and what it runs on. A process that no launcher started is a world of one."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from parcompile.runtime.errors import RunError


@dataclass(frozen=True, slots=True)
class Environment:
    """What the launcher (deepspeed, torchrun) says through the environment."""

    rank: int
    world_size: int
    local_rank: int
    launched: bool

    @classmethod
    def read(cls) -> Environment:
        """Reads RANK, WORLD_SIZE and LOCAL_RANK; without RANK there is no launcher.

        Raises:
            RunError: a value is no number, or the rank does not lie in the world.
        """
        if "RANK" not in os.environ:
            return cls(0, 1, 0, launched=False)
        rank, world_size = _number("RANK"), _number("WORLD_SIZE", 1)
        if rank >= world_size:
            raise RunError(f"RANK is {rank}, WORLD_SIZE is {world_size}: ranks count from 0 to WORLD_SIZE - 1")
        return cls(rank, world_size, _number("LOCAL_RANK", rank), launched=True)


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal():
        raise RunError(f"the environment variable {name} is {text!r}: a launcher sets it to a whole number from 0 on")
    return int(text)


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
