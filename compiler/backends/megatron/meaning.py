"""What Megatron-LM makes of its options: several spellings of one thing become one (validate_args)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from parcompile.backends.reading import Undecided

from .model import default_ffn
from .options import line

STANDS_FOR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "recompute_activations": ("recompute_granularity",),
        "use_rotary_position_embeddings": ("position_embedding_type",),
        "group_query_attention": ("num_query_groups",),
        "num_layers_per_virtual_pipeline_stage": ("num_virtual_stages_per_pipeline_rank",),
        "train_samples": ("train_iters",),
        "lr_decay_iters": ("lr_decay_iters", "lr_decay_style"),
        "lr_decay_samples": ("lr_decay_iters", "lr_decay_style"),
        "lr_warmup_samples": ("lr_warmup_iters",),
        "lr_warmup_fraction": ("lr_warmup_iters",),
        "encoder_num_layers": ("num_layers",),
        "encoder_seq_length": ("seq_length",),
        "use_megatron_fsdp": ("use_distributed_optimizer",),
        "use_custom_fsdp": ("use_distributed_optimizer",),
    }
)
"""Options that are another spelling, and those that they set."""


def meaning(given: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every option of the newest version after all that follows from the given ones.

    What hangs on a value that the file does not decide is left as it was given.
    """
    found = {**line().defaults, **given}

    def known(*names: str) -> bool:
        return not any(isinstance(found.get(name), Undecided) or found.get(name) is None for name in names)

    if found.get("recompute_activations") is True:
        found["recompute_granularity"] = "selective"
    if found.get("use_rotary_position_embeddings") is True:
        found["position_embedding_type"] = "rope"
    if found.get("encoder_num_layers") and found.get("num_layers") is None:
        found["num_layers"] = found["encoder_num_layers"]
    if found.get("encoder_seq_length") and found.get("seq_length") is None:
        found["seq_length"] = found["encoder_seq_length"]
    _model(found, known)
    _layout(found, known)
    _length(found, known)
    if found.get("bf16") is True and found.get("grad_reduce_in_bf16") is not True:
        found["accumulate_allreduce_grads_in_fp32"] = True
    for name in ("global", "micro"):
        if found.get(f"eval_{name}_batch_size") is None:
            found[f"eval_{name}_batch_size"] = found.get(f"{name}_batch_size")
    return found


def _model(found: dict[str, Any], known: Any) -> None:
    if found["ffn_hidden_size"] is None and known("hidden_size", "swiglu"):
        found["ffn_hidden_size"] = default_ffn(int(found["hidden_size"]), swiglu=found["swiglu"] is True)
    if found["kv_channels"] is None and known("hidden_size", "num_attention_heads"):
        found["kv_channels"] = int(found["hidden_size"]) // max(1, int(found["num_attention_heads"]))
    if found["group_query_attention"] is False:
        found["num_query_groups"] = found["num_attention_heads"]
    found["num_experts"] = found["num_experts"] or None
    if found["num_experts"] is not None and found["moe_ffn_hidden_size"] is None:
        found["moe_ffn_hidden_size"] = found["ffn_hidden_size"]
    if found["disable_bias_linear"] is False:
        found["add_qkv_bias"] = True
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = found[name]
        found[name] = value[0] if isinstance(value, list) and len(value) == 1 else value
    if found["moe_router_topk_scaling_factor"] is None:
        found["moe_router_topk_scaling_factor"] = 1.0


def _layout(found: dict[str, Any], known: Any) -> None:
    if found["expert_tensor_parallel_size"] is None:
        found["expert_tensor_parallel_size"] = found["tensor_model_parallel_size"]
    if found["tensor_model_parallel_size"] == 1:
        found["sequence_parallel"] = False
    if isinstance(found["cp_comm_type"], str):
        found["cp_comm_type"] = [found["cp_comm_type"]]
    each = "num_layers_per_virtual_pipeline_stage"
    if known(each, "num_layers", "pipeline_model_parallel_size") and found.get(each):
        layers = int(found["num_layers"]) + sum(
            found[f"account_for_{part}_in_pipeline_split"] is True for part in ("embedding", "loss")
        )
        stages = int(found["pipeline_model_parallel_size"]) * int(found[each])
        found["num_virtual_stages_per_pipeline_rank"] = layers // stages if stages and layers % stages == 0 else None
    if found["num_virtual_stages_per_pipeline_rank"] in (None, 1):
        found["num_virtual_stages_per_pipeline_rank"] = None
    if found.get("use_megatron_fsdp") is True or found.get("use_custom_fsdp") is True:
        found["use_distributed_optimizer"] = True


def _length(found: dict[str, Any], known: Any) -> None:
    for samples, iters in (
        ("train_samples", "train_iters"),
        ("lr_decay_samples", "lr_decay_iters"),
        ("lr_warmup_samples", "lr_warmup_iters"),
    ):
        if known(samples, "global_batch_size") and found[samples] and not found[iters]:
            found[iters] = found[samples] / found["global_batch_size"]
    if found["lr_decay_iters"] is None:
        found["lr_decay_iters"] = found["train_iters"]
    if known("lr_warmup_fraction", "lr_decay_iters"):
        found["lr_warmup_iters"] = found["lr_warmup_fraction"] * found["lr_decay_iters"]
