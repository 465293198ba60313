"""How DeepSpeed knows parameters that are experts: by their marks, groups of parameters, and a layer of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from .process_groups import expert_name


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
