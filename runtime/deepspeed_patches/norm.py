"""What counts in the gradient norm of DeepSpeed's optimizers, over which ranks, and how it knows experts.

Optimizer states on the host: the gradients of this rank's shard there, and what DeepSpeed 0.19.8 makes of them.

Their norm is summed by other code than that of gradients on the accelerator (`scaled_global_norm` of
runtime/zero/stage_1_and_2.py, `_get_norm_groups` of stage3.py). On the host and at stage 3, a parameter without a
gradient in a step is updated with that of the step before: where a gradient lies is not cleared. Stage 2 adds gradients
of micro-batches up in whole parameters, of which a rank holds its shard twice; here they are added up where the
optimizer finds them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .engine import expert_name, expert_tables
from .optimizer_state import flat_weights, is_of_stage_3, master_shards


def is_on_host(optimizer: Any) -> bool:
    """Whether an optimizer of DeepSpeed keeps its states in the host's memory."""
    return bool(getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))


def gradient_on_host(optimizer: Any, parameter: nn.Parameter) -> Tensor:
    """The gradient, flat and in fp32, of what of a parameter lies in this rank's shard."""
    group, *_, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
    gradient = master_shards(optimizer)[group].grad
    assert gradient is not None
    found: Tensor = gradient.narrow(0, offset, numel)
    return found


def weights_on_host(optimizer: Any) -> list[Tensor]:
    """The flat shards of weights that lie in the host's memory: at stage 3, where `offload_param` says so."""
    return flat_weights(optimizer) if getattr(optimizer, "offload_param", False) else []


def tensors_on_host(optimizer: Any) -> list[Tensor]:
    """What lies there beside the optimizer's own states: weights, masters, gradients with their sums."""
    weights = weights_on_host(optimizer)
    if not is_on_host(optimizer):
        return weights
    masters = master_shards(optimizer)
    found = [*weights, *masters, *(one.grad for one in masters)]
    found.append(getattr(optimizer, "grad_partitions_flat_buffer", None))
    found += getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", ())
    return [one for one in found if one is not None]


def count_on_host(optimizer: Any, counted: Callable[[nn.Parameter, Tensor], Tensor]) -> None:
    """Lets gradients pass `counted` on their way into the norm, of which DeepSpeed keeps each parameter's part."""
    complete: Callable[[Sequence[nn.Parameter]], Tensor] = optimizer.complete_grad_norm_calculation_for_cpu_offload

    def norm_of(parameters: Sequence[nn.Parameter]) -> Tensor:
        for parameter in parameters:
            gradient, parts = gradient_on_host(optimizer, parameter), optimizer.norm_for_param_grads
            if (part := counted(parameter, gradient)) is not gradient and optimizer.get_param_id(parameter) in parts:
                parts[optimizer.get_param_id(parameter)] = part.norm()
        return complete(parameters)

    optimizer.complete_grad_norm_calculation_for_cpu_offload = norm_of


def take_over_gradients(optimizer: Any) -> None:
    """Lets no gradient outlive its step on the host and at stage 3."""
    if not (is_of_stage_3(optimizer) or is_on_host(optimizer)):
        return
    update = optimizer.step

    def step(*args: Any, **options: Any) -> None:
        update(*args, **options)
        kept = [shard.grad for shard in master_shards(optimizer)] if is_on_host(optimizer) else []
        for one in (*kept, getattr(optimizer, "grad_partitions_flat_buffer", None)):
            if one is not None:
                one.zero_()

    optimizer.step = step
    if is_on_host(optimizer) and not is_of_stage_3(optimizer):
        optimizer.async_accumulate_grad_in_cpu_via_gpu = functools.partial(_add_up, optimizer)
        if not optimizer.partition_gradients:
            # fp32 sums go to the host from where they are: DeepSpeed would copy the shard's on the accelerator first.
            optimizer._use_compact_grad_partition_buffer = lambda _: False
        # As large as the largest parameter, for DeepSpeed's own sums.
        optimizer.temp_grad_buffer_for_cpu_offload = optimizer.temp_grad_buffer_for_gpu_offload = None


def _add_up(optimizer: Any, parameter: nn.Parameter) -> None:
    """Adds the gradient of a micro-batch to those before it; that of the last one is copied behind this."""
    optimizer._wait_for_offload_copies()
    _, first, _, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
    total = gradient_on_host(optimizer, parameter)
    part = optimizer.get_param_gradient_attribute(parameter).view(-1).narrow(0, first, numel)
    if optimizer.micro_step_id > 0:
        part.add_(total.to(part.device, part.dtype, non_blocking=True))
    if not optimizer.is_gradient_accumulation_boundary():
        total.copy_(part, non_blocking=True)
        optimizer._record_offload_copy()


