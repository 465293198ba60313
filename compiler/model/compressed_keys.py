"""Keys that stand for whole windows of tokens, beside those of single tokens in a sliding window (DeepSeek-V4).

A compressor makes one key, which is the value too, of each `rate` tokens: a mean by weights that it learns for each
feature. With two series a key stands for the window before, too. A few light heads may choose among these keys.

Source: transformers models/deepseek_v4/modeling_deepseek_v4.py (DeepseekV4HCACompressor, DeepseekV4CSACompressor,
DeepseekV4Indexer).
"""

from __future__ import annotations

from dataclasses import dataclass

from . import FROZEN, Cut

WORDS = "compressed KV, some chosen by an indexer"
"""What distinguishes a type that has them."""
STORED = (
    (r"\.self_attn\.compressor\.indexer\.scorer\.weights_proj\.", ".attn.indexer.weights_proj."),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj\.", ".attn.indexer.wq_b."),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
)
"""What published files call the weights of a choice: patterns of the model's names, and their names there."""


@dataclass(frozen=True, slots=True)
class KeyChoice:
    """What chooses among compressed keys, by smaller keys of its own for the same windows."""

    heads: int
    head_dim: int
    top_k: int

    def numel(self, hidden: int, query_rank: int) -> int:
        """Elements of its weights that multiply each token."""
        return query_rank * self.heads * self.head_dim + hidden * (4 * self.head_dim + self.heads)


@dataclass(frozen=True, slots=True)
class CompressedKeys:
    """What the compressor of a layer makes."""

    rate: int
    """Tokens of a window."""
    series: int = 1
    """Vectors that a token gives to keys: 2 where it gives one to the key of the next window, too."""
    choice: KeyChoice | None = None

    def count(self, sequence_length: int) -> int:
        """Compressed keys of a sequence: tokens behind the last whole window are in none."""
        return sequence_length // self.rate

    def cut(self, module: str) -> Cut | None:
        """All ranks have to choose the same keys."""
        return FROZEN if module.startswith("compressor.indexer.") else None

    def forward_flops(self, hidden: int, query_rank: int, sequence_length: int) -> float:
        """Operations of the choice among them for a token, without a gradient: every key is scored."""
        if self.choice is None:
            return 0.0
        scored = self.count(sequence_length) * self.choice.heads * (self.choice.head_dim + 1)
        return 2.0 * (self.choice.numel(hidden, query_rank) + scored)

    def numel(self, hidden: int, head_dim: int) -> int:
        """Elements of the compressor's weights that multiply each token, without that of a choice."""
        return 2 * self.series * head_dim * hidden


@dataclass(frozen=True, slots=True)
class LowRank:
    """Projections of queries, and of what attention gives, through fewer features."""

    query_rank: int
    output_groups: int
    """Groups of heads, each projected on its own before all are projected together."""
    output_rank: int
    """Features of a group between both projections."""

    def numel(self, hidden: int, heads: int, head_dim: int) -> int:
        """Elements of the weights of queries and outputs that multiply each token."""
        wide = heads * head_dim
        return self.query_rank * (hidden + wide) + self.output_rank * (wide + self.output_groups * hidden)
