"""A convolution over the last few tokens between two gates: no state but those tokens (LFM2).

Operations of a token, forward: 2 n C, of n tokens and C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from parcompile.model import Part

from .block import Size
from .recurrent import Columns, Recurrent, RecurrentTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution(Recurrent):
    """Its channels are heads of one feature, without keys."""

    kind: ClassVar[str] = "short convolution"

    @property
    def output_units(self) -> int:
        """Channels."""
        return self.values

    @property
    def projected(self) -> int:
        """Values and two gates."""
        return 3 * self.values

    def columns(self) -> Columns:
        """By channels."""
        channels = (Part(self.values, self.values),)
        return {"conv": channels, "in_proj": channels * 3}

    def flops_per_token(self, *, carried: bool) -> float:  # noqa: ARG002
        """Of all channels."""
        return 2.0 * self.kernel * self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolutionTraits(RecurrentTraits):
    """As many channels as hidden features."""

    kind: ClassVar[type[Recurrent]] = ShortConvolution
    module: str = "conv"
    word: str = "conv"
    attending_key: str = "full_attn_idxs"
    attends_by_default: bool = True
    every_key: tuple[str, int] | None = None

    def sizes_of(self, config: Mapping[str, Any], size: Size) -> dict[str, Any]:  # noqa: ARG002
        """The channels, and how many tokens they see."""
        hidden = size("hidden_size", 1)
        return {"heads": hidden, "groups": hidden, "key_dim": 0, "value_dim": 1, "kernel": size("conv_L_cache", 3)}
