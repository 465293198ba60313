"""ZeRO stage 3: weights in shards over the plan's groups, gathered around the modules that use them.

DeepSpeed 0.19.8 shards over dp alone where cp takes part (`_convert_to_zero_parameters` of
runtime/zero/parameter_offload.py), and knows no experts but those of AutoEP: weights are sharded here first. A shard is
a run of a parameter's elements, padded to equal length; an optimizer holds the shards of a sub-group in one tensor.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.errors import RunError
from parcompile.runtime.transport.backend import gather_objects

from .optimizer_state import lies_in_shard

_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
_TO_TENSORS = "apply_to_tensors_only"
_TRACE_CHECK = "assert_ints_same_as_other_ranks"


def shard_weights(
    parameters: Iterable[nn.Parameter],
    group_of: Callable[[nn.Parameter], dist.ProcessGroup],
    prepare: Callable[[nn.Parameter], None],
    config: dict[str, Any],
    mpu: Any,
) -> None:
    """Leaves this rank a shard of each parameter, one after the other, each after `prepare` has seen it whole."""
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    groups.mpu = mpu
    _pass_deferred_on()
    inits: dict[int, Any] = {}
    for parameter in parameters:
        if is_in_shards(parameter):
            continue
        prepare(parameter)
        group, holder = group_of(parameter), nn.Module()
        if id(group) not in inits:
            inits[id(group)] = deepspeed.zero.Init(
                module=holder, data_parallel_group=group, config_dict_or_path=config, dtype=parameter.dtype, mpu=mpu
            )
        inits[id(group)]._convert_to_zero_parameters([parameter])


def _pass_deferred_on() -> None:
    """Lets outputs of modules that are not computed yet be: DeepSpeed's hooks would compute them."""
    from deepspeed.runtime.zero import parameter_offload, utils

    inner = getattr(utils, _TO_TENSORS)
    if getattr(inner, "passes_deferred_on", False):
        return

    def apply(function: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return value if getattr(value, "is_deferred", False) else inner(function, value, *args, **kwargs)

    apply.passes_deferred_on = True  # type: ignore[attr-defined]
    for module in (utils, parameter_offload):
        setattr(module, _TO_TENSORS, apply)


def mark_sharded_experts(parameters: Iterable[nn.Parameter]) -> None:
    """Makes experts those that the optimizer of stage 3 knows as AutoEP's: a mean over dp, a norm over ep."""
    for parameter in parameters:
        parameter.ds_zero_placement_family = "autoep_expert"  # type: ignore[attr-defined]
        parameter.ds_zero_partition_group_name = parameter.group_name  # type: ignore[attr-defined]


def take_over_shards(optimizer: Any, cp: int, order_group: dist.ProcessGroup) -> None:
    """Corrects what the optimizer of stage 3 computes otherwise than those of other stages; does nothing to these.

    Args:
        optimizer: of the engine.
        cp: ranks that share a sequence. Reduce-scatter divides by dp · cp, where all-reduce divides by dp.
        order_group: ranks that use their modules in one order; DeepSpeed compares the order over the world.
    """
    if not is_of_stage_3(optimizer):
        return
    for group in optimizer.fp16_groups:
        offset = 0
        for parameter in group:
            size = parameter.ds_tensor.ds_numel
            first = size * parameter.ds_zero_partition_rank
            lies_in_shard(parameter, first, max(0, min(size, parameter.ds_numel - first)), offset)
            offset += size
    from deepspeed.runtime.zero import partition_parameters, stage3
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    scatter = getattr(optimizer, _SCATTER)
    if cp > 1:
        setattr(optimizer, _SCATTER, lambda *args: [one.mul_(cp) for one in scatter(*args)])

    def counts(parameters: list[nn.Parameter], group: Any) -> bool:
        """Experts count on each rank of tp where these hold others; DeepSpeed's ep is always over tp, too."""
        if optimizer._autoep_expert_parallel_group(parameters) is not None:
            return getattr(parameters[0], "parcompile_tp_in_ep", 1) > 1
        return bool(own(parameters, group))

    own = optimizer._grad_norm_counts_every_rank
    optimizer._grad_norm_counts_every_rank = counts

    for module in (coordinator, stage3, partition_parameters):
        setattr(module, _TRACE_CHECK, lambda ints: _check_order(ints, order_group))


def _check_order(ints: list[int], group: dist.ProcessGroup) -> None:
    found = gather_objects(ints, group)
    if any(one != found[0] for one in found):
        raise RunError("ranks that share weights use their modules in different orders", everywhere=True)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Within it nothing is compared with other ranks or goes over the host: tensors have no values in preflight."""
    from deepspeed.runtime.zero import linear, stage3

    # DeepSpeed asks for the autocast of its device, which torch has not for meta; and it leaves its own linear behind.
    cpu = SimpleNamespace(device_name=lambda: "cpu")

    def defragment(tensors: list[Tensor]) -> Tensor:
        flat = tensors[0].new_empty(sum(one.numel() for one in tensors))
        for one, place in zip(tensors, torch.split(flat, [one.numel() for one in tensors]), strict=True):
            one.data = place
        return flat

    with (
        mock.patch.object(stage3, "defragment", defragment),
        mock.patch.object(sys.modules[__name__], "_check_order", lambda *_: None),
        mock.patch.object(linear, "get_accelerator", lambda: cpu),
        mock.patch.object(nn.functional, "linear", nn.functional.linear),
    ):
        yield


# Parameters in shards, and what the optimizer holds of them.


def is_of_stage_3(optimizer: Any) -> bool:
    """Whether an optimizer keeps weights in shards."""
    return hasattr(optimizer, "fp16_partitioned_groups_flat")


def is_in_shards(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed keeps a shard of it on each rank."""
    return hasattr(parameter, "ds_id")


def local_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of what a rank of tp and ep holds, gathered or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def held(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of a parameter for good: its shard, or all of it."""
    shard: Tensor = getattr(parameter, "ds_tensor", parameter)
    return shard.detach()


@contextlib.contextmanager
def gathered(*parameters: nn.Parameter, written: bool = False) -> Iterator[None]:
    """Within it parameters are there as a whole. All ranks that share them enter; `written` with the same values."""
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(list(parameters), modifier_rank=0 if written else None):
        yield
