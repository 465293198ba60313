"""LLaMA-Factory's YAML. Source: LLaMA-Factory at 2026-08-18, `hparams/`, and transformers' `TrainingArguments`."""

from __future__ import annotations

from parcompile.backends.kinds import LLAMA_FACTORY, TRAINER
from parcompile.backends.reading import Draft, Importer, Source

from .read import reader, with_deepspeed
from .tool import ADAPTER, DATA, METHOD, MODEL, QUANTISED, SAVING, SPEED, TF32, Tool, options

SAVING_OPTIONS = (
    *("output_dir", "overwrite_output_dir", "save_*", "logging_*", "log_*", "eval_*", "report_to", "run_name"),
    *("plot_loss", "resume_from_checkpoint", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("do_train", "do_eval", "do_predict", "predict_with_generate", "push_to_hub*", "hub_*", "disable_tqdm"),
    *("per_device_eval_batch_size", "include_*", "use_swanlab", "swanlab_*", "compute_accuracy", "project"),
)
SPEED_OPTIONS = (
    *("ddp_*", "torch_compile*", "enable_liger_kernel", "use_liger_kernel", "flash_attn", "use_unsloth*"),
    *("gradient_checkpointing_kwargs", "disable_gradient_checkpointing_of_*", "use_reentrant_gc", "ray_*", "use_ray"),
)
DATA_OPTIONS = (
    *(
        "dataset*",
        "eval_dataset",
        "template",
        "max_samples",
        "preprocessing_*",
        "dataloader_*",
        "streaming",
        "val_size",
    ),
    *("packing", "neat_packing", "overwrite_cache", "media_dir", "tokenized_path", "train_on_prompt", "mask_history"),
    *("num_train_epochs", "buffer_size", "mix_strategy", "interleave_probs", "tool_format", "default_system"),
    *("enable_thinking", "preserve_thinking", "ignore_pad_token_for_loss", "remove_unused_columns", "group_by_length"),
    *("label_names", "data_seed", "average_tokens_across_devices", "train_sampling_strategy", "data_shared_*"),
)
OPTIMIZER_LEFT = {
    "the optimizer of a spec has no such setting": (
        *("optim_args", "optim_target_modules", "lr_scheduler_kwargs", "label_smoothing_factor", "neftune_noise_alpha"),
    )
}

TOOL = Tool(
    name="LLaMA-Factory",
    model="model_name_or_path",
    length="cutoff_len",
    settled={
        DATA: DATA_OPTIONS,
        SAVING: SAVING_OPTIONS,
        MODEL: (
            *("trust_remote_code", "model_revision", "cache_dir", "resize_vocab", "add_tokens", "rope_scaling"),
            *("image_*", "video_*", "audio_*", "freeze_*", "low_cpu_mem_usage", "use_fast_tokenizer", "hf_hub_token"),
            *("adapter_name_or_path", "print_param_status", "shift_attn", "mixture_of_depths", "upcast_*", "infer_*"),
        ),
        SPEED: SPEED_OPTIONS,
        ADAPTER: (
            *("finetuning_type", "lora_*", "additional_target", "create_new_adapter", "use_dora", "use_rslora"),
            *("pissa_*", "loraplus_*", "oft_*", "freeze_trainable_*", "freeze_extra_modules"),
        ),
        TF32: ("tf32",),
        QUANTISED: ("quantization_*", "double_quantization", "export_*", "fp8*"),
        METHOD: ("pref_*", "dpo_*", "kto_*", "simpo_*", "ppo_*", "ref_model*", "reward_model*", "bco_*", "ld_alpha"),
        **OPTIMIZER_LEFT,
    },
)


def read(source: Source, draft: Draft) -> None:
    """What a spec has a place for."""
    if source.given.get("stage") in ("pt", "sft"):
        source.ignore("stage", "both train on the next token; your program masks the labels")
    elif "stage" in source.given:
        source.lose("stage", METHOD)
    if source.given.get("finetuning_type") == "full":
        source.ignore("finetuning_type", "all weights are trained")
    # Its patches switch recomputation on unless they are told not to.
    off = source.given.get("disable_gradient_checkpointing") is True
    draft.set(("training", "activation_checkpointing"), "none" if off else "full", said=True)
    if "disable_gradient_checkpointing" in source.given:
        source.used["disable_gradient_checkpointing"] = {("training", "activation_checkpointing")}
    reader(TOOL)(source, draft)


IMPORTER = Importer(
    tool="LLaMA-Factory",
    options=options,
    defaults=lambda: {**TOOL.all_defaults(), "cutoff_len": 2048},
    read=read,
    tree=lambda document: with_deepspeed(document, LLAMA_FACTORY),
)

_TRAINER = Tool(
    name="transformers' Trainer",
    model="model_name_or_path",
    length="max_length",
    settled={DATA: DATA_OPTIONS, SAVING: SAVING_OPTIONS, SPEED: SPEED_OPTIONS, TF32: ("tf32",), **OPTIMIZER_LEFT},
)
TRAINER_IMPORTER = Importer(
    tool="transformers",
    options=options,
    defaults=_TRAINER.all_defaults,
    read=reader(_TRAINER),
    tree=lambda document: with_deepspeed(document, TRAINER),
)
"""Reads `TrainingArguments` that are given as a file."""
