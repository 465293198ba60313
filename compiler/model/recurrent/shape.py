"""The sizes of layers that carry a state along the sequence."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class RecurrentKind(str, enum.Enum):
    """What a layer computes in the place of attention."""

    SHORT_CONVOLUTION = "short convolution"
    """A convolution over the last few tokens between two gates: no state but those tokens."""
    GATED_DELTA_NET = "gated delta net"
    """S ← exp(g) S, then S ← S + β k (v − Sᵀ k)ᵀ, read as Sᵀ q (arXiv 2412.06464, equation 10)."""
    KIMI_DELTA_ATTENTION = "Kimi delta attention"
    """The same with a decay of its own for each row of S, which is a channel of the key (arXiv 2510.26692)."""
    LIGHTNING_ATTENTION = "lightning attention"
    """S ← λ S + k vᵀ, read as Sᵀ q, with a fixed decay λ of each head (arXiv 2501.08313, section 2.2)."""
    MAMBA1 = "Mamba-1 layer"
    """S ← exp(Δ A) S + Δ x B, read as S · C, of each channel with Δ and A of its own (arXiv 2312.00752, section 3)."""
    MAMBA2 = "Mamba-2 layer"
    """S ← exp(Δ A) S + Δ x Bᵀ, read as S C (arXiv 2405.21060, section 2)."""


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Which layers have a state in the place of attention, and how large it is.

    A state is a [key_dim, value_dim] matrix for each of `heads`. `groups` is what tensor parallelism deals to its
    ranks: a group has its own keys, and `heads / groups` heads.
    """

    kind: RecurrentKind
    layers: tuple[int, ...]
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the causal convolution in front of the recurrence sees; 1: there is none."""
    projection_bias: bool = False
    convolution_bias: bool = False
    groups_key: str = field(default="hidden_size", compare=False)
    """The configuration's key of the groups. Configurations that say the same in other words are of one shape."""
    gate_rank: int = 0
    """Features between the two projections of a gate, where it has two; 0: gates are projected at once."""
    beside_attention: bool = False
    """These layers attend too."""
    output_bias: bool = False
    gated_norm: bool = True
    """A norm of what all heads give, times a gate, in front of the output projection."""
    chunk: int = 64
    """Tokens that the recurrence computes at once."""
    step_rank: int = 0
    """Features that the step sizes of a Mamba-1 layer are projected from."""

    @property
    def units(self) -> int:
        """What tensor parallelism deals to its ranks: groups; of one group of a state-space layer its heads."""
        of_heads = self.kind in (RecurrentKind.MAMBA1, RecurrentKind.MAMBA2) and self.groups == 1
        return self.heads if of_heads else self.groups

    @property
    def selected(self) -> int:
        """Features of the projection that gives what step sizes are projected from, B and C of a Mamba-1 layer."""
        return self.step_rank + 2 * self.key_dim

    def groups_of_rank(self, tp: int) -> int:
        """Groups that a tensor-parallel rank has heads of."""
        return max(1, self.groups // tp)

    def channels_of_rank(self, tp: int) -> int:
        """Channels of the convolution on a tensor-parallel rank: ranks that share a group have its keys each."""
        if self.kind is RecurrentKind.MAMBA1:
            return self.values // tp
        return self.values // tp + 2 * self.groups_of_rank(tp) * self.key_dim

    @property
    def values(self) -> int:
        """Features of all heads together."""
        return self.heads * self.value_dim

    @property
    def keys(self) -> int:
        """Features of the keys of all groups together."""
        return self.groups * self.key_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values; where there is a convolution, its channels: of a Mamba-1 layer the values alone."""
        if self.kind is RecurrentKind.MAMBA1:
            return self.values
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Features that the input projections give: queries, keys, values, their gate, and two numbers of each head.

        A short convolution has values and two gates; lightning attention decays by no number of the input; Kimi delta
        attention has a decay for each channel, and may project both gates by way of a few features; a Mamba-2 layer has
        one number of each head; a Mamba-1 layer has values and their gate.
        """
        if self.kind is RecurrentKind.MAMBA1:
            return 2 * self.values
        if self.kind is RecurrentKind.SHORT_CONVOLUTION:
            return 3 * self.values
        if self.kind is RecurrentKind.LIGHTNING_ATTENTION:
            return self.channels + self.values
        if self.kind is RecurrentKind.KIMI_DELTA_ATTENTION:
            return self.channels + self.heads + 2 * (self.gate_rank or self.values)
        numbers = 1 if self.kind is RecurrentKind.MAMBA2 else 2
        return self.channels + self.values + numbers * self.heads

    @property
    def state_numel(self) -> int:
        """Elements of the state of one sequence, in one layer."""
        return self.heads * self.key_dim * self.value_dim

    def count(self, layers: range) -> int:
        """How many of these layers have a state."""
        return sum(layer in layers for layer in self.layers)
