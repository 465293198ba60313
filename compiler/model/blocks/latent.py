"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of few features.

Hidden states are projected to a latent vector, of which each head makes its keys and values, beside a part of the key
with rotary position that all heads share. Queries may come of a latent vector of their own. Heads of queries and keys
have another width than those of values.

Source: transformers models/deepseek_v3/modeling_deepseek_v3.py (DeepseekV3Attention).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .block import Size

PARTIAL_STYLES = ("mla_kv_a_proj",)
"""How transformers' own tensor-parallel plans call a projection whose gradient each rank has in part."""


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Its sizes."""

    q_lora_rank: int | None
    """None: queries are projected at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def query_rank(self) -> int:
        """Of the latent vector of queries; 0: they come of hidden states."""
        return self.q_lora_rank or 0

    @property
    def key_dim(self) -> int:
        """The part without and the part with rotary position."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def value_dim(self) -> int:
        """Without a position."""
        return self.v_head_dim

    def matmul_parameters(self, hidden: int, heads: int, gate: int, *, gated_queries: bool) -> int:
        """Of the attention, those that multiply each token; `gate` values of each head gate what it gives."""
        queries, rank, gates = heads * self.key_dim, self.q_lora_rank, heads * gate
        found = hidden * queries if rank is None else rank * (hidden + queries)
        found += hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
        # A gate of the queries comes of the latent vector with and without its norm.
        found += rank * (queries + 2 * gates) if gated_queries and rank is not None else hidden * gates
        keys_values = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return found + keys_values + heads * self.v_head_dim * hidden

    def small_windows(self, heads: int) -> Mapping[str, Any]:
        """Keys of a small model of so many heads, of layers with a window: a list of kinds says which choose keys."""
        sizes = {**asdict(self), "head_dim": self.key_dim, "num_attention_heads": heads, "num_key_value_heads": heads}
        return {"use_dsa": None, **{f"swa_{name}": value for name, value in sizes.items()}}


@dataclass(frozen=True, slots=True)
class Latent:
    """Defaults of its keys. The query rank may be None: queries are not compressed."""

    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int | None = 128
    """None: hidden_size / num_attention_heads."""

    def read(self, config: Mapping[str, Any], width: int, size: Size) -> MlaShape:
        """The sizes that a configuration describes, whose hidden size is so many features for each head."""
        defaults = {**asdict(self), "v_head_dim": self.v_head_dim or width}
        # A width of 0 is one that the family has not, and refuses to be given.
        sizes = {name: default and size(name, default) for name, default in defaults.items() if name != "q_lora_rank"}
        at_once = config.get("q_lora_rank", self.q_lora_rank) is None
        return MlaShape(q_lora_rank=None if at_once else size("q_lora_rank", self.q_lora_rank), **sizes)