def mark_expert(parameter: nn.Parameter, ep: int, tp: int = 1) -> None:
    """Makes a parameter one that only the expert-dp ranks share; the experts of a layer are over `ep` ranks.

    `tp` ranks of each tensor-parallel group are among these, with other experts each.
    """
    parameter.parcompile_tp_in_ep = tp  # type: ignore[attr-defined]
    parameter.allreduce = False  # type: ignore[attr-defined]
    parameter.group_name = expert_name(ep)  # type: ignore[attr-defined]


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether a parameter is marked so."""
    return getattr(parameter, "allreduce", True) is False


def expert_group_name(parameter: nn.Parameter) -> str | None:
    """The name of the groups of an expert; None: the parameter is none."""
    name: str | None = getattr(parameter, "group_name", None) if is_expert(parameter) else None
    return name


EXPERT_KEYS = ("moe", "name")
"""What groups of parameters have when they are of experts."""


def expert_settings(settings: Mapping[str, Any], ep: int) -> dict[str, Any]:
    """The settings of a group of parameters for its experts, which are a group of their own."""
    return {**settings, "moe": True, "name": expert_name(ep)}


@contextlib.contextmanager
def with_expert_layers(model: nn.Module) -> Iterator[None]:
    """Within it DeepSpeed finds in a model that its parameters may be experts."""
    from deepspeed.moe.layer import MoE

    class Marker(MoE):  # type: ignore[misc]
        """Holds nothing and computes nothing."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = 0

        def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
            """The groups are there already."""

    model.add_module("parcompile_expert_layers", Marker())
    try:
        yield
    finally:
        del model.parcompile_expert_layers


def norm_at_once(optimizer: Any) -> None:
    """Makes the gradient norm one sum over all groups of parameters, so that all ranks send the same messages."""
    if not hasattr(optimizer, "scaled_global_norm"):
        return  # that of stage 0 is
    from deepspeed.runtime.utils import combine_grad_norm_groups

    def norm(norm_type: int = 2) -> Any:
        if is_on_host(optimizer):
            every = [one for held in optimizer.params_in_partition for one in held]
            whole = optimizer.complete_grad_norm_calculation_for_cpu_offload(every)
            return combine_grad_norm_groups([whole], norm_type=norm_type)
        gradients, parameters = [], []
        for group, held in enumerate(optimizer.params_in_partition):
            own = [one for one in optimizer.averaged_gradients[group] if not getattr(one, "_zero_padding", False)]
            # DeepSpeed pairs what it is given by place, and does not mark the padding at the end of every group.
            gradients += own[: len(held)]
            parameters += held[: len(own)]
        return combine_grad_norm_groups([optimizer.get_grad_norm_direct(gradients, parameters)], norm_type=norm_type)

    optimizer.scaled_global_norm = norm


def squared_norm(gradients: Iterable[tuple[nn.Parameter, Tensor]], device: torch.device, *, first: bool) -> Tensor:
    """This rank's part, over tp and pp, of the square of the gradient norm; of experts, that of all its ep ranks.

    Args:
        gradients: of parameters, summed over the ranks that share them.
        device: of the result, a scalar.
        first: whether this is the first rank of tp, on which parameters count that all of them hold.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    square, of_experts = torch.zeros(2, device=device).unbind()
    groups: set[str] = set()
    for parameter, gradient in gradients:
        name = expert_group_name(parameter)
        groups |= set() if name is None else {name}
        if (first or is_model_parallel_parameter(parameter)) and not getattr(parameter, "ds_pipe_replicated", False):
            total = square if name is None else of_experts
            # The sum over tp counts once more what the sum over ep has from other ranks of tp already.
            times = getattr(parameter, "parcompile_tp_in_ep", 1)
            total += torch.linalg.vector_norm(gradient, dtype=torch.float32).square() / times
    for name in sorted(groups):
        dist.all_reduce(of_experts, group=expert_tables()[0][name])
    return square + of_experts


def count_in_norm(optimizer: Any, counted: Callable[[nn.Parameter, Tensor], Tensor]) -> bool:
    """Lets each gradient of this rank's shard pass `counted`, with its parameter, on its way into the gradient norm.

    Returns whether the optimizer computes its norm so that this can be done: those of ZeRO stages 0 to 2 do.
    """
    if hasattr(optimizer, "counted"):
        optimizer.counted = counted
        return True
    norm = getattr(optimizer, "get_grad_norm_direct", None)
    if norm is None:
        return False

    def norm_of(gradients: Sequence[Tensor], trained: Sequence[nn.Parameter], *args: Any, **options: Any) -> Any:
        parameters = iter(trained)
        # Padding of the shard stands among the gradients and belongs to no parameter.
        owners = (None if getattr(one, "_zero_padding", False) else next(parameters, None) for one in gradients)
        pairs = zip(gradients, owners, strict=True)
        return norm([one if owner is None else counted(owner, one) for one, owner in pairs], trained, *args, **options)

    optimizer.get_grad_norm_direct = norm_of
    if is_on_host(optimizer):
        count_on_host(optimizer, counted)
    return True


def count_on_another_stage(parameter: nn.Parameter) -> None:
    """Leaves a parameter out of this rank's part of the gradient norm."""
    parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]
