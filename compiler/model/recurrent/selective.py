"""Selective state spaces: the sizes of Mamba-1 layers, read out of a configuration.

Mamba-1 (arXiv 2312.00752): each channel has a state of [state size], a step size of each token, and a decay of its own
for each element. What writes to the states and what reads them (B and C) is shared by all channels; both, and what the
step sizes are projected from, come from one projection of all channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .shape import RecurrentKind, RecurrentShape

Size = Callable[[str, "int | None"], int]
"""The value of a key, or its default."""

_FEATURES_OF_A_RANK = 16
"""Hidden features for each of those that step sizes are projected from, where their number is "auto"."""


@dataclass(frozen=True, slots=True)
class SelectiveKeys:
    """What a configuration calls the sizes of its Mamba-1 layers, with defaults."""

    expand: tuple[str, int] = ("mamba_expand", 2)
    """Channels, in hidden sizes."""
    state: tuple[str, int] = ("mamba_d_state", 16)
    kernel: tuple[str, int] = ("mamba_d_conv", 4)
    step_rank: str = "mamba_dt_rank"
    """Left out, or "auto": a sixteenth of the hidden size, rounded up."""
    convolution_bias: tuple[str, bool] = ("mamba_conv_bias", True)
    bias: tuple[str, bool] = ("mamba_proj_bias", False)
    """Of the projections of the input and of the output."""
    width: str = ""
    """A key of the channels, which goes before `expand`."""
    norms: bool = True
    """Whether norms of what step sizes are projected from, of B and of C have weights."""


def selective_shape(
    keys: SelectiveKeys, layers: tuple[int, ...], config: Mapping[str, Any], size: Size
) -> RecurrentShape:
    """The sizes of Mamba-1 layers, whose channels are heads of one feature."""
    hidden = size("hidden_size", None)
    counted = keys.width in config
    automatic = config.get(keys.step_rank) in (None, "auto")
    bias = _is_on(keys.bias, config)
    return RecurrentShape(
        RecurrentKind.MAMBA1,
        layers,
        heads=size(keys.width, None) if counted else size(*keys.expand) * hidden,
        groups=1,
        key_dim=size(*keys.state),
        value_dim=1,
        kernel=size(*keys.kernel),
        projection_bias=bias,
        convolution_bias=_is_on(keys.convolution_bias, config),
        output_bias=bias,
        gated_norm=False,
        chunk=1,
        groups_key=keys.width if counted else keys.expand[0],
        step_rank=-(-hidden // _FEATURES_OF_A_RANK) if automatic else size(keys.step_rank, None),
    )


def _is_on(switch: tuple[str, bool], config: Mapping[str, Any]) -> bool:
    value = config.get(switch[0])
    return switch[1] if value is None else bool(value)
