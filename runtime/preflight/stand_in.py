"""This process as one rank of any world: torch's fake process group, and an accelerator whose tensors are on meta.

Shapes, types and storages of tensors are real there, values are not. DeepSpeed runs as it does in training.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.plan import Plan
from parcompile.runtime.deepspeed_patches.process_groups import forbid_jit_builds, forget_groups
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh, create_groups
from parcompile.runtime.transport import gloo

META = torch.device("meta")


@contextlib.contextmanager
def stand_in(plan: Plan, rank: int) -> Iterator[Mesh]:
    """This rank's place in the plan's world, with every process group that the runtime gives it; undone at the end.

    Raises:
        RunError: this process is in a real world already.
    """
    if dist.is_initialized():
        raise RunError("this process has joined other ranks: preflight needs one of its own")
    from deepspeed.accelerator import get_accelerator, set_accelerator

    before, environment = get_accelerator(), dict(os.environ)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(plan.world_size), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    forbid_jit_builds()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    try:
        with _quiet(), contextlib.ExitStack() as entered:
            set_accelerator(_accelerator())
            dist.init_process_group("meta:fake,cpu:fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
            if plan.spec.cluster.accelerator == "cpu":
                entered.enter_context(gloo.stands_in_for(META))
            entered.enter_context(_products_of_experts())
            yield create_groups(plan, rank, META)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_groups()
        set_accelerator(before)
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def _products_of_experts() -> Iterator[None]:
    """On meta torch's grouped product knows bf16 only; transformers' own stands in for it in other types."""
    try:
        from transformers.integrations import moe
    except ImportError:
        yield
        return
    possible = getattr(moe, "_can_use_grouped_mm", None)
    if possible is None:
        yield
        return

    def can_use(given: Tensor, weight: Tensor, offsets: Tensor) -> bool:
        return weight.dtype is torch.bfloat16 and bool(possible(given, weight, offsets))

    with mock.patch.object(moe, "_can_use_grouped_mm", can_use):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed reports memory and settings of a machine that is not there."""
    from deepspeed.utils import logger

    level, said = logger.level, io.StringIO()
    logger.setLevel("CRITICAL")
    try:
        with contextlib.redirect_stdout(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _accelerator() -> Any:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Nowhere(CPU_Accelerator):  # type: ignore[misc]
        """A device whose memory costs nothing."""

        def device_name(self, device_index: int | None = None) -> str:  # noqa: ARG002
            return "meta"

        def current_device_name(self) -> str:
            return "meta"

        def communication_backend_name(self) -> str:
            return "fake"

        def on_accelerator(self, tensor: Tensor) -> bool:  # noqa: ARG002
            return True

        def available_memory(self, device_index: int | None = None) -> int:  # noqa: ARG002
            return 2**62

        def total_memory(self, device_index: int | None = None) -> int:  # noqa: ARG002
            return 2**62

        def memory_allocated(self, device_index: int | None = None) -> int:  # noqa: ARG002
            return 0

        def is_fp16_supported(self) -> bool:
            return True

        max_memory_allocated = memory_cached = max_memory_cached = memory_allocated
        memory_reserved = max_memory_reserved = memory_allocated

    return Nowhere()
