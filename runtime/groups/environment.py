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
    """The device of this rank: its GPU where DeepSpeed's accelerator is one, else the CPU.

    A process that sees one GPU takes that one, whatever its LOCAL_RANK is: so Slurm starts tasks (`--gpus-per-task 1`).
    DeepSpeed and Hugging Face choose a device by LOCAL_RANK, which is then set to 0.

    Raises:
        RunError: the process sees no GPU, or fewer than its LOCAL_RANK asks for.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    visible, index = accelerator.device_count(), environment.local_rank
    if visible == 1 and index:
        index = 0
        os.environ["LOCAL_RANK"] = "0"
    if index >= visible:
        raise RunError(
            f"rank {environment.rank} has LOCAL_RANK {index}, and sees {visible} GPU(s): LOCAL_RANK {index} + 1 = "
            f"{index + 1} > {visible}. Start as many ranks on a node as it has GPUs, let every process see "
            "all of them or exactly one of its own (CUDA_VISIBLE_DEVICES), or set "
            "DS_ACCELERATOR=cpu to train without GPUs"
        )
    # Before the first collective: NCCL uses the current device, and a tensor on another would hang or fail there.
    accelerator.set_device(index)
    return torch.device(accelerator.device_name(index))


def backend_of(device: torch.device) -> str:
    """The communication backend for a device. gloo serves CPUs: DeepSpeed's own choice there would need a compiler."""
    if device.type == "cpu":
        return "gloo"
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().communication_backend_name())
