"""Optimizer states on the host: the gradients of this rank's shard there, and what DeepSpeed 0.19.8 makes of them.

Their norm is summed by other code than that of gradients on the accelerator (`scaled_global_norm` of
runtime/zero/stage_1_and_2.py, `_get_norm_groups` of stage3.py). On the host and at stage 3, a parameter without a
gradient in a step is updated with that of the step before: where a gradient lies is not cleared. Stage 2 adds gradients
of micro-batches up in whole parameters, of which a rank holds its shard twice; here they are added up where the
optimizer finds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .optimizer_state import flat_weights, master_shards
from .sharded_weights import is_of_stage_3


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
    found = [
        *weights,
        *masters,
        *(one.grad for one in masters),
        getattr(optimizer, "grad_partitions_flat_buffer", None),
    ]
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
