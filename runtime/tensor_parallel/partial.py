"""Gradients of replicated parameters that each rank has only a part of.

A parameter that works on a rank's own tokens (a norm, a router, a bias of the sequence-parallel region) gets the
gradient of those tokens; the parts have to be summed over the tensor-parallel ranks. The row layers do that by
themselves; `sum_in_backward` does it for any other parameter.

Summed at once, in backward, gradients are whole wherever anybody looks at them (DeepSpeed takes them as they arrive);
that is one small all-reduce per parameter and backward. Summed later (`leave_partial`, `sum_together`), all of them
travel in one all-reduce per step, as in Megatron-LM's `finalize_model_grads`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.collectives import Group, copy_to_group

__all__ = ["leave_partial", "sum_in_backward", "sum_together"]

_GROUP, _LATER = "parcompile_partial_over", "parcompile_summed_later"
"""Attributes of a parameter: the ranks that its gradient is summed over, and whether a step does it at its end."""


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
