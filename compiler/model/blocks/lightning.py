"""Lightning attention: S ← λ S + k vᵀ, read as Sᵀ q, with a fixed decay λ of each head (arXiv 2501.08313, section 2.2).

Operations of a token and head, forward: 4 K V + 2 c (K + V), c tokens at once (`block_size`); 2 K V more where a token
reads of a received state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from parcompile.model import Part

from .block import Size, Small
from .recurrent import Columns, Recurrent, RecurrentTraits

_BLOCK = 16
"""Tokens of a small model's block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lightning(Recurrent):
    """Its sizes."""

    kind: ClassVar[str] = "lightning attention"

    def chunk_of(self, length: int) -> int:
        """Nothing is filled up."""
        return min(self.chunk, length)

    def columns(self) -> Columns:
        """A head has its query, its key and its value one after the other; a norm is over all heads together."""
        values = (Part(self.values, self.groups),)
        return {"qkv_proj": (Part(self.channels, self.groups),), "output_gate": values, "norm": values}

    def flops_per_token(self, *, carried: bool) -> float:
        """In blocks."""
        states = self.key_dim * self.value_dim * (6 if carried else 4)
        return float(self.heads * (states + 2 * self.chunk * (self.key_dim + self.value_dim)))

    def small_sizes(self, small: Small) -> Mapping[str, Any]:  # noqa: ARG002
        """Short blocks; heads are those of attention."""
        return {"block_size": min(self.chunk, _BLOCK)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningTraits(RecurrentTraits):
    """As many heads as attention has."""

    kind: ClassVar[type[Recurrent]] = Lightning

    def sizes_of(self, config: Mapping[str, Any], size: Size) -> dict[str, Any]:  # noqa: ARG002
        """Of attention."""
        heads = size("num_attention_heads", 32)
        width = size("head_dim", size("hidden_size", 1) // heads)
        sizes = {"heads": heads, "groups": heads, "key_dim": width, "value_dim": width}
        return {**sizes, "chunk": size("block_size", 256), "groups_key": "num_attention_heads"}
