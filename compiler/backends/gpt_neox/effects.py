"""What an option of gpt-neox does that has no place in a spec: by its class, or by its name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from parcompile.backends.reading import Account, Outcome

from .options import options

_NUMBERS = "it changes the numbers of a run, and a spec has no word for it"
_MEMORY = "it changes memory, time or placement, not numbers; a plan decides this itself"
_SPEED = "it chooses between implementations of the same computation"
_DATA = "data belongs to the training script"
_TOKENIZER = "the tokenizer belongs to the training script"
_CHECKPOINTS = "checkpoints belong to the training script"
_REPORTS = "logs and evaluations of the run belong to the training script"
_JOB = "how the job is started belongs to the launcher"
_OTHER_RUN = "it belongs to generation or to another kind of training"
_NO_LOSS = frozenset({_SPEED, _DATA, _TOKENIZER, _CHECKPOINTS, _REPORTS, _JOB})

_GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "NeoXArgsDeepspeedRunner": _JOB,
        "NeoXArgsLogging": _REPORTS,
        "NeoXArgsTextgen": _OTHER_RUN,
        "NeoXArgsTokenizer": _TOKENIZER,
        "NeoXArgsModel": _NUMBERS,
        "NeoXArgsMoE": _NUMBERS,
        "NeoXArgsLRScheduler": _NUMBERS,
        "NeoXArgsOptimizer": _NUMBERS,
        "NeoXArgsTraining": _NUMBERS,
        "NeoXArgsParallelism": _MEMORY,
        "NeoXArgsDeepspeedConfig": _MEMORY,
        "NeoXArgsOther": _NUMBERS,
    }
)
"""What all options of a class do, unless their name stands below."""
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        name: effect
        for effect, names in {
            _SPEED: """layernorm_fusion rmsnorm_fusion scaled_upper_triang_masked_softmax_fusion rope_fusion
                scaled_masked_softmax_fusion bias_dropout_fusion fused_kernels_build_path use_cpu_initialization
                use_flashattn_swiglu distributed_backend lazy_mpu_init output_layer_parallelism num_workers
                deepspeed_activation_checkpointing synchronize_each_layer zero_reduce_scatter onnx_safe
                rotary_save_freqs_buffer""",
            _MEMORY: "partition_activations checkpoint_in_cpu contiguous_checkpointing profile_backward zero_stage",
            _DATA: """data_path data_impl dataset_impl split mmap_warmup pack_impl allow_chopped train_data_paths
                valid_data_paths test_data_paths label_data_paths train_label_data_paths valid_label_data_paths
                test_label_data_paths train_data_weights valid_data_weights test_data_weights
                weight_by_num_documents weighted_sampler_alpha use_shared_fs s3_path s3_chunk_size""",
            _TOKENIZER: "vocab_file merge_file",
            _CHECKPOINTS: """save load checkpoint_factor checkpoint_scale extra_save_iters save_iters no_save_optim
                no_save_rng keep_last_n_checkpoints checkpoint_validation_with_forward_pass config_files""",
            _REPORTS: "eval_interval eval_iters exit_interval do_test do_train do_valid char_level_ppl log_dir",
            _JOB: """user_script deepspeed_mpi deepspeed_slurm global_num_gpus local_rank rank iteration deepspeed
                adlr_autoresume adlr_autoresume_interval world_size is_pipe_parallel""",
            _OTHER_RUN: """train_impl dpo_beta dpo_fp32 dpo_reference_free kto_beta kto_fp32 kto_desirable_weight
                kto_undesirable_weight kl_impl kl_div_beta reinforce_leave_one_out fp32_reinforce""",
        }.items()
        for name in names.split()
    }
)


def effect(name: str) -> str | None:
    """What an option does; None for one that no version has."""
    if name in _NAMES:
        return _NAMES[name]
    facts = options().get(name)
    return None if facts is None else _GROUPS[facts[-1].group]


def fate(name: str, value: object) -> Account | None:
    """What there is to say of an option that the table does not speak of; None for one that no version has."""
    found = effect(name.partition(".")[0])
    if found is None:
        return None
    facts = options().get(name)
    if facts is not None and value == facts[-1].default and type(value) is type(facts[-1].default):
        return Account(name, Outcome.NO_EFFECT, "it is gpt-neox's own default")
    return Account(name, Outcome.NO_EFFECT if found in _NO_LOSS else Outcome.LOST, found)
