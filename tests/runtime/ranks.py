"""Runs a function on several live ranks (gloo on loopback) and returns what each of them returned."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable
from typing import Any

from parcompile.model.catalogue import RUNTIME_FAMILIES
from parcompile.runtime.local import LocalWorld, RankError

__all__ = ["RankError", "forked_world", "free_port", "run_ranks"]

_FAMILIES = sorted({name.removesuffix("_text").replace("-", "_") for name in RUNTIME_FAMILIES})
PRELOAD = (
    *("torch", "torch.distributed", "torch._dynamo", "torch._inductor.compile_fx", "functorch.compile"),
    *("transformers.models.auto", "transformers.models.llama.modeling_llama", "accelerate"),
    *("deepspeed", "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.zero.muon.muon_optimizer"),
    *("parcompile.runtime", "torch._dynamo.repro.after_dynamo", "pytest"),
    *("transformers.trainer", "peft", "datasets", "trl.trainer.base_trainer", "trl.trainer.sft_trainer"),
    *(f"transformers.models.{name}.modeling_{name}" for name in _FAMILIES),
)
"""What engines, trainers and tests import, most of it late, takes 10 seconds; the fork server does it once for all.

Names that it does not find it passes over: classes of a family that is kept elsewhere are imported by each rank.
"""


_RANDOM = random.SystemRandom()
"""Not what tests seed: two of them would take the same port."""


def free_port() -> int:
    """For launchers; `run_ranks` needs none. Below the ports of connections, one of which could take it meanwhile."""
    while True:
        port = _RANDOM.randrange(20000, 32000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


PATIENCE_SECONDS = 600.0
"""No test that ends well is ended before, however much else the machine does; one that hangs ends all the same."""


def forked_world(size: int, *, process_group: bool = True) -> LocalWorld:
    """Ranks that begin with `PRELOAD`."""
    return LocalWorld(size, process_group=process_group, start_method="forkserver", preload=PRELOAD)


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 0) -> list[Any]:
    """`function(rank, *args)` on every rank, each in its own process, with a launcher's environment.

    `timeout`: seconds, if more than `PATIENCE_SECONDS`.
    """
    with forked_world(world_size, process_group=False) as world:
        return world.run(function, *args, timeout=max(timeout, PATIENCE_SECONDS))
