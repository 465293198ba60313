"""The kinds of layers that carry a state along the sequence."""

from __future__ import annotations

import enum


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
