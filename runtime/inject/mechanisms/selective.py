"""Mamba-1 layers of Hugging Face models: their scan over pieces, and this rank's channels of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from parcompile.model.blocks.mamba1 import SELECTING, STEPPING, Mamba1, Mamba1Traits
from parcompile.model.families import FAMILIES
from parcompile.runtime.collectives import copy_to_group, reduce_from_group
from parcompile.runtime.inject.ring_place import StatePlace
from parcompile.runtime.recurrent import selective_scan


def mamba_scan(
    original: Callable[..., Any],
    place: StatePlace,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options: Any,
) -> Tensor:
    """In front of the scan of Mamba-1 layers: the gate comes behind what a received state adds."""
    assert not return_last_state, "caches are taken away"
    out = selective_scan(
        original,
        place.pieces(hidden_states.shape[0], hidden_states.shape[2]),
        place.chain,
        hidden_states,
        dt,
        A,
        B,
        C,
        D=D,
        delta_bias=delta_bias,
        delta_softplus=delta_softplus,
        **options,
    )
    return out if z is None else out * nn.functional.silu(z)


def is_inside(name: str, modules: list[str]) -> bool:
    """Whether a linear is a projection inside of one of these layers, by its name."""
    parent, _, own = name.rpartition(".")
    return own in (SELECTING, STEPPING) and parent in modules


def why_untrained(name: str, model_type: str) -> str:
    """Why adapters of a linear would not be trained, by its name and the model's type; empty where they are."""
    family = FAMILIES.get(model_type)
    if name.endswith(f".{STEPPING}") and family is not None and family.part(Mamba1Traits) is not None:
        return (
            "has adapters that nothing trains: transformers multiplies by the weight itself. Leave it out of "
            "target_modules"
        )
    return ""


def why_whole(name: str) -> str:
    """Why a weight that tp splits takes no adapters, by its name; empty where it is none of these layers."""
    return f"LoRA on {SELECTING} of a Mamba-1 layer is not injected over tp" if f".{SELECTING}." in name else ""


def localise_selective(module: nn.Module, shape: Mamba1, tp: int, group: dist.ProcessGroup) -> None:
    """Corrects what a cut module was built with, and adds up over the ranks what each projects of its own channels.

    Every rank then has the step sizes' features, B and C of all channels, and uses them for its own: the gradients of
    these are parts, which are added up in backward.

    Args:
        module: the layer's.
        shape: of the whole layer.
        tp: ranks that share its channels.
        group: these ranks.
    """

    def add_up(_: nn.Module, __: Any, parts: Tensor) -> Tensor:
        return copy_to_group(reduce_from_group(parts, group), group)

    local = shape.values // tp
    for child, linear in module.named_children():
        if child == SELECTING and isinstance(linear, nn.Linear):
            linear.in_features = local
            linear.register_forward_hook(add_up)
        elif child == STEPPING and isinstance(linear, nn.Linear):
            linear.out_features = local
        elif isinstance(linear, nn.Conv1d):
            linear.in_channels = linear.out_channels = linear.groups = local
    if vars(module).get("intermediate_size") == shape.values:
        module.intermediate_size = local  # type: ignore[assignment]
