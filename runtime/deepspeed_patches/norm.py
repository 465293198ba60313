"""What counts in the gradient norm of DeepSpeed's optimizers, over which ranks, and how it knows experts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .engine import expert_name, expert_tables
from .offload import count_on_host, is_on_host

# How DeepSpeed knows parameters that are experts: by their marks, groups of parameters, and a layer of the model.


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


# What counts in the gradient norm of DeepSpeed's optimizers, and in which sums over ranks.


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
