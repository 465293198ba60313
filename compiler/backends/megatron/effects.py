"""What an option of Megatron-LM does that has no place in a spec: by its group, or by its name.

Every option is classified, so that an import can say of each what it means that it is not carried. One that nobody has
classified counts as lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from parcompile.backends.reading import Account, Effect, Outcome

from .arguments import line
from .write import ROWS

_GROUPS: Mapping[str, Effect] = MappingProxyType(
    {
        "profiling": Effect.REPORTS,
        "rl": Effect.OTHER_RUN,
        "checkpointing": Effect.CHECKPOINTS,
        "validation": Effect.REPORTS,
        "data and dataloader": Effect.DATA,
        "tokenizer": Effect.TOKENIZER,
        "autoresume": Effect.JOB,
        "biencoder": Effect.OTHER_MODEL,
        "vision": Effect.OTHER_MODEL,
        "heterogeneous architecture": Effect.OTHER_MODEL,
        "experimental_attention_variant": Effect.OTHER_MODEL,
        "logging": Effect.REPORTS,
        "opentelemetry": Effect.REPORTS,
        "Logits Distillation": Effect.NUMBERS,
        "straggler": Effect.REPORTS,
        "workload inspector": Effect.REPORTS,
        "inference": Effect.OTHER_RUN,
        "one logger": Effect.REPORTS,
        "In-process restart": Effect.JOB,
        "ft_package": Effect.JOB,
        "rerun engine": Effect.JOB,
        "msc": Effect.DATA,
        "sft": Effect.DATA,
        "fault injector": Effect.REPORTS,
        "distributed init": Effect.MEMORY,
        "distributed": Effect.MEMORY,
        "kitchen": Effect.NUMBERS,
        "retro": Effect.OTHER_MODEL,
        "experimental": Effect.NUMBERS,
        "mixed precision": Effect.NUMBERS,
        "regularization": Effect.NUMBERS,
        "Transformer-Engine": Effect.NUMBERS,
        "RNG and initialization": Effect.NUMBERS,
        "initialization": Effect.NUMBERS,
        "learning rate and weight decay": Effect.NUMBERS,
        "learning rate": Effect.NUMBERS,
        "moe": Effect.NUMBERS,
        "mla": Effect.NUMBERS,
    }
)
"""What all options of a group do, unless their name stands below."""

_NAMES: Mapping[Effect, str] = MappingProxyType(
    {
        Effect.NUMBERS: """
            fp32_residual_connection attention_softmax_in_fp32 apply_query_key_layer_scaling softmax_type
            glu_linear_offset
            activation_func_clamp_value qk_clip qk_clip_alpha qk_clip_threshold qk_l2_norm attention_output_gate
            calculate_per_token_loss embedding_init_method_std mtp_num_layers mtp_loss_scaling_factor
            mtp_use_repeated_layer mtp_detach_heads mtp_hsm fp8_format fp8_recipe fp8_margin fp8_amax_history_len
            fp8_amax_compute_algo no_fp8_wgrad fp8_output_proj fp8_interval fp8_quantizer_factory first_last_layers_bf16
            num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4_format fp4_recipe fp4_quantizer_factory
            disable_bf16_reduced_precision_matmul moe_router_dtype moe_router_force_load_balancing
            moe_router_force_biased moe_router_quantile_balancing_ema moe_input_jitter_eps
            moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_apply_probs_on_input
            moe_enable_routing_replay moe_dispatch_fwd_dtype moe_combine_bwd_dtype moe_expert_rank_capacity_factor
            moe_router_padding_for_quantization moe_router_padding_for_fp8 use_kitchen_attention
            kitchen_attention_backend use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult
            mup_base_head_dim mup_attn_scale_power no_clone_scatter_output_in_embedding rampup_batch_size
            step_batch_size_schedule decrease_batch_size_if_needed iterations_to_skip result_rejected_tracker_filename
            no_position_embedding openai_gelu onnx_safe relative_attention_num_buckets relative_attention_max_distance
            apply_residual_connection_post_layernorm no_check_for_nan_in_loss_and_grad deterministic_mode
            override_opt_param_scheduler use_checkpoint_opt_param_scheduler freeze_all_layers padded_vocab_size
            no_pad_vocab_size vocab_extra_ids reset_position_ids reset_attention_mask eod_mask_loss fim_data fim_rate
            fim_spm_rate no_load_rng finetune data_parallel_random_init use_mcore_models no_initialization
            dataloader_inter_document_masking no_create_attention_mask_in_dataloader ddp_average_in_collective
            ddp_reduce_scatter_with_fp32_accumulation gtp_remat_reduce_scatter_with_fp32_accumulation
            ddp_param_name_patterns_for_fp32_local_accumulation no_gradient_reduce_div_fusion use_checkpoint_args
            pretrained_checkpoint load mask_factor symmetric_ar_type sample_rate train_samples
            """,
        Effect.SPEED: """
            attention_backend flash_attention_version use_flash_attn transformer_impl no_masked_softmax_fusion
            no_bias_swiglu_fusion no_bias_dropout_fusion no_rope_fusion no_persist_layer_norm
            no_gradient_accumulation_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl moe_grouped_gemm
            moe_token_dispatcher_type moe_permute_fusion moe_router_fusion use_fused_weighted_squared_relu
            fused_residual_rmsnorm use_transformer_engine_op_fuser use_te_activation_func use_mcore_models
            use_legacy_models distributed_backend use_cpu_initialization disable_jit_fuser te_rng_tracker
            inference_rng_tracker moe_use_legacy_grouped_gemm use_grouped_gemm_for_shared_expert
            use_grouped_gemm_for_dense_mlp manual_gc manual_gc_interval no_manual_gc_eval dataloader_type num_workers
            empty_unused_memory_level no_mmap_bin_files use_ring_exchange_p2p mlp_chunks_for_training
            """,
        Effect.MEMORY: """
            use_precision_aware_optimizer tp_comm_overlap no_tp_comm_bulk_wgrad no_tp_comm_bulk_dgrad
            no_tp_comm_overlap_ag no_tp_comm_overlap_rs tp_comm_overlap_rs_dgrad no_tp_comm_split_ag no_tp_comm_split_rs
            tp_comm_bootstrap_backend tp_comm_overlap_cfg overlap_moe_expert_parallel_comm delay_wgrad_compute
            overlap_dispatch_backward_with_experts_wgrad ep_overlap_early_attn_memory_release
            defer_embedding_wgrad_compute wgrad_deferral_limit overlap_p2p_communication_warmup_flush mtp_standalone
            cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers distribute_saved_activations
            recompute_modules high_priority_a2a_comm_stream moe_shared_expert_overlap moe_layer_recompute
            init_model_with_meta_device pipeline_model_parallel_comm_backend tensor_parallel_num_weight_shards
            expert_tensor_parallel_num_weight_shards max_seqlen_per_dp_cp_rank hybrid_context_parallel
            optimizer_cpu_offload optimizer_cuda_graph optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
            overlap_cpu_optimizer_d2h_h2d no_pin_cpu_grads no_pin_cpu_params fine_grained_activation_offloading
            offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph
            delta_offload_bytes_across_pp_ranks activation_offload_fraction
            fine_grained_offloading_max_inflight_offloads
            moe_enable_deepep moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep
            moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms moe_deepep_num_sms
            moe_hybridep_num_sms
            moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing
            moe_ncclep_zero_copy gtp_remat_opt_in_modules moe_use_grouped_tensor moe_single_grouped_weight
            moe_single_grouped_bias moe_shared_expert_glu_interleave_size moe_mlp_glu_interleave_size moe_paged_stash
            moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu
            enable_cuda_graph cuda_graph_warmup_steps external_cuda_graph cuda_graph_impl cuda_graph_scope
            cuda_graph_modules megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
            fsdp_db_use_persist_buf_on_alloc_fail reuse_grad_buf_for_mxfp8_param_ag fp8_param_gather fp4_param_gather
            no_yarn_correction_range_round_to_int
            """,
        Effect.CHECKPOINTS: """
            save save_interval save_params_interval save_activations_interval save_tokens_per_expert_interval
            save_wgrads_interval save_dgrads_interval save_retain_interval ckpt_format async_save no_save_optim
            no_save_rng no_load_optim moe_use_upcycling moe_upcycling_granularity
            """,
        Effect.REPORTS: """
            config_logger_dir check_weight_hash_across_dp_replicas_interval gpu_sniff_test_interval
            train_sync_interval check_for_large_grads moe_per_layer_logging dump_param_to_param_group_map
            log_max_attention_logit eval_iters eval_interval start_eval_at_iter skip_train test_mode
            """,
        Effect.JOB: """
            exit_interval exit_duration_in_mins exit_signal_handler exit_signal exit_signal_handler_for_dataloader
            exit_signal_handler_for_training distributed_timeout_minutes local_rank lazy_mpu_init
            distributed_timeout_seconds_after_init flight_recorder_dump_path flight_recorder_trace_buffer_size
            no_flight_recorder_dump_on_timeout flight_recorder_include_stack_trace
            no_flight_recorder_include_only_active no_flight_recorder_extra_dump_on_exec fake_process_group
            enable_experimental
            """,
        Effect.DATA: "data_path split mock_data",
        Effect.OTHER_RUN: """
            flash_decode batch_invariant_mode batch_invariant_backend nccl_all_reduce_for_prefill
            inference_cuda_graph_scope inference_fuse_tp_communication inference_disable_triton_nvls_kernels
            inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
            inference_moe_token_dispatcher_type
            moe_pad_experts_for_cuda_graph_inference mlp_chunks_for_prefill cache_mla_latents
            """,
        Effect.OTHER_MODEL: """
            dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq
            dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_kernel_backend
            dsa_indexer_rope_interleaved no_dsa_indexer_rotate_activation no_dsa_indexer_scoring_relu
            dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 linear_conv_kernel_dim linear_key_head_dim
            linear_value_head_dim linear_num_key_heads linear_num_value_heads enable_mhc_connections
            mhc_num_residual_streams mhc_sinkhorn_iterations mhc_init_gating_factor mhc_recompute_layer_num
            mrope_section is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
            gdp_num_householder disable_mamba_mem_eff_path gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute
            moe_latent_size experimental_attention_variant mtp_hybrid_override_pattern encoder_num_layers
            decoder_num_layers bert_no_binary_head window_attn_skip_freq no_rope_freq spec hybrid_layer_pattern
            hybrid_override_pattern mamba_training_ssm_states_dtype decoder_seq_length encoder_seq_length mask_prob
            short_seq_prob
            """,
    }
)
"""What single options do, where their group does not say it or says something else."""
_OF_NAMES = {name: effect for effect, listed in _NAMES.items() for name in listed.split()}

CARRIED = frozenset(name for row in ROWS for name in (row.options if hasattr(row, "options") else (row.option,)))
"""Options that the table speaks of."""


def effect(name: str) -> Effect | None:
    """What an option does; None for one that nobody has classified."""
    if name in _OF_NAMES:
        return _OF_NAMES[name]
    option = line().options.get(name)
    return None if option is None else _GROUPS.get(option.newest.group)


_UNCHANGED = frozenset(("recompute_granularity", "recompute_method", "recompute_num_layers", "sequence_parallel"))


def changes(name: str) -> bool:
    """Whether another value of an option of the table gives other numbers."""
    return name not in _UNCHANGED and effect(name) in (None, Effect.NUMBERS, Effect.OTHER_MODEL)


def fate(name: str, value: object) -> Account | None:
    """What there is to say of an option that the table does not speak of; None for one that no version has."""
    option = line().options.get(name)
    if option is None:
        return None
    found = effect(name)
    if found is None:
        return Account(name, Outcome.LOST, "a spec has no such key")
    if value == option.default and type(value) is type(option.default):
        return Account(name, Outcome.NO_EFFECT, "it is Megatron-LM's own default")
    return found.account(name)
