"""A loss whose value is that of whole sequences and whose gradient is this rank's part of them.

The value is summed over cp while the program goes on: whoever looks at it waits, backward does not.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["SequenceLoss", "over_sequence", "own_part"]


class SequenceLoss(Tensor):
    """A scalar that is being summed over ranks. Functions of torch that read its value wait for the sum.

    Collectives of `torch.distributed` read memory at once: give them `loss.detach()`, which waits.
    """

    part: Tensor
    """What this rank has added, with its graph."""
    _work: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _WITHOUT_VALUE:
                return func(*args, **(kwargs or {}))
            found = func(*map(_arrived, args), **{name: _arrived(one) for name, one in (kwargs or {}).items()})
            if func is Tensor.detach:
                return _of(found, args[0].part.detach(), None)
            return found


_WITHOUT_VALUE = frozenset(
    {
        *(Tensor.backward, Tensor.register_hook, Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point),
        *(
            getattr(Tensor, name).__get__
            for name in ("requires_grad", "grad_fn", "shape", "dtype", "device", "is_leaf", "is_meta", "layout")
        ),
        torch.ones_like,
    }
)
"""What may be asked before the sum is there."""


class _Sum(torch.autograd.Function):
    """To memory of its own, in which the sum will be; the gradient stays this rank's."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:  # noqa: ARG004 -- torch's signature
        return part.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004 -- torch's signature
        return grads[0]


def over_sequence(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The loss of whole sequences from each rank's part of it; `group` holds the ranks that share them, if any do."""
    if group is None:
        return part
    whole: Tensor = cast(Any, _Sum).apply(part)
    if torch.compiler.is_compiling():
        dist.all_reduce(whole.detach(), group=group)
        return whole
    return _of(whole, part, dist.all_reduce(whole.detach(), group=group, async_op=True))


def own_part(loss: Tensor) -> Tensor:
    """This rank's part of a loss, which is there at once."""
    return loss.part if isinstance(loss, SequenceLoss) else loss


def without_waiting(loss: Tensor) -> Tensor:
    """The same tensor for backward: its gradient is right, its value need not be there yet."""
    if not isinstance(loss, SequenceLoss):
        return loss
    with torch._C.DisableTorchFunctionSubclass():
        return loss.as_subclass(Tensor)


def _of(whole: Tensor, part: Tensor, work: Any) -> SequenceLoss:
    loss = whole.as_subclass(SequenceLoss)
    loss.part, loss._work = part, work
    return loss


def _arrived(given: Any) -> Any:
    """The same with plain tensors, whose values are there."""
    if isinstance(given, SequenceLoss):
        if given._work is not None:
            given._work.wait()
            given._work = None
        return given.as_subclass(Tensor)
    return type(given)(map(_arrived, given)) if type(given) in (list, tuple) else given
