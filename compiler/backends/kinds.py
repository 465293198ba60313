"""What a file is, told by its keys: a spec, or another tool's configuration that can be checked on its own."""

from __future__ import annotations

from .megatron.file import is_argument_tree

SPEC, DEEPSPEED, MEGATRON, GPT_NEOX = "spec", "ds_config", "megatron", "gpt_neox"

_SPEC_KEYS = frozenset({"version", "model", "cluster", "parallelism", "training", "zero", "deepspeed"})
_DEEPSPEED_KEYS = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_optimization",
        "zero_optimisation",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "optimizer",
        "scheduler",
        "fp16",
        "bf16",
        "bfloat16",
        "amp",
        "steps_per_print",
        "wall_clock_breakdown",
        "activation_checkpointing",
        "flops_profiler",
        "communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "aio",
        "tensorboard",
        "elasticity",
        "compression_training",
    }
)
NEOX_KEYS = frozenset({"pipe_parallel_size", "model_parallel_size"})
"""Keys that only gpt-neox has; it writes them with hyphens or underscores, and DeepSpeed's beside them."""


def kind_of(tree: object) -> str:
    """The kind of a parsed file. What cannot be told is taken for a spec, whose diagnostics say what is missing."""
    if not isinstance(tree, dict):
        return SPEC
    spec_keys, deepspeed_keys = len(_SPEC_KEYS & tree.keys()), len(_DEEPSPEED_KEYS & tree.keys())
    if spec_keys == 0 and is_argument_tree(tree):
        return MEGATRON
    if spec_keys == 0 and NEOX_KEYS & {str(key).replace("-", "_") for key in tree}:
        return GPT_NEOX
    return DEEPSPEED if deepspeed_keys > spec_keys else SPEC
