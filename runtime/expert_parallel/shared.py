"""The shared expert of a layer, computed while rows travel to the routed experts.

Blocks of transformers call their routed experts first and the shared one behind them, mostly with the same hidden
states. It is computed as soon as the rows have left, and handed out when the block asks for it. In backward autograd
takes what was recorded last first: the gradients of rows leave, then the shared expert runs backward, then they are
waited for. Blocks that call the shared expert first, or with something else, compute it as they are written.

Shapes: A tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class SharedExpert:
    """Takes the place of the `forward` of a shared expert, which sees each token by itself."""

    def __init__(self, module: nn.Module) -> None:
        shared: Any = module
        self._compute: Callable[..., Tensor] = shared.forward
        self._ahead: tuple[Tensor, Tensor] | None = None
        self._was_called = False
        shared.forward = self

    def compute(self, hidden_AH: Tensor) -> None:
        """Computes what the block is going to ask for, unless it has been computed, or was something else before."""
        if not self._was_called:
            self._ahead = hidden_AH, self._compute(hidden_AH)
        self._was_called = False

    def forget(self) -> None:
        """Lets go of what was computed: the block does not ask for it."""
        self._ahead, self._was_called = None, False

    def __call__(self, hidden: Tensor) -> Tensor:
        """The result for these hidden states [.., H]."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and _is_view(ahead[0], hidden):
            return ahead[1].view(*hidden.shape[:-1], ahead[1].shape[-1])
        self._was_called = True
        return self._compute(hidden)


def _is_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    same_place = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return (
        same_place
        and one.storage_offset() == other.storage_offset()
        and one.numel() == other.numel()
        and one.shape[-1] == other.shape[-1]
        and one.is_contiguous()
        and other.is_contiguous()
    )
