"""Attention of modules that are no Hugging Face models: their calls of torch's own run around the ring."""

from __future__ import annotations

import zlib
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parcompile.runtime.errors import RunError
from parcompile.runtime.micro_batch import current
from parcompile.runtime.tensor_parallel import ColumnParallelLinear

from .ring_place import RingPlace

__all__ = ["run_around_ring"]


class _Ring(TorchFunctionMode):
    """Sends torch's attention around the ring."""

    def __init__(self, name: str, place: RingPlace, is_cut: bool) -> None:
        super().__init__()
        self.name, self.place, self.calls = name, place, 0
        self.is_cut = is_cut
        """Whether this rank computes some of the heads only."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002 -- the ring shares heads anyway
    ) -> Tensor:
        if attn_mask is not None or not is_causal:
            raise RunError(f"{self.name} attends with a mask of its own: only is_causal=True is cut", everywhere=True)
        if query.dim() != 4:
            raise RunError(f"{self.name} attends with {query.dim()}-dim queries, not [B, H, S, D]", everywhere=True)
        place = self.place
        number = zlib.crc32(f"{self.name}#{self.calls}".encode()) >> 1
        first_head = query.shape[1] * place.tp_index if self.is_cut else 0
        drop = place.dropping(dropout_p, self.name, number, first_head)
        return place.attend(query, key, value, scale=scale, **drop)


def run_around_ring(name: str, attention: nn.Module, place: RingPlace) -> None:
    """Makes what the module attends run over the ranks that share its sequences; a call raises where it cannot.

    Raises:
        RunError: in a call, when the module masks or drops by itself, or does not call torch's attention.
    """
    forward = attention.forward

    def attend(*args: Any, **kwargs: Any) -> Any:
        is_cut = any(isinstance(one, ColumnParallelLinear) for one in attention.modules())
        with _Ring(name, place, is_cut) as ring:
            output = forward(*args, **kwargs)
        if not ring.calls and (place.group is not None or current().documents or current().packing):
            raise RunError(
                f"{name} does not call torch.nn.functional.scaled_dot_product_attention: what it computes instead "
                "would see this rank's tokens only",
                everywhere=True,
            )
        return output

    attention.forward = attend
