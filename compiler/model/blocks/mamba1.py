"""Mamba-1 layers: S ← exp(Δ A) S + Δ x B, read as S · C, of each channel (arXiv 2312.00752, section 3).

Each channel has a state of [state size], a step size of each token, and a decay of its own for each element. What
writes to the states and what reads them (B and C) is shared by all channels; both, and what the step sizes are
projected from, come from one projection of all channels, which the ranks of tp add up.

Operations of a token and channel, forward: 8 N, of N state features: discrete A and B, the state, C. What a token reads
of a received state takes 5 N more: its decay, an exponential, products with C and the state, a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from parcompile.model import Cut, Part, rows

from .block import Divided, Exchange, Local, Size, Small, StateCut
from .recurrent import STATE_BYTES, Columns, Recurrent, RecurrentTraits

SELECTING, STEPPING = "x_proj", "dt_proj"
"""The projections inside a layer: of its channels, and of the step sizes. They take no hidden states of the model."""
_FEATURES_OF_A_RANK = 16
"""Hidden features for each of those that step sizes are projected from, where their number is "auto"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1(Recurrent):
    """Its channels are heads of one feature."""

    kind: ClassVar[str] = "Mamba-1 layer"
    step_rank: int
    """Features that the step sizes are projected from."""
    chunk: int = 1
    """transformers' scan goes token by token."""
    is_expanded: bool = field(default=True, compare=False)
    """The channels are so many hidden sizes, and no key counts them."""

    @property
    def units(self) -> int:
        """Channels."""
        return self.heads

    @property
    def output_units(self) -> int:
        """Channels."""
        return self.values

    @property
    def selected(self) -> int:
        """Features of the projection that gives what step sizes are projected from, B and C."""
        return self.step_rank + 2 * self.key_dim

    @property
    def channels(self) -> int:
        """The values alone."""
        return self.values

    @property
    def projected(self) -> int:
        """Values and their gate."""
        return 2 * self.values

    def channels_of_rank(self, tp: int) -> int:
        """A rank's values."""
        return self.values // tp

    def columns(self) -> Columns:
        """By channels."""
        channels = (Part(self.values, self.values),)
        return {**dict.fromkeys(("A_log", "D", "conv1d", STEPPING), channels), "in_proj": channels * 2}

    def cut(self, own: str, shape: tuple[int, ...]) -> Cut | None:
        """The projection of the channels takes them in."""
        if (self.own(own) or "").startswith(f"{SELECTING}."):
            return rows(Part(self.values, self.values), transposed=False)
        return Recurrent.cut(self, own, shape)

    def dealt(self) -> Divided:
        """Channels."""
        times = "hidden_size x " if self.is_expanded else ""
        told = f"{times}{self.groups_key}{' =' if times else ''} {self.units}"
        return Divided(self.units, told, self.groups_key, "channels")

    def matmul_parameters(self, hidden: int, streams: int) -> int:
        """Beside the projections of hidden states those of the channels and of the step sizes."""
        return Recurrent.matmul_parameters(self, hidden, streams) + self.values * (self.selected + self.step_rank)

    def flops_per_token(self, *, carried: bool) -> float:
        """Of all channels."""
        return float(self.heads * self.key_dim * (13 if carried else 8))

    def backward_bytes(self, cut: StateCut) -> float:
        """Of one piece at a time, in fp32: of all discrete A and of what is written to the states.

        The scan in transformers goes token by token, and makes both gradients, and both of one token among zeros. It
        has let go of both tensors that a piece makes of a received state.
        """
        return (4.0 - 2 * (cut.cp > 1)) * STATE_BYTES * (cut.rows * cut.length) * self.state_numel / cut.tp

    def exchanges(self, local: Local) -> Iterator[Exchange]:
        """What the channels of all ranks give together, and the gradients of what each rank uses of it."""
        yield from Recurrent.exchanges(self, local)
        yield Exchange("tp", "all-reduce", self.selected * local.tokens * local.width, back="all-reduce")

    def small_sizes(self, small: Small) -> Mapping[str, Any]:
        """A key of the channels goes before what says how many hidden sizes they are."""
        if self.is_expanded:
            return {}
        return {self.groups_key: small.hidden * max(self.values // small.whole_hidden, 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Traits(RecurrentTraits):
    """What a configuration calls the sizes, with defaults."""

    kind: ClassVar[type[Recurrent]] = Mamba1
    layers_key: str = ""
    expand: tuple[str, int] = ("mamba_expand", 2)
    """Channels, in hidden sizes."""
    state: tuple[str, int] = ("mamba_d_state", 16)
    convolution: tuple[str, int] = ("mamba_d_conv", 4)
    step_rank: str = "mamba_dt_rank"
    """Left out, or "auto": a sixteenth of the hidden size, rounded up."""
    width: str = ""
    """A key of the channels, which goes before `expand`."""

    def sizes_of(self, config: Mapping[str, Any], size: Size) -> dict[str, Any]:
        """The sizes."""
        hidden, counted = size("hidden_size", None), self.width in config
        automatic = config.get(self.step_rank) in (None, "auto")
        return {
            "heads": size(self.width, None) if counted else size(*self.expand) * hidden,
            "groups": 1,
            "key_dim": size(*self.state),
            "value_dim": 1,
            "kernel": size(*self.convolution),
            "groups_key": self.width if counted else self.expand[0],
            "is_expanded": not counted,
            "step_rank": -(-hidden // _FEATURES_OF_A_RANK) if automatic else size(self.step_rank, None),
        }
