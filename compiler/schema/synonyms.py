"""What other tools call the keys and values of a spec.

The names are those of Megatron-LM, DeepSpeed, Transformers, vLLM, torchtitan, nanotron and gpt-neox.
A user who brings a name from there is told the name here. Names are compared without case, `-` and `_`.
"""

from __future__ import annotations

import functools

from parcompile.diagnostics.diagnostic import closest

_SPEC_KEYS: dict[str, tuple[str, ...]] = {
    "model.preset": ("model_name", "model_name_or_path", "name_or_path", "pretrained", "model_id", "base_model"),
    "model.hf_config": ("hf_config_path", "config_path", "hf_path"),
    "model.hidden_size": ("d_model", "n_embd", "dim", "embedding_size", "model_dim"),
    "model.num_hidden_layers": ("num_layers", "n_layers", "n_layer", "layers"),
    "model.num_attention_heads": ("n_heads", "n_head", "num_heads", "heads"),
    "model.num_key_value_heads": ("num_query_groups", "n_kv_heads", "num_kv_heads", "kv_heads"),
    "model.intermediate_size": ("ffn_hidden_size", "ffn_dim", "d_ff", "n_inner"),
    "model.vocab_size": ("padded_vocab_size", "n_vocab", "vocabulary_size"),
    "model.max_position_embeddings": ("n_positions", "n_ctx", "max_sequence_length"),
    "cluster.nodes": ("num_nodes", "nnodes", "n_nodes", "node_count"),
    "cluster.gpus_per_node": ("gpus", "num_gpus", "nproc_per_node", "ngpus_per_node", "devices", "gpu_per_node"),
    "cluster.accelerator": ("gpu", "gpu_type", "device", "hardware"),
    "parallelism.tp": (
        "tensor",
        "tensor_parallel",
        "tensor_parallel_size",
        "tensor_parallel_degree",
        "tensor_model_parallel",
        "tensor_model_parallel_size",
        "model_parallel",
        "model_parallel_size",
        "mp",
        "mp_size",
        "tp_size",
        "tp_degree",
    ),
    "parallelism.cp": (
        "context",
        "context_parallel",
        "context_parallel_size",
        "context_parallel_degree",
        "cp_size",
        "ring",
        "ring_size",
        "ring_degree",
        "sp",
        "sp_size",
        "sequence_parallel_size",
        "sequence_parallel_degree",
    ),
    "parallelism.pp": (
        "pipeline",
        "pipe",
        "pipeline_parallel",
        "pipeline_parallel_size",
        "pipeline_parallel_degree",
        "pipeline_model_parallel_size",
        "pipe_parallel_size",
        "pp_size",
        "num_stages",
        "stages",
    ),
    "parallelism.dp": (
        "data",
        "data_parallel",
        "data_parallel_size",
        "data_parallel_degree",
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "dp_size",
        "replicas",
    ),
    "parallelism.ep": (
        "expert",
        "expert_parallel",
        "expert_parallel_size",
        "expert_model_parallel_size",
        "expert_parallel_degree",
        "ep_size",
        "moe_expert_parallel_size",
    ),
    "parallelism.order": ("rank_order", "axis_order", "mesh_order", "parallel_order"),
    "parallelism.sequence_parallel": ("megatron_sp", "use_sequence_parallel", "tp_sequence_parallel"),
    "parallelism.cp_layout": ("context_parallel_layout", "ring_layout", "cp_sharding", "load_balance"),
    "parallelism.cp_implementation": (
        "cp_comm_type",
        "context_parallel_implementation",
        "attention_implementation",
        "cp_comm_strategy",
        "context_parallel_rotate_method",
        "cp_backend",
        "ring_implementation",
    ),
    "parallelism.hierarchical_cp_sizes": (
        "hierarchical_context_parallel_sizes",
        "cp_sizes",
        "ulysses_size",
        "ulysses_degree",
        "ring_degree",
        "inner_ranks",
    ),
    "training.sequence_length": (
        "seq_length",
        "seq_len",
        "seqlen",
        "sequence_len",
        "max_seq_len",
        "max_length",
        "block_size",
    ),
    "training.global_batch_size": ("train_batch_size", "batch_size", "gbs", "total_batch_size"),
    "training.micro_batch_size": (
        "train_micro_batch_size_per_gpu",
        "per_device_train_batch_size",
        "per_device_batch_size",
        "micro_batch",
        "mbs",
        "local_batch_size",
    ),
    "training.gradient_accumulation_steps": (
        "gas",
        "grad_accum",
        "grad_acc_steps",
        "gradient_accumulation",
        "batch_accumulation_per_replica",
        "accumulate_grad_batches",
    ),
    "training.precision": ("dtype", "torch_dtype", "mixed_precision", "params_dtype", "bf16", "fp16"),
    "training.gradient_accumulation_dtype": ("grad_accum_dtype", "accumulate_grad_in_fp32", "grad_reduce_dtype"),
    "training.optimizer": ("optim", "optimiser"),
    "training.optimizer.type": ("optimizer_type", "optimizer_name"),
    "training.optimizer.lr": ("learning_rate", "max_lr"),
    "training.optimizer.betas": ("adam_betas", "beta", "adam_beta"),
    "training.optimizer.eps": ("epsilon", "adam_eps", "adam_epsilon"),
    "training.optimizer.weight_decay": ("wd", "decay"),
    "training.gradient_clipping": ("clip_grad", "max_grad_norm", "grad_clip", "gradient_clip_val", "max_norm"),
    "training.linear_cross_entropy": ("fused_linear_cross_entropy", "cut_cross_entropy", "chunked_cross_entropy"),
    "training.activation_checkpointing": (
        "recompute",
        "recompute_granularity",
        "gradient_checkpointing",
        "activation_recomputation",
        "checkpoint_activations",
        "ac",
    ),
    "training.router": ("moe", "routing", "moe_router"),
    "training.router.aux_loss": ("moe_aux_loss_coeff", "router_aux_loss_coef", "aux_loss_coef"),
    "training.router.aux_loss_scope": ("moe_router_load_balancing_type", "load_balancing_type"),
    "training.router.z_loss": ("moe_z_loss_coeff", "router_z_loss_coef", "z_loss_coef"),
    "training.router.bias_update_rate": ("moe_router_bias_update_rate", "load_balance_coeff"),
    "training.train_steps": ("steps", "max_steps", "train_iters", "total_steps", "num_steps", "iterations"),
    "training.seed": ("random_seed", "manual_seed"),
    "training.loss_scale": ("initial_loss_scale", "static_loss_scale"),
    "zero": ("zero_optimization", "zero_optimisation", "zero_config", "zero1"),
    "zero.stage": ("zero_stage", "level"),
    "cluster.host_memory_gib": ("host_memory", "cpu_memory", "ram", "ram_gib"),
    "zero.offload_optimizer": ("offload", "cpu_offload", "offload_optimizer_device", "optimizer_cpu_offload"),
    "deepspeed": ("ds", "ds_config", "deepspeed_config"),
    "parallelism": ("parallel", "parallelisation", "mesh", "layout", "distributed"),
    "training": ("train", "trainer", "train_config"),
    "cluster": ("hardware_config", "machines", "resources", "world"),
}

