"""Changes of an engine: how it is made, its process groups, what it saves through, when it reduces gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor


def forbid_jit_builds() -> None:
    """Keeps DeepSpeed from compiling its shared-memory op at start-up: a minute, or an error without a compiler.

    And from asking, of each of its ops, whether it could be compiled: half a second of every rank.
    """
    # An import statement gives torch itself, which deepspeed.comm has by that name.
    backend: Any = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def forget_groups() -> None:
    """Lets DeepSpeed begin anew in this process, with other process groups."""
    import deepspeed.comm.comm as comm
    from deepspeed.utils import groups

    comm.cdb = None
    groups.mpu = None
    groups._WORLD_GROUP = None
    for table in expert_tables():
        table.clear()


def expert_tables() -> tuple[dict[str, Any], ...]:
    """Of ep and of expert-dp: the groups by name, and their ranks."""
    from deepspeed.utils import groups

    return (
        groups._EXPERT_PARALLEL_GROUP,
        groups._EXPERT_PARALLEL_GROUP_RANKS,
        groups._EXPERT_DATA_PARALLEL_GROUP,
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
    )


def expert_name(ep: int) -> str:
    """DeepSpeed reads the size out of the name."""
    return f"ep_size_{ep}"


def register_expert_groups(ep: dist.ProcessGroup, expert_dp: dist.ProcessGroup) -> None:
    """Puts this rank's groups of experts where DeepSpeed looks for them."""
    name, ranks = expert_name(dist.get_world_size(ep)), dist.get_process_group_ranks
    for table, entry in zip(expert_tables(), (ep, ranks(ep), expert_dp, ranks(expert_dp)), strict=True):
        table[name] = entry


@contextlib.contextmanager
def with_optimizer(make: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Within it engines of ZeRO stage 0 have the optimizer that `make` gives for an engine and what updates weights."""
    from deepspeed.runtime.constants import FP16
    from deepspeed.runtime.engine import DeepSpeedEngine

    def configure(engine: Any, optimizer: Any, _: object) -> Any:
        made = make(engine, optimizer)
        engine.clip_fp32_gradients, engine.zero_grad = lambda: None, made.zero_grad
        return made

    with (
        mock.patch.object(DeepSpeedEngine, "_do_optimizer_sanity_check", lambda *_: FP16),
        mock.patch.object(DeepSpeedEngine, "_configure_fp16_optimizer", configure),
    ):
        yield


def without_bf16_optimizer() -> AbstractContextManager[Any]:
    """Within it engines of ZeRO stage 1 that sum gradients of bf16 weights in fp32 have the optimizer of fp16 weights.

    DeepSpeed's own choice, `BF16_Optimizer`, keeps the bf16 gradients beside the sums, writes checkpoints of another
    form, and counts experts and rows that ranks share wrongly in the gradient norm.
    """
    from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION, DeepSpeedEngine

    judge = DeepSpeedEngine._do_optimizer_sanity_check

    def kind(engine: Any, optimizer: Any) -> Any:
        found = judge(engine, optimizer)
        return ZERO_OPTIMIZATION if found == BFLOAT16 else found

    return mock.patch.object(DeepSpeedEngine, "_do_optimizer_sanity_check", kind)


def initialize_with(
    mpu: Any, take_over: Callable[[Any], None], given: Callable[..., AbstractContextManager[dict[str, Any]]]
) -> AbstractContextManager[Any]:
    """Within it, whoever calls `deepspeed.initialize` gets an engine with this mpu, which `take_over` has seen.

    `given` makes of the arguments of a call those that DeepSpeed gets, as a context around it.
    """
    import deepspeed

    make = deepspeed.initialize

    def initialize(*args: Any, **options: Any) -> Any:
        with given(**options) as options:
            made = make(*args, **options, mpu=mpu)
        take_over(made[0])
        return made

    return mock.patch.object(deepspeed, "initialize", initialize)


@contextlib.contextmanager
def use_checkpoint_engine(engine: Any, checkpoint_engine: Any) -> Iterator[None]:
    """Within it, an engine writes and opens files of checkpoints through this checkpoint engine alone."""
    with contextlib.ExitStack() as entered:
        if not engine.zero_optimization():
            entered.enter_context(mock.patch.object(engine.optimizer, "state_dict", lambda: None))
        entered.enter_context(mock.patch.object(engine, "has_moe_layers", False))
        entered.enter_context(mock.patch.object(engine, "checkpoint_engine", checkpoint_engine))
        entered.enter_context(mock.patch.object(engine, "_copy_recovery_script", lambda _: None))
        entered.enter_context(mock.patch.object(engine, "load_universal_checkpoint", lambda: False))
        yield


@contextlib.contextmanager
def reduce_at_end(engine: Any) -> Iterator[None]:
    """Within it backward passes add up gradients on this rank; at its end they are reduced, and the engine may step."""
    # Hooks of `overlap_comm` would reduce each gradient as it comes.
    with mock.patch.object(engine.optimizer, "overlap_comm", False, create=True):
        engine.enable_backward_allreduce = False
        engine.set_gradient_accumulation_boundary(False)
        yield
        engine.set_gradient_accumulation_boundary(True)
        engine.allreduce_gradients()
    engine.micro_steps += engine.gradient_accumulation_steps() - 1


def set_batch(engine: Any, batch: int, micro_batches: int) -> None:
    """Gives the next step so many sequences over all ranks and so many micro-batches; called between two steps."""
    if micro_batches == engine.gradient_accumulation_steps():
        return
    engine._config.train_batch_size = batch
    engine._config.gradient_accumulation_steps = micro_batches
    # Micro-batches of a step are counted by what is left of this one when it is divided by their number.
    engine.micro_steps = 0
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = micro_batches


def keep_until_end(engine: Any, parameters: Sequence[Tensor]) -> Callable[[], None]:
    """At ZeRO stage 1, leaves gradients of these parameters where they add up; what it gives hands them over.

    The others are taken as they come where `overlap_comm` is true; otherwise all of them stay until the step ends.
    """
    optimizer = engine.optimizer
    if not optimizer.overlap_comm:
        return lambda: None
    take, late = optimizer.reduce_ready_partitions_and_remove_grads, {id(one): one for one in parameters}
    groups = {id(one): index for index, group in enumerate(optimizer.bit16_groups) for one in group}

    def reduce_ready_partitions_and_remove_grads(parameter: Tensor, group: int) -> None:
        if id(parameter) not in late:
            take(parameter, group)

    def hand_over() -> None:
        for key, parameter in late.items():
            if optimizer.get_gradient_for_reduction(parameter) is not None:
                take(parameter, groups[key])

    optimizer.reduce_ready_partitions_and_remove_grads = reduce_ready_partitions_and_remove_grads
    return hand_over


def after_step(engine: Any, function: Callable[[], None]) -> None:
    """Calls `function` behind each optimizer step of an engine."""
    step = engine.step

    def step_and_call(*args: Any, **options: Any) -> Any:
        ends = engine.is_gradient_accumulation_boundary()
        result = step(*args, **options)
        if ends:
            function()
        return result

    engine.step = step_and_call


def before_reduction(engine: Any, function: Callable[[], None]) -> None:
    """Calls `function` at the end of each step, before the engine reduces gradients over dp and cp."""
    reduce = engine.allreduce_gradients

    def allreduce_gradients(*args: Any, **options: Any) -> None:
        if engine.is_gradient_accumulation_boundary():
            function()
        reduce(*args, **options)

    engine.allreduce_gradients = allreduce_gradients
