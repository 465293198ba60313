"""Keys of other tools' configurations: the places that they have in a spec, and why some have none."""

from __future__ import annotations

Path = tuple[str, ...]

NAMES: dict[str, Path] = {
    **{
        name: ("model", target)
        for name, target in {
            "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "num_attention_heads": "num_attention_heads",
            "num_query_groups": "num_key_value_heads",
            "num_kv_heads": "num_key_value_heads",
            "ffn_hidden_size": "intermediate_size",
            "intermediate_size": "intermediate_size",
            "kv_channels": "head_dim",
            "vocab_size": "vocab_size",
            "max_position_embeddings": "max_position_embeddings",
            "rotary_base": "rope_theta",
            "rotary_emb_base": "rope_theta",
            "norm_epsilon": "rms_norm_eps",
            "rms_norm_epsilon": "rms_norm_eps",
            "init_method_std": "initializer_range",
        }.items()
    },
    "nnodes": ("cluster", "nodes"),
    "nproc_per_node": ("cluster", "gpus_per_node"),
    "tensor_model_parallel_size": ("parallelism", "tp"),
    "model_parallel_size": ("parallelism", "tp"),
    "context_parallel_size": ("parallelism", "cp"),
    "pipeline_model_parallel_size": ("parallelism", "pp"),
    "pipe_parallel_size": ("parallelism", "pp"),
    "expert_model_parallel_size": ("parallelism", "ep"),
    "sequence_parallel": ("parallelism", "sequence_parallel"),
    **{
        name: ("parallelism", name)
        for name in (
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "num_virtual_stages_per_pipeline_rank",
            "microbatch_group_size_per_virtual_pipeline_stage",
        )
    },
    "decoder_first_pipeline_num_layers": ("parallelism", "num_layers_in_first_pipeline_stage"),
    "decoder_last_pipeline_num_layers": ("parallelism", "num_layers_in_last_pipeline_stage"),
    "make_vocab_size_divisible_by": ("parallelism", "make_vocab_size_divisible_by"),
    "seq_length": ("training", "sequence_length"),
    "global_batch_size": ("training", "global_batch_size"),
    "train_batch_size": ("training", "global_batch_size"),
    "micro_batch_size": ("training", "micro_batch_size"),
    "train_micro_batch_size_per_gpu": ("training", "micro_batch_size"),
    "eval_global_batch_size": ("training", "eval_global_batch_size"),
    "eval_micro_batch_size": ("training", "eval_micro_batch_size"),
    "gradient_accumulation_steps": ("training", "gradient_accumulation_steps"),
    "data_types.grad_accum_dtype": ("training", "gradient_accumulation_dtype"),
    "fp16.loss_scale": ("training", "loss_scale"),
    "loss_scale": ("training", "loss_scale"),
    "clip_grad": ("training", "gradient_clipping"),
    "gradient_clipping": ("training", "gradient_clipping"),
    "train_iters": ("training", "train_steps"),
    "seed": ("training", "seed"),
    "lr": ("training", "optimizer", "lr"),
    "optimizer.params.lr": ("training", "optimizer", "lr"),
    "adam_eps": ("training", "optimizer", "eps"),
    "optimizer.params.eps": ("training", "optimizer", "eps"),
    "weight_decay": ("training", "optimizer", "weight_decay"),
    "optimizer.params.weight_decay": ("training", "optimizer", "weight_decay"),
    "optimizer.params.betas": ("training", "optimizer", "betas"),
    "zero_optimization.stage": ("zero", "stage"),
}
"""Keys whose value a spec has under another name; inner keys are dotted."""

DECIDED = {
    "data_path": "data belongs to the training script",
    "data_impl": "data belongs to the training script",
    "split": "data belongs to the training script",
    "tokenizer_type": "the tokenizer belongs to the training script",
    "tokenizer_model": "the tokenizer belongs to the training script",
    "save": "checkpoints belong to the training script",
    "load": "checkpoints belong to the training script",
    "save_interval": "checkpoints belong to the training script",
    "lr_decay_style": "a spec has schedules with a warm-up of 2 steps or more: constant, linear, cosine",
    "min_lr": "there is no schedule that falls to it",
    "lr_warmup_iters": "a warm-up has 2 steps or more and belongs to a schedule",
    "lr_warmup_init": "a warm-up starts at min_lr",
    "lr_decay_iters": "a schedule ends with the training steps",
    "expert_tensor_parallel_size": "experts are cut over tp as the rest is",
    "cp_comm_type": "a spec has one implementation for all layers: p2p, all_gather, a2a or a2a+p2p",
    "hierarchical_context_parallel_sizes": "a spec has two levels, with cp_comm_type a2a+p2p",
    "attention_dropout": "a spec has no dropout",
    "hidden_dropout": "a spec has no dropout",
}
"""Why some keys have no place in a spec."""
