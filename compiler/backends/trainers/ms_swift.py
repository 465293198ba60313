"""ms-swift: `swift sft`, whose arguments are the Trainer's, and `megatron sft`, whose are Megatron-LM's beside a model.

Source: ms-swift at 2026-08-22, `arguments/`, `trainers/arguments.py`, `megatron/arguments/megatron_args.py`, `config/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.backends.kinds import SWIFT
from parcompile.backends.megatron.over_model import read_megatron, settle, typed
from parcompile.backends.reading import Draft, Importer, Source, SpecPath, Undecided
from parcompile.backends.recipes import flattened
from parcompile.text import Document
from parcompile.text.typed import integer, word

from .llama_factory import DATA_OPTIONS, OPTIMIZER_LEFT, SAVING_OPTIONS, SPEED_OPTIONS
from .read import read_model, reader, with_deepspeed
from .tool import ADAPTER, CHANGING, DATA, METHOD, MODEL, QUANTISED, SAVING, SPEED, Tool, options

TOOL = Tool(
    name="ms-swift",
    model="model",
    length="max_length",
    defaults={
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": None,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine",
        "gradient_checkpointing": True,
    },
    parallel={"tp": ("deepspeed_autotp_size",), "cp": ("sequence_parallel_size",)},
    settled={
        METHOD: (
            *("rlhf_type", "beta", "rpo_alpha", "loss_type", "reward_*", "num_generations", "vllm_*", "use_vllm"),
            *("enable_dft_loss", "loss_scale", "task_type", "num_labels", "problem_type", "max_completion_length"),
            *("teacher_*", "lmbda", "ref_*", "seq_kd", "epsilon*", "temperature", "router_aux_loss_coef", "gkd_*"),
            *(
                "sleep_level",
                "offload_*",
                "move_model_batches",
                "overlong_filter",
                "num_iterations",
                "top_*",
                "async_g*",
            ),
            *("steps_per_generation", "generation_batch_size", "importance_sampling_level", "dynamic_sample", "tau_*"),
            *("multi_turn_scheduler", "max_turns", "use_gym_env", "gym_env", "sft_alpha", "scale_rewards", "kl_in_*"),
            *("advantage_estimator", "desirable_weight", "undesirable_weight", "center_rewards_*", "delta", "fipo_*"),
            *("chord_*", "stop_words", "response_length", "loss_weights", "--loss_scale", "max_model_len"),
        ),
        DATA: (
            *DATA_OPTIONS,
            *("val_dataset*", "split_dataset_ratio", "load_from_cache_file", "system", "padding_free", "columns"),
            *(
                "agent_template",
                "add_non_thinking_prefix",
                "cached_*",
                "lazy_tokenize",
                "truncation_strategy",
                "data_*",
            ),
            *("max_pixels", "strict", "interleave_prob", "shuffle_buffer_size", "custom_*", "external_plugins"),
            *("group_by_length", "use_chat_template", "response_prefix", "max_new_tokens", "norm_bbox", "padding_side"),
        ),
        SAVING: (
            *SAVING_OPTIONS,
            *("model_author", "model_name", "create_checkpoint_symlink", "add_version", "wandb_*", "use_ray", "ray_*"),
            *("no_save_*", "no_load_*", "finetune", "merge_lora", "safe_serialization", "save*", "load_args", "exit_*"),
            *(
                "tensorboard_*",
                "async_save",
                "use_flash_ckpt",
                "ENV.*",
                "wandb*",
                "use_hf",
                "no_log_*",
                "ckpt_dir",
                "check_model",
                "early_*",
            ),
        ),
        MODEL: (
            *("model_type", "attn_impl", "freeze_*", "new_special_tokens", "rope_scaling", "resume_*", "device_map"),
            *("trainable_parameters*", "init_strategy", "adapters", "vit_*", "aligner_*", "model_kwargs", "hf_*"),
        ),
        SPEED: (
            *SPEED_OPTIONS,
            "attention_backend",
            "use_cce",
            "use_logits_to_keep",
            "experts_impl",
            "gradient_accumulation_fusion",
        ),
        ADAPTER: (
            "lora_*",
            "target_*",
            "modules_to_save",
            "use_galore",
            "galore_*",
            "use_swift_lora",
            "init_weights",
            "tuner_*",
            "use_dora",
        ),
        QUANTISED: ("quant_*", "bnb_*", "fp8_*", "load_in_*"),
        **OPTIMIZER_LEFT,
        "the optimizer of a spec has no such setting": ("optimizer", "optim_args", "lr_scheduler_kwargs", "muon_*"),
    },
)
_ZERO: Mapping[str, Any] = {f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)} | {
    f"zero{stage}_offload": {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    for stage in (2, 3)
}
"""DeepSpeed configurations that ms-swift has by name, but for values that the Trainer fills in and sizes of buffers."""
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_PRECISION: SpecPath = ("training", "precision")
_RANKS = {"nnodes": ("cluster", "nodes"), "nproc_per_node": ("cluster", "gpus_per_node")}
_FSDP = {"fsdp2": 3}


def _tree(document: Document) -> dict[str, Any]:
    tree: dict[str, Any] = dict(document.tree) if isinstance(document.tree, Mapping) else {}
    if isinstance(name := tree.get("deepspeed"), str) and name in _ZERO:
        return {**tree, "deepspeed": _ZERO[name]}
    return with_deepspeed(document, SWIFT)


def _options(tree: Mapping[str, Any]) -> dict[str, Any]:
    found = {_RENAMED.get(name, name): value for name, value in options(tree).items()}
    for name, variable in (("nproc_per_node", "ENV.NPROC_PER_NODE"), ("nnodes", "ENV.NNODES")):
        if variable in found:
            found[name] = found.pop(variable)
    return {"tuner_type": "lora", **found}


_RENAMED = {"train_type": "tuner_type", "sft_type": "tuner_type"}


def _read_common(source: Source, draft: Draft) -> None:
    """What both programs have: how they are started, the method, the type of the weights."""
    for name, path in _RANKS.items():
        draft.carry(source, name, path, integer)
    if source.given.get("command", "sft") in ("sft", "pt"):
        source.ignore("command", "both train on the next token; your program masks the labels")
    else:
        source.lose("command", METHOD, changes=True)
    if source.given["tuner_type"] == "full":
        source.ignore("tuner_type", "all weights are trained")
    else:
        source.lose("tuner_type", ADAPTER, changes=True)
    switched = [name for name in ("bf16", "fp16") if source.given.get(name) is True]
    kind = _PRECISIONS.get(str(source.given.get("torch_dtype")))
    draft.values.pop(_PRECISION, None)
    if switched or kind:
        draft.set(_PRECISION, switched[0] if switched else kind, said=True)
    else:
        draft.ask(_PRECISION, "ms-swift takes it from the model's config.json")
    for name in (*switched, *(["torch_dtype"] if kind else [])):
        source.used[name] = {_PRECISION}


def _rate(source: Source, draft: Draft, name: str) -> None:
    """ms-swift's own rate where none is given (`_init_override`)."""
    if not source.has(name):
        draft.set(("training", "optimizer", "lr"), 1e-5 if source.given["tuner_type"] == "full" else 1e-4, said=True)


