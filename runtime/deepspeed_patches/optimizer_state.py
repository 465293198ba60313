"""What an optimizer of DeepSpeed holds: parameters, flat weights, shards, gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
