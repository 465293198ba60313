"""State-space layers (Mamba-1, Mamba-2): their sizes, read out of a configuration.

Selective state spaces: the sizes of Mamba-1 layers, read out of a configuration.

Mamba-1 (arXiv 2312.00752): each channel has a state of [state size], a step size of each token, and a decay of its own
for each element. What writes to the states and what reads them (B and C) is shared by all channels; both, and what the
step sizes are projected from, come from one projection of all channels.

Mamba-2 (arXiv 2405.21060): a head has a state of [state size, head dim] and its own decay; a group of heads shares what
writes to the state and what reads from it (B and C).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parcompile.model.layer_kind import LayersError

from .shape import RecurrentKind, RecurrentShape

# Selective state spaces: the sizes of Mamba-1 layers, read out of a configuration.

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
    bias = _is_switched_on(keys.bias, config)
    return RecurrentShape(
        RecurrentKind.MAMBA1,
        layers,
        heads=size(keys.width, None) if counted else size(*keys.expand) * hidden,
        groups=1,
        key_dim=size(*keys.state),
        value_dim=1,
        kernel=size(*keys.kernel),
        projection_bias=bias,
        convolution_bias=_is_switched_on(keys.convolution_bias, config),
        output_bias=bias,
        gated_norm=False,
        chunk=1,
        groups_key=keys.width if counted else keys.expand[0],
        step_rank=-(-hidden // _FEATURES_OF_A_RANK) if automatic else size(keys.step_rank, None),
    )


def _is_switched_on(switch: tuple[str, bool], config: Mapping[str, Any]) -> bool:
    value = config.get(switch[0])
    return switch[1] if value is None else bool(value)


# State-space layers: their sizes, read out of a configuration.


@dataclass(frozen=True, slots=True)
class StateSpaceKeys:
    """What a configuration calls the sizes of its Mamba-2 layers, with defaults.

    The features of all heads together are `width`, where there is such a key and it has a value; else `expand` times
    the hidden size, or where that is None too the heads times their width.
    """

    heads: tuple[str, int] = ("mamba_n_heads", 128)
    head_dim: tuple[str, int | None] = ("mamba_d_head", None)
    """Without a value, or "auto": the features of all heads, divided by the heads."""
    groups: tuple[str, int] = ("mamba_n_groups", 1)
    state: tuple[str, int] = ("mamba_d_state", 256)
    kernel: tuple[str, int] = ("mamba_d_conv", 4)
    chunk: tuple[str, int] = ("mamba_chunk_size", 256)
    width: tuple[str, int] | None = None
    expand: tuple[str, int] | None = ("mamba_expand", 2)
    convolution_bias: tuple[str, bool] = ("mamba_conv_bias", True)
    input_bias: tuple[str, bool] = ("mamba_proj_bias", False)
    output_bias: tuple[str, bool] = ("mamba_proj_bias", False)
    norm: tuple[str, bool] | None = None
    """The key that switches the gated norm on; None: there always is one."""


def state_space_shape(
    keys: StateSpaceKeys, layers: tuple[int, ...], config: Mapping[str, Any], size: Size
) -> RecurrentShape:
    """The sizes of Mamba-2 layers.

    Raises:
        LayersError: heads, their width and groups do not fit each other.
    """
    heads, groups = size(*keys.heads), size(*keys.groups)
    name = keys.head_dim[0]
    told_alone = keys.expand is None and keys.width is None
    given = config.get(name) not in (None, "auto") or (keys.head_dim[1] is not None and not told_alone)
    if keys.width is not None and (keys.width[0] not in config or config[keys.width[0]] is not None):
        features, told = size(*keys.width), keys.width[0]
    elif keys.expand is not None:
        expand, hidden = size(*keys.expand), size("hidden_size", None)
        features, told = expand * hidden, f"{keys.expand[0]} {expand} x hidden_size {hidden} ="
    else:
        head_dim = size(*keys.head_dim)
        features, told = heads * head_dim, name
    if features % heads:
        raise LayersError(f"{told} {features} / {keys.heads[0]} {heads} is not whole", keys.heads[0])
    if given and (width := size(*keys.head_dim)) * heads != features:
        raise LayersError(f"{keys.heads[0]} {heads} x {name} {width} = {heads * width} is not {told} {features}", name)
    if heads % groups:
        raise LayersError(
            f"{keys.heads[0]} {heads} / {keys.groups[0]} {groups} is not whole: each group serves as many heads as the "
            "others",
            keys.groups[0],
        )
    return RecurrentShape(
        RecurrentKind.MAMBA2,
        layers,
        heads=heads,
        groups=groups,
        key_dim=size(*keys.state),
        value_dim=features // heads,
        kernel=size(*keys.kernel),
        projection_bias=_is_on(keys.input_bias, config),
        convolution_bias=_is_on(keys.convolution_bias, config),
        output_bias=_is_on(keys.output_bias, config),
        gated_norm=keys.norm is None or _is_on(keys.norm, config),
        chunk=size(*keys.chunk),
        groups_key=(keys.groups if groups > 1 else keys.heads)[0],
    )


def _is_on(switch: tuple[str, bool], config: Mapping[str, Any]) -> bool:
    return bool(config.get(*switch))
