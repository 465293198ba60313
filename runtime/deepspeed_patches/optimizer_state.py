"""What an optimizer of DeepSpeed holds: parameters, flat weights, shards, gradients.

ZeRO stage 3: weights in shards over the plan's groups, gathered around the modules that use them.

DeepSpeed 0.19.8 shards over dp alone where cp takes part (`_convert_to_zero_parameters` of
runtime/zero/parameter_offload.py), and knows no experts but those of AutoEP: weights are sharded here first. A shard is
a run of a parameter's elements, padded to equal length; an optimizer holds the shards of a sub-group in one tensor.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.errors import everywhere
from parcompile.runtime.transport.backend import gather_objects

_SUM = "parcompile_sum"


def sum_in(parameter: nn.Parameter, place: Tensor) -> None:
    """Says where the gradients of micro-batches add up, in another type than the parameter's."""
    setattr(parameter, _SUM, place)


def summed_gradient(parameter: nn.Parameter) -> Tensor:
    """That place."""
    found: Tensor = getattr(parameter, _SUM)
    return found


def accumulated_gradient(optimizer: Any, parameter: nn.Parameter) -> Tensor:
    """Where the gradients of micro-batches add up; zeros are put there if there were none."""
    found: Tensor | None = getattr(parameter, _SUM, None)
    if found is not None:
        return found
    apart = getattr(optimizer, "use_grad_accum_attribute", False)
    name = "grad_accum" if apart else "grad"
    found = getattr(parameter, name, None)
    if found is None:
        found = torch.zeros_like(parameter, dtype=optimizer.gradient_accumulation_dtype if apart else None)
        setattr(parameter, name, found)
    return found


def add_in_place(optimizer: Any) -> None:
    """Lets gradients be added to sums of another type without a copy in that type between them."""
    fill = getattr(optimizer, "_fill_param_grad_accum_attribute", None)
    if fill is None:
        return

    def add(parameter: nn.Parameter) -> None:
        total: Tensor | None = getattr(parameter, "grad_accum", None)
        if total is None or parameter.grad is None:
            fill(parameter)
        else:
            total.add_(parameter.grad.view_as(total))
            parameter.grad = None

    optimizer._fill_param_grad_accum_attribute = add


def kept_gradients(engine: Any) -> list[Tensor]:
    """Gradients that are kept between micro-batches: of the parameters, and the sums that DeepSpeed holds beside."""
    kept = [
        getattr(parameter, name, None) for parameter in engine.parameters() for name in ("grad", "grad_accum", _SUM)
    ]
    for name in ("all_grad_tensors", "averaged_gradients"):
        for sums in getattr(engine.optimizer, name, {}).values():
            kept += [sums] if isinstance(sums, Tensor) else sums or []
    return [one for one in kept if one is not None]


def forget_sums(optimizer: Any) -> None:
    """Lets go of the sums that DeepSpeed holds beside the parameters: at ZeRO stage 2 a step begins without them."""
    for name in ("all_grad_tensors", "averaged_gradients"):
        sums = getattr(optimizer, name)
        sums.update(dict.fromkeys(sums))


def parameter_groups(optimizer: Any) -> list[list[nn.Parameter]]:
    """The parameters of each group of an optimizer, those of other ranks' shards included."""
    return [list(group) for group in _first_of(optimizer, "trained", "bit16_groups", "fp16_groups")]


def master_shards(optimizer: Any) -> list[Tensor]:
    """This rank's flat fp32 shard of each group."""
    names = "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"
    return list(_first_of(optimizer, "masters", *names))


def flat_weights(optimizer: Any) -> list[Tensor]:
    """The flat tensor of each group in which its parameters lie."""
    names = "bit16_groups_flat", "fp16_partitioned_groups_flat"
    return list(_first_of(optimizer, "weights", *names))


def groups_of_shards(optimizer: Any) -> list[int]:
    """Of each flat shard the number of its group of parameters: ZeRO stage 3 divides a group into sub-groups."""
    of_group = getattr(optimizer, "sub_group_to_group_id", None)
    return [number if of_group is None else of_group[number] for number in range(len(master_shards(optimizer)))]


def _first_of(optimizer: Any, *names: str) -> Any:
    """What optimizers have under the first of these names: that of stage 0, ZeRO-1 and 2, ZeRO-3."""
    return next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))


class PlaceInShard(NamedTuple):
    """Which elements of a flat parameter lie in this rank's shard, and where there."""

    of_parameter: slice
    of_shard: slice


_PLACE = "parcompile_place"


def lies_in_shard(parameter: nn.Parameter, first: int, numel: int, offset: int) -> None:
    """Says that so many elements of a parameter, from `first` on, lie in this rank's shard, from `offset` on."""
    place = PlaceInShard(slice(first, first + numel), slice(offset, offset + numel))
    setattr(parameter, _PLACE, place if numel else None)


def place_in_shard(parameter: nn.Parameter) -> PlaceInShard | None:
    """Where a parameter lies in this rank's shard; None: not at all."""
    if hasattr(parameter, _PLACE):
        place: PlaceInShard | None = getattr(parameter, _PLACE)
        return place
    mapping: Any = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    pieces = mapping.lp_fragment_address, mapping.hp_fragment_address
    return PlaceInShard(*(slice(piece.start, piece.start + piece.numel) for piece in pieces))


def reduce_buckets(optimizer: Any) -> list[Tensor]:
    """What gradients are copied to before they are reduced: from the first gradient on, at stage 2 in backward only."""
    held = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    # Of stage 3 one tensor, which is no list of its elements.
    return [buffer for one in held for buffer in ([one] if isinstance(one, Tensor) else one)]


def shape_tensors(optimizer: Any) -> list[Tensor]:
    """Meta tensors in which DeepSpeed keeps the shapes of parameters."""
    return [one for group in getattr(optimizer, "round_robin_bit16_meta", ()) for one in group]


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
        raise everywhere("ranks that share weights use their modules in different orders")


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
