"""Axolotl's YAML. Source: axolotl at 2026-07-24, `utils/schemas/` and `core/builders/base.py`."""

from __future__ import annotations

from parcompile.backends.kinds import AXOLOTL
from parcompile.backends.reading import Draft, Importer, Source

from .read import reader, with_deepspeed
from .tool import ADAPTER, DATA, METHOD, MODEL, QUANTISED, SAVING, SPEED, TF32, Tool, options

TOOL = Tool(
    name="axolotl",
    model="base_model",
    length="sequence_len",
    names={
        "per_device_train_batch_size": "micro_batch_size",
        "optim": "optimizer",
        "lr_scheduler_type": "lr_scheduler",
    },
    defaults={"per_device_train_batch_size": 1, "lr_scheduler_type": "cosine", "warmup_ratio": 0.03},
    parallel={
        "tp": ("tensor_parallel_size",),
        "cp": ("context_parallel_size", "sequence_parallel_degree"),
        "ep": ("expert_parallel_size",),
    },
    settled={
        DATA: (
            *("datasets", "test_datasets", "pretraining_dataset", "dataset_*", "val_set_size", "sample_packing*"),
            *("eval_sample_packing", "pad_to_*", "dataloader_*", "chat_template*", "special_tokens", "tokens"),
            *("train_on_inputs", "group_by_length", "streaming*", "excess_length_strategy", "min_sample_len"),
            *("shuffle_*", "curriculum_sampling", "eot_tokens", "tokenizer_*", "skip_prepare_dataset", "type"),
            *("added_tokens_overrides", "default_system_message", "remove_unused_columns", "num_epochs"),
            *("roles_to_train", "train_on_eos", "pretrain_multipack_*", "batch_flattening", "eval_sequence_len"),
        ),
        SAVING: (
            *("output_dir", "save_*", "saves_per_epoch", "eval_*", "evals_per_epoch", "logging_*", "wandb_*"),
            *("mlflow_*", "comet_*", "swanlab_*", "trackio_*", "hub_*", "push_*", "use_wandb", "use_tensorboard"),
            *("resume_from_checkpoint", "auto_resume_from_checkpoints", "load_best_model_at_end", "do_bench_eval"),
            *("early_stopping_patience", "include_t*", "profiler_*", "loss_watchdog_*", "do_causal_lm_eval", "hf_*"),
            *("generate_*", "generation_*", "num_generation_samples", "metric_for_best_model", "greater_is_better"),
        ),
        MODEL: (
            *("base_model_*", "model_type", "trust_remote_code", "revision_of_model", "is_*", "resize_*", "plugins"),
            *("attn_implementation", "flash_attention", "sdp_attention", "xformers_attention"),
            *("flex_attention", "eager_attention", "sage_attention", "overrides_of_model_*", "unfrozen_parameters"),
            *("flash_attn_*", "flash_optimum", "s2_attention", "low_cpu_mem_usage", "device_map", "max_memory"),
            *("strict", "reinit_weights", "fix_untrained_tokens", "experts_implementation", "neftune_noise_alpha"),
        ),
        SPEED: (
            *("torch_compile*", "liger_*", "cut_cross_entropy", "chunked_cross_entropy*", "unsloth_*"),
            *("tiled_mlp*", "ddp*", "gc_steps", "torch_empty_cache_steps", "deepcompile", "use_ray", "ray_*"),
            *("gradient_checkpointing_kwargs", "lora_*_kernel", "fsdp_final_state_dict_type", "heads_k_stride"),
        ),
        "activations of the runtime stay on the accelerator": ("activation_offloading", "layer_offloading"),
        ADAPTER: ("adapter", "lora_*", "peft*", "relora*", "merge_lora", "qlora_*", "loraplus_*", "lora_model_dir"),
        TF32: ("tf32",),
        QUANTISED: ("load_in_8bit", "load_in_4bit", "gptq*", "bnb_*", "fp8*", "qat", "quantization", "quantize_*"),
        METHOD: ("rl", "trl", "vllm", "dpo_*", "orpo_*", "kto_*", "simpo_*", "cpo_*", "rl_*", "reward_model", "ebft"),
        "the optimizer of a spec has no such setting": (
            *("optim_args", "optim_target_modules", "embedding_lr*", "lr_groups", "adam_epsilon2", "adam_beta3"),
            *("lr_quadratic_warmup", "cosine_*", "lr_scheduler_kwargs", "lr_div_factor", "dion_*", "qgalore_*"),
        ),
    },
)


def read(source: Source, draft: Draft) -> None:
    """What a spec has a place for."""
    _sharding(source, draft)
    _ring(source, draft)
    if source.given.get("batch_size") is not None:
        source.lose("batch_size", "write gradient_accumulation_steps, which is batch_size / micro_batch_size")
    reader(TOOL)(source, draft)


def _sharding(source: Source, draft: Draft) -> None:
    """FSDP is ZeRO: it shards weights as stage 3 does, and as stage 2 where weights stay gathered after the forward."""
    fsdp = [name for name in source.given if name == "fsdp" or name.startswith(("fsdp_config", "fsdp_version"))]
    if any(source.given[name] for name in fsdp):
        stays = source.given.get("fsdp_config.reshard_after_forward") is False
        draft.set(("zero", "stage"), 2 if stays else 3, said=True)
        for name in fsdp:
            if name in ("fsdp", "fsdp_version", "fsdp_config.reshard_after_forward", "fsdp_config.fsdp_version"):
                source.used[name] = {("zero", "stage")}
            else:
                source.lose(name, "FSDP's own: ZeRO has no such setting")
    shards, replicas = (source.given.get(name) for name in ("dp_shard_size", "dp_replicate_size"))
    sizes = [one for one in (shards, replicas) if isinstance(one, int)]
    if isinstance(shards, int):
        dp = 1
        for size in sizes:
            dp *= size
        draft.set(("parallelism", "dp"), dp, said=True)
        source.used["dp_shard_size"] = {("parallelism", "dp")}
    if isinstance(replicas, int) and replicas > 1:
        source.lose("dp_replicate_size", "the runtime shards over all of dp, not within groups of it")
    elif isinstance(replicas, int):
        source.used["dp_replicate_size"] = {("parallelism", "dp")}


def _ring(source: Source, draft: Draft) -> None:
    kind = source.given.get("ring_attn_func")
    if kind is None:
        return
    found = {"varlen_llama3": "all_gather", "batch_ring": "ring", "batch_zigzag": "ring", "batch_stripe": "ring"}
    layouts = {"batch_ring": "contiguous", "batch_zigzag": "zigzag", "batch_stripe": "striped"}
    if isinstance(kind, str) and kind in found:
        draft.set(("parallelism", "cp_implementation"), found[kind], said=True)
        if kind in layouts:
            draft.set(("parallelism", "cp_layout"), layouts[kind], said=True)
        source.used["ring_attn_func"] = {("parallelism", "cp_implementation")}


IMPORTER = Importer(
    tool="axolotl",
    options=options,
    defaults=lambda: {**TOOL.all_defaults(), "sequence_len": 512},
    read=read,
    tree=lambda document: with_deepspeed(document, AXOLOTL),
)
