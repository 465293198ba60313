"""The dimensions of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int | None
    """None: queries are projected at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: the part without and the part with rotary position."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
