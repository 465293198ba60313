"""At which ZeRO stages DeepSpeed reads a key of zero_optimization; rules of specs and of files ask here.

`tests/compiler/test_zero_stages.py` reads the same from the code of the installed DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_STAGES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "offload_param",
                "sub_group_size",
                "param_persistence_threshold",
                "model_persistence_threshold",
                "max_live_parameters",
                "max_reuse_distance",
                "prefetch_bucket_size",
                "gather_16bit_weights_on_model_save",
                "module_granularity_threshold",
                "use_all_reduce_for_fetch_params",
                "allgather_sequential",
                "memory_efficient_linear",
                "pipeline_loading_checkpoint",
                "override_module_apply",
                "log_trace_cache_warnings",
                "enable_sanity_checks",
                "save_muon_momentum_buffer_in_memory",
                "zero_hpz_partition_size",
                "zero_quantized_weights",
                "zero_quantized_nontrainable_weights",
                "zero_quantized_gradients",
                "zeropp_loco_param",
                "mics_shard_size",
                "mics_hierarchical_params_gather",
                "leaf_module",
            ),
            (3, 3),
        ),
        **dict.fromkeys(
            (
                "offload_optimizer",
                "contiguous_gradients",
                "reduce_scatter",
                "reduce_bucket_size",
                "overlap_comm",
                "load_from_fp32_weights",
                "elastic_checkpoint",
                "legacy_stage1",
            ),
            (1, 3),
        ),
        **dict.fromkeys(
            (
                "round_robin_gradients",
                "use_multi_rank_bucket_allreduce",
                "ignore_unused_parameters",
                "parameter_alignment",
                "allgather_bucket_size",
                "compute_grad_norm",
            ),
            (1, 2),
        ),
    }
)
"""First and last stage at which DeepSpeed 0.19.8 reads a key (runtime/engine.py, runtime/zero)."""

UNREAD = frozenset({"allgather_partitions"})
"""What DeepSpeed 0.19.8 takes and reads at no stage."""

MEMORY = frozenset({"offload_param", "offload_optimizer", "zero_hpz_partition_size", "zero_quantized_weights"})
"""Keys whose users count on what they save."""


def first_stage(key: str) -> int:
    """The first stage at which a key has an effect; 0 when it always has."""
    return _range(key)[0]


def last_stage(key: str) -> int:
    """The last one, mostly 3."""
    return _range(key)[1]


def has_effect(key: str, stage: int) -> bool:
    """Whether DeepSpeed reads a key at a stage."""
    return key not in UNREAD and first_stage(key) <= stage <= last_stage(key)


def _range(key: str) -> tuple[int, int]:
    return (3, 3) if key.startswith("stage3_") else _STAGES.get(key, (0, 3))


def reach(key: str) -> str:
    """The stages at which a key has an effect, as "from stage 3 on" or "at stages 1 and 2"."""
    if key in UNREAD:
        return "at no stage"
    first, last = _range(key)
    return f"at stages {first} and {last}" if last < 3 and first else f"from stage {first} on"