_DS_KEYS: dict[str, tuple[str, ...]] = {
    "zero_optimization": ("zero", "zero_optimisation", "zero_config"),
    "train_batch_size": ("global_batch_size", "batch_size"),
    "train_micro_batch_size_per_gpu": ("micro_batch_size", "per_device_train_batch_size", "micro_batch_size_per_gpu"),
    "gradient_accumulation_steps": ("gas", "grad_accum", "gradient_accumulation"),
    "gradient_clipping": ("clip_grad", "max_grad_norm", "grad_clip", "gradient_clip_val"),
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half"),
    "activation_checkpointing": ("gradient_checkpointing",),
    "optimizer": ("optim", "optimiser"),
    "scheduler": ("lr_scheduler",),
    "wall_clock_breakdown": ("wall_clock",),
}

_VALUES: dict[str, tuple[str, ...]] = {
    "bf16": ("bfloat16", "bf16-mixed", "torch.bfloat16"),
    "fp16": ("float16", "half", "16", "16-mixed", "torch.float16"),
    "fp32": ("float32", "float", "full-precision", "32", "torch.float32"),
    "adamw": ("fused_adamw", "adamw_torch", "adamw_torch_fused"),
    "zigzag": ("balanced", "load_balanced", "symmetric"),
    "contiguous": ("naive", "plain", "sequential", "block"),
    "full": ("full_recompute",),
    "none": ("off", "false", "no", "disabled"),
    "selective": ("attention", "selective_op"),
}

_GUESSES: dict[str, tuple[str, ...]] = {
    "h100-sxm": ("h100", "h100-sxm5", "h100-80gb", "h100-sxm-80gb"),
    "a100-80gb": ("a100", "a100-sxm", "a100-sxm4-80gb"),
    "b200": ("blackwell",),
    "mi300x": ("mi300",),
}


@functools.lru_cache(maxsize=4096)
def bare(name: str) -> str:
    """`name` without case and separators, for comparing."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def _inverted(table: dict[str, tuple[str, ...]]) -> dict[str, str]:
    return {bare(other): name for name, others in table.items() for other in others}


_KEYS = {"spec": _inverted(_SPEC_KEYS), "ds_config": _inverted(_DS_KEYS)}
_EXACT_VALUES = _inverted(_VALUES)
_ALL_VALUES = {**_EXACT_VALUES, **_inverted(_GUESSES)}


def known_key(schema: str, key: str) -> str | None:
    """The dotted path that another tool's `key` has under `schema`."""
    return _KEYS.get(schema, {}).get(bare(key))


def known_value(value: str) -> str | None:
    """The value here that another tool calls `value`."""
    return _ALL_VALUES.get(bare(value))


def is_exact(value: str) -> bool:
    """Whether another tool's `value` means one value here ("h100" may be an SXM or a PCIe card)."""
    return bare(value) in _EXACT_VALUES


def near_key(schema: str, key: str) -> str | None:
    """The dotted path under `schema` for a misspelt key of another tool."""
    table = _KEYS.get(schema, {})
    near = closest(key, table)
    return None if near is None else table[near]
