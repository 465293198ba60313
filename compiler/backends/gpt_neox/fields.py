"""The keys of a gpt-neox configuration: what each takes, and what it does.

The keys of a gpt-neox configuration: fields of its dataclasses, with what `validate_types` takes for each.

fields.json was written by `.ci/generate/gpt_neox_fields.py`, which asked the classes themselves.

`NeoXArgs(**config)` takes no unknown key, and `validate_types` wants the very type of a field: a float may be written
as a whole number, null stands for the default, and the case of a choice does not count.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from parcompile.backends.reading import Account, Effect, Outcome
from parcompile.user_files import shipped

# The keys of a gpt-neox configuration: fields of its dataclasses, with what `validate_types` takes for each.

ANY = "Any"
"""The type of a field that takes everything."""


@dataclass(frozen=True, slots=True)
class Field:
    """A key: the versions that have it, oldest first, and either its types by their Python names or its choices."""

    name: str
    versions: tuple[str, ...]
    types: tuple[str, ...]
    choices: tuple[Any, ...]
    default: Any
    handed_on: bool
    """Whether gpt-neox hands the value on to DeepSpeed, unless it is the default."""

    @property
    def is_current(self) -> bool:
        """Whether the newest version has it."""
        return self.versions[-1] == versions()[-1]


@functools.cache
def _facts() -> dict[str, Any]:
    tree = shipped("parcompile.backends.gpt_neox", "fields.json")
    assert isinstance(tree, dict)
    return tree


@functools.cache
def fields() -> Mapping[str, Field]:
    """Every field that any known version has, by name."""
    return {
        name: Field(
            name,
            tuple(entry["versions"]),
            tuple(entry.get("types", ())),
            tuple(entry.get("choices", ())),
            entry.get("default"),
            bool(entry.get("deepspeed")),
        )
        for name, entry in _facts()["fields"].items()
    }


def versions() -> tuple[str, ...]:
    """The known versions of gpt-neox, oldest first."""
    return tuple(_facts()["versions"])


def deepspeed() -> str:
    """The version of DeepSpeed that the newest one requires."""
    return str(_facts()["deepspeed"])


# What keys of gpt-neox do that have no place in a spec. Every key of the newest version is read or stands here.

_NAMES: Mapping[Effect, str] = MappingProxyType(
    {
        Effect.NUMBERS: """
            apply_query_key_layer_scaling attention_softmax_in_fp32 fp16_lm_cross_entropy fp32_allreduce z_loss
            onnx_safe opt_pos_emb_offset train_impl dpo_beta dpo_fp32 dpo_reference_free kto_beta kto_fp32
            kto_desirable_weight kto_undesirable_weight kl_div_beta kl_impl fp32_reinforce reinforce_leave_one_out
            precompute_model_name soft_prompt_tuning eod_mask_loss num_unique_layers param_sharing_style
            use_bnb_optimizer override_lr_scheduler use_checkpoint_lr_scheduler finetune te_fp8_amax_compute_algo
            te_fp8_amax_history_len te_fp8_format te_fp8_margin te_fp8_mha te_fp8_wgrad curriculum_seqlen
            lr_decay_fraction train_epochs moe_lbl_in_fp32 deepscale deepscale_config deepspeed_extra_args
            pipe_partition_method padded_vocab_size return_logits
            """,
        Effect.SPEED: """
            bias_dropout_fusion layernorm_fusion rmsnorm_fusion rope_fusion scaled_masked_softmax_fusion
            scaled_upper_triang_masked_softmax_fusion use_flashattn_swiglu te_columnparallel te_layernorm_mlp te_mha
            te_rowparallel fused_kernels_build_path distributed_backend use_cpu_initialization synchronize_each_layer
            output_layer_parallelism rotary_save_freqs_buffer
            """,
        Effect.MEMORY: """
            partition_activations checkpoint_in_cpu contiguous_checkpointing checkpoint_num_layers
            deepspeed_activation_checkpointing is_pipe_parallel recompute
            """,
        Effect.DATA: """
            allow_chopped data_impl data_path dataset_impl mmap_warmup num_workers pack_impl short_seq_prob split
            weight_by_num_documents weighted_sampler_alpha use_shared_fs neg_test_data_paths neg_test_label_data_paths
            neg_train_data_paths neg_train_label_data_paths neg_valid_data_paths neg_valid_label_data_paths
            pos_test_data_paths pos_test_label_data_paths pos_train_data_paths pos_train_label_data_paths
            pos_valid_data_paths pos_valid_label_data_paths test_data_paths test_data_weights test_label_data_paths
            test_reward_data_paths train_data_paths train_data_weights train_label_data_paths train_reward_data_paths
            valid_data_paths valid_data_weights valid_label_data_paths valid_reward_data_paths online_dataserver_ips
            online_dataserver_ports s3_chunk_size
            """,
        Effect.TOKENIZER: "tokenizer_type vocab_file merge_file",
        Effect.CHECKPOINTS: """
            checkpoint_factor checkpoint_scale checkpoint_validation_with_forward_pass extra_save_iters iteration
            keep_last_n_checkpoints load no_load_optim no_load_rng no_save_optim no_save_rng s3_path save
            base_shapes_file save_base_shapes
            """,
        Effect.REPORTS: """
            char_level_ppl comet_experiment comet_experiment_name comet_others comet_project comet_tags comet_workspace
            comment coord_check do_test do_train do_valid eval_interval eval_iters eval_results_prefix eval_tasks
            gradient_noise_scale_cpu_offload gradient_noise_scale_n_batches log_dir log_grad_norm log_grad_pct_zeros
            log_gradient_noise_scale log_interval log_optimizer_states log_param_norm memory_profiling
            memory_profiling_path peak_theoretical_tflops profile profile_backward profile_step_start
            profile_step_stop tensorboard_dir use_comet use_wandb wandb_group wandb_host wandb_init_all_ranks
            wandb_project wandb_run_name wandb_team git_hash
            """,
        Effect.OTHER_RUN: """
            maximum_tokens num_samples prompt_end sample_input_file sample_output_file temperature text_gen_type top_k
            top_p serve_model_weights weight_server_port autotuning_run
            """,
        Effect.OTHER_MODEL: """
            dim_att ffn_dim gmlp_attn_dim head_size mamba_causal_conv_fusion mamba_inner_func_fusion
            mamba_selective_fp32_params mamba_selective_scan_fusion mamba_use_bias_in_conv mamba_use_bias_in_linears
            moe_expert_interval moe_jitter_eps moe_router_type moe_top_k mup_attn_temp mup_embedding_mult mup_init_scale
            mup_output_temp mup_rp_embedding_mult mup_width_scale rpe_max_distance rpe_num_buckets scalenorm_epsilon
            sparsity_config
            """,
        Effect.JOB: """
            account adlr_autoresume adlr_autoresume_interval config_files deepspeed_mpi deepspeed_slurm exclude
            exit_interval force_multi global_num_gpus hostfile include launcher lazy_mpu_init local_rank master_addr
            master_port no_ssh_check rank user_script world_size
            """,
    }
)
_OF_NAMES = {name: effect for effect, listed in _NAMES.items() for name in listed.split()}

_DERIVED = frozenset(
    {
        *("batch_size", "clip_grad", "dynamic_loss_scale", "hysteresis", "loss_scale", "loss_scale_window", "lr"),
        *("min_scale", "optimizer_type", "zero_allgather_bucket_size", "zero_contiguous_gradients"),
        *("zero_reduce_bucket_size", "zero_reduce_scatter", "zero_stage"),
    }
)
"""Keys that `calculate_derived` sets from others, whatever a file says."""


def fate(name: str, value: object) -> Account | None:
    """What there is to say of a key that has no place in a spec; None for one that no version has."""
    top = name.partition(".")[0]
    field = fields().get(top)
    if field is None:
        return None
    if not field.is_current:
        return Account(name, Outcome.LOST, f"a key of gpt-neox up to version {field.versions[-1]}")
    if top in _DERIVED:
        return Account(name, Outcome.NO_EFFECT, "gpt-neox derives it from other keys")
    if name == top and value == field.default and type(value) is type(field.default):
        return Account(name, Outcome.NO_EFFECT, "it is gpt-neox's own default")
    effect = _OF_NAMES.get(top)
    return None if effect is None else effect.account(name)