def _read(source: Source, draft: Draft) -> None:
    reader(TOOL)(source, draft)
    if not source.has("gradient_accumulation_steps"):
        why = "ms-swift takes 16 sequences / per_device_train_batch_size / ranks"
        draft.ask(("training", "gradient_accumulation_steps"), why)
    if source.has("fsdp") and word(source.given["fsdp"], "fsdp") in _FSDP:
        draft.carry(source, "fsdp", ("zero", "stage"), lambda value, _name: _FSDP[value])
    _rate(source, draft, "learning_rate")
    _read_common(source, draft)


IMPORTER = Importer(
    tool="ms-swift",
    options=_options,
    defaults=TOOL.all_defaults,
    read=_read,
    tree=_tree,
)
"""Reads YAML, scripts and args.json of `swift sft`."""

_MEGATRON_DEFAULTS: Mapping[str, Any] = {
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "recompute_granularity": "selective",
    "seed": 42,
    "lr_decay_style": "cosine",
    "min_lr": 0.0,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "use_distributed_optimizer": True,
    "expert_tensor_parallel_size": 1,
}
_OF_MEGATRON = {
    "max_length": "seq_length",
    "loss_scale": "--loss_scale",  # weights of tokens; Megatron-LM's scales fp16
    "max_steps": "train_iters",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}


def _megatron_options(tree: Mapping[str, Any]) -> dict[str, Any]:
    found = {_OF_MEGATRON.get(name, name): value for name, value in _options(flattened(tree, ())).items()}
    return {name: typed(name, value) for name, value in found.items() if value != "none"}


def _read_megatron(source: Source, draft: Draft) -> None:
    read_model("model", source, draft)
    if not source.has("train_iters"):
        answered = draft.answers.get(("training", "train_steps"))
        source.given["train_iters"] = answered or Undecided("", "the number of samples")
    read_megatron(source, draft)
    _rate(source, draft, "lr")
    _read_common(source, draft)
    # Gradients of bf16 weights are summed in fp32 (`_init_mixed_precision`).
    draft.set(("training", "gradient_accumulation_dtype"), "fp32", said=True)
    for name in list(source.unread()):
        if (why := TOOL.reason(name)) is not None:
            source.lose(name, why, changes=why in CHANGING)
    settle(source)


MEGATRON_IMPORTER = Importer(
    tool="Megatron-SWIFT",
    options=_megatron_options,
    defaults=lambda: _MEGATRON_DEFAULTS,
    read=_read_megatron,
)
"""Reads YAML, scripts and args.json of `megatron sft`."""
