"""Tensor parallelism: linear layers, embedding and loss whose weights are spread over a process group.

Usable on any process group, without the compiler and without DeepSpeed. With `group=None`, or a group of one, every
layer is its plain counterpart.
"""

from .columns import ColumnParallelLinear, RowParallelLinear, column_parallel
from .cross_entropy import linear_cross_entropy, vocab_parallel_cross_entropy
from .divergence import vocab_parallel_entropy, vocab_parallel_kl_divergence
from .embedding import VocabParallelEmbedding
from .partial import (
    draw_slice,
    even_range,
    is_sharded,
    mark_shard,
    master_seed,
    merge_ranges,
    sum_in_backward,
    take_ranges,
)

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "column_parallel",
    "draw_slice",
    "even_range",
    "is_sharded",
    "linear_cross_entropy",
    "mark_shard",
    "master_seed",
    "merge_ranges",
    "sum_in_backward",
    "take_ranges",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_kl_divergence",
]
