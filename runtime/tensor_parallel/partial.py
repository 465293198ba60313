"""Gradients of replicated parameters that each rank has only a part of.

A parameter that works on a rank's own tokens (a norm, a router, a bias of the sequence-parallel region) gets the
gradient of those tokens; the parts have to be summed over the tensor-parallel ranks. The norms and the row layers here
do that by themselves; `sum_gradients` does it for any other module.

Summed at once, in backward, gradients are whole wherever anybody looks at them (DeepSpeed takes them as they arrive);
that is one small all-reduce per parameter and backward. Summed later, all of them travel in one all-reduce per step, as
in Megatron-LM's `finalize_model_grads`: `sum_partial_gradients`, after backward and before the gradient norm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.collectives import Group, copy_to_group, group_size

__all__ = ["leave_partial", "sum_gradients", "sum_in_backward", "sum_partial_gradients", "sum_together"]

_GROUP, _LATER = "parcompile_partial_over", "parcompile_summed_later"
"""Attributes of a parameter: the ranks that its gradient is summed over, and whether a step does it at its end."""


def sum_gradients(module: nn.Module, group: Group, *, later: bool = False) -> None:
    """Sum the gradients of all parameters of `module`, which works on this rank's own tokens, over `group`.

    Call it when the module is on its device. With `later`, the gradients stay partial until `sum_partial_gradients`.
    """
    if group_size(group) == 1:
        return
    for parameter in module.parameters():
        if later:
            mark_partial(parameter)
        else:
            sum_in_backward(parameter, group)


def sum_in_backward(parameter: nn.Parameter, group: Group) -> None:
    """Sum the gradient of one parameter over `group` wherever it is computed; a frozen one has none.

    Whoever sums the gradients of whole steps takes this over: `leave_partial`.
    """

    def summed(gradient: Tensor) -> Tensor:
        if getattr(parameter, _LATER, False):
            return gradient
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    if parameter.requires_grad:
        parameter.register_hook(summed)  # type: ignore[no-untyped-call]
        mark_summed(parameter, group)


def mark_summed(parameter: nn.Parameter, group: Group) -> None:
    """Say that backward sums the gradient of a parameter over `group`, unless `leave_partial` takes it over."""
    setattr(parameter, _GROUP, group)


def summing(parameter: Tensor, group: Group) -> Tensor:
    """A parameter that was marked so, for use on this rank's own tokens: backward sums its gradient."""
    return parameter if getattr(parameter, _LATER, False) else copy_to_group(parameter, group)


def leave_partial(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Of these parameters the ones that backward sums, whose gradients it leaves partial from now on."""
    found = [parameter for parameter in parameters if parameter.requires_grad and hasattr(parameter, _GROUP)]
    for parameter in found:
        setattr(parameter, _LATER, True)
    return found


def sum_partial_gradients(parameters: Iterable[nn.Parameter], group: Group) -> None:
    """Make the partial gradients among `parameters` whole, with one all-reduce per dtype and device.

    Gradients of other parameters are left alone. With gradient accumulation, call it once, after the last backward.
    """
    if group_size(group) == 1:
        return
    together: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if getattr(parameter, "sequence_parallel", False) and parameter.grad is not None:
            together[parameter.grad.dtype, parameter.grad.device].append(parameter.grad)
    for grads in together.values():
        sum_together(grads, group)


@torch.no_grad()
def sum_together(gradients: Sequence[Tensor], group: Group) -> None:
    """Sum gradients over the ranks in place, with one all-reduce for each type."""
    together: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        together[gradient.dtype].append(gradient)
    for grads in together.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):  # type: ignore[no-untyped-call]
            grad.copy_(total.view_as(grad))


def mark_partial(parameter: nn.Parameter | None) -> None:
    """Mark a parameter for `sum_partial_gradients`, by the attribute that Megatron-LM uses."""
    if parameter is not None:
        parameter.sequence_parallel = True  # type: ignore[attr-defined]
