"""Tensor parallelism: linear layers, embedding and loss whose weights are spread over a process group.

Usable on any process group, without the compiler and without DeepSpeed. With `group=None`, or a group of one, every
layer is its plain counterpart.
"""

from .cross_entropy import vocab_parallel_cross_entropy
from .embedding import VocabParallelEmbedding
from .initialization import draw_slice, master_seed
from .linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from .marking import is_sharded, mark_shard
from .weights import even_range, merge_shards, shard_weight, take_ranges

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "column_parallel",
    "draw_slice",
    "even_range",
    "is_sharded",
    "mark_shard",
    "master_seed",
    "merge_shards",
    "shard_weight",
    "take_ranges",
    "vocab_parallel_cross_entropy",
]
