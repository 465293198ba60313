"""Tensor parallelism: linear layers, embedding and loss whose weights are spread over a process group.

Usable on any process group, without the compiler and without DeepSpeed. With `group=None`, or a group of one, every
layer is its plain counterpart.
"""

from .columns import ColumnParallelLinear, column_parallel, share_input
from .cross_entropy import vocab_parallel_cross_entropy
from .dropout import ParallelDropout, rank_random
from .embedding import VocabParallelEmbedding
from .initialization import draw_slice, master_seed
from .marking import is_sharded, mark_shard
from .norm import SequenceParallelLayerNorm, SequenceParallelRMSNorm
from .partial import sum_gradients, sum_partial_gradients
from .replicas import ReplicasDifferError, check_replicated, watch_replicas
from .rows import RowParallelLinear
from .weights import even_range, merge_ranges, merge_shards, shard_weight, take_ranges

__all__ = [
    "ColumnParallelLinear",
    "ParallelDropout",
    "ReplicasDifferError",
    "RowParallelLinear",
    "SequenceParallelLayerNorm",
    "SequenceParallelRMSNorm",
    "VocabParallelEmbedding",
    "check_replicated",
    "column_parallel",
    "draw_slice",
    "even_range",
    "is_sharded",
    "mark_shard",
    "master_seed",
    "merge_ranges",
    "merge_shards",
    "rank_random",
    "shard_weight",
    "share_input",
    "sum_gradients",
    "sum_partial_gradients",
    "take_ranges",
    "vocab_parallel_cross_entropy",
    "watch_replicas",
]
