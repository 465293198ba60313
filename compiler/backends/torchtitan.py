"""torchtitan_config.py: a configuration function for torchtitan, which has no configuration files.

torchtitan 0.3 takes its configuration from a Python function that `--module` and `--config` name. The written module
has two: `apply` changes any configuration into the plan's layout, batch, optimizer and schedule; `plan` does so with
torchtitan's own configuration of the model, where it has that model.
"""

from __future__ import annotations

from typing import Any

from parcompile.layout.sequence import CpImplementation, CpLayout
from parcompile.plan import Plan
from parcompile.spec import LrScheduler, Precision, Spec

from .artefacts import Loss, header, order_loss, sequence_loss

VERSION = "0.3.0"
"""Version of torchtitan whose configuration classes were read and ran with what is written here."""

FLAVORS: dict[str, tuple[str, str]] = {
    "llama-3.1-8b": ("llama3", "llama3_8b"),
    "llama-3.1-70b": ("llama3", "llama3_70b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
    "qwen3-1.7b": ("qwen3", "qwen3_1_7b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
}
"""Presets that torchtitan has a configuration for, as a model and a function of its `config_registry`: those whose
parameters are as many there as here."""

_ORDERS = (("tp", "cp", "dp", "pp"),)
_TEMPLATE = '''{header}
"""The plan as a torchtitan {version} configuration.

    torchrun … -m torchtitan.train --module torchtitan_config --config plan
"""

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC


def apply(config):
    """Changes a `Trainer.Config` into the plan's layout, batch, optimizer and schedule."""
    config.parallelism = ParallelismConfig(
{parallelism}
    )
{settings}
    return config
'''
_MODEL = '''

def plan():
    """torchtitan's configuration of {preset} with the plan applied."""
    from torchtitan.models.{module}.config_registry import {function}

    return apply({function}())
'''


def files(plan: Plan) -> dict[str, str]:
    """torchtitan_config.py."""
    spec = plan.spec
    rows = "\n".join(f"        {name}={value!r}," for name, value in _parallelism(spec).items())
    settings = "\n".join(f"    config.{name} = {value}" for name, value in _settings(spec).items())
    about = f"Written for torchtitan {VERSION}; apply() is the plan, plan() the plan with torchtitan's own model."
    text = _TEMPLATE.format(header="\n".join(header(plan, about)), version=VERSION, parallelism=rows, settings=settings)
    flavor = FLAVORS.get(spec.model.source)
    if flavor is not None:
        text += _MODEL.format(preset=spec.model.source, module=flavor[0], function=flavor[1])
    return {"torchtitan_config.py": text}


def _parallelism(spec: Spec) -> dict[str, Any]:
    axes = spec.parallelism
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": axes.dp,
        "fsdp_reshard_after_forward": "always" if spec.zero_stage == 3 else "never",
        "context_parallel_degree": axes.cp,
        "tensor_parallel_degree": axes.tp,
        "enable_sequence_parallel": axes.sequence_parallel,
        "pipeline_parallel_degree": axes.pp,
        "expert_parallel_degree": axes.ep,
    }
    if axes.cp > 1:
        found["context_parallel_load_balancer"] = "headtail"
    if axes.pp > 1:
        interleaved = axes.num_virtual_stages_per_pipeline_rank > 1
        found["pipeline_parallel_schedule"] = "Interleaved1F1B" if interleaved else "1F1B"
        found["pipeline_parallel_microbatch_size"] = spec.training.micro_batch_size
    return found


def _settings(spec: Spec) -> dict[str, str]:
    """Further attributes of the configuration, each as Python source."""
    training, optimizer = spec.training, spec.training.optimizer
    # A pipeline cuts the batch of a rank into its micro-batches; without one torchtitan accumulates gradients.
    passes = training.gradient_accumulation_steps if spec.parallelism.pp > 1 else 1
    precision = "float32" if training.precision is Precision.FP32 else "bfloat16"
    arguments = {
        "lr": optimizer.lr,
        "betas": optimizer.betas,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
    adamw = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    recompute = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
    found = {
        "training.local_batch_size": repr(training.micro_batch_size * passes),
        "training.global_batch_size": repr(training.global_batch_size),
        "training.seq_len": repr(training.sequence_length),
        "training.max_norm": repr(training.gradient_clipping or float("inf")).replace("inf", 'float("inf")'),
        # Weights, sums and optimizer states are fp32 here as in the plan; the precision is that of a layer's work.
        "training.dtype": repr("float32"),
        "training.mixed_precision_param": repr(precision),
        "optimizer": f"default_adamw({adamw})",
        "lr_scheduler": _schedule(training.lr_scheduler, optimizer.lr, training.train_steps),
        # One for all stages: `losses` refuses others.
        "activation_checkpoint": recompute[str(training.activation_checkpointing)],
        "debug.seed": repr(training.seed),
    }
    if training.train_steps is not None:
        found["training.steps"] = repr(training.train_steps)
    return found


def _schedule(schedule: LrScheduler | None, lr: float, train_steps: int | None) -> str:
    if schedule is None or schedule.type in ("constant", "inverse_sqrt"):
        steps = 0 if schedule is None else schedule.warmup_steps
        return f"LRSchedulersContainer.Config(warmup_steps={steps}, decay_ratio=0.0)"
    floor = schedule.min_lr / lr
    shape, share = schedule.type, ""
    if schedule.decay_steps is not None and train_steps is not None:
        shape, share = str(schedule.decay_type), f"decay_ratio={schedule.decay_steps / train_steps!r}, "
    shape = "linear" if shape == "exponential" else shape
    settings = f"warmup_steps={schedule.warmup_steps}, {share}decay_type={shape!r}, min_lr_factor={floor!r}"
    return f"LRSchedulersContainer.Config({settings})"


def losses(plan: Plan) -> list[Loss]:
    """What torchtitan does not do as the plan says."""
    spec, shape = plan.spec, plan.spec.model.shape
    parallelism, training = spec.parallelism, spec.training
    found = order_loss(parallelism, "torchtitan", _ORDERS) + sequence_loss(spec, "torchtitan")
    if not shape.attends:
        name = f"model_type {shape.model_type}"
        found.append(Loss(name, "torchtitan has no model without attention", "another target", fatal=True))
    if shape.num_key_value_heads % parallelism.tp:
        found.append(
            Loss(
                f"num_key_value_heads {shape.num_key_value_heads} on tp {parallelism.tp}",
                "torchtitan does not replicate kv heads",
                "choose a tp that divides them",
                fatal=True,
            )
        )
    if parallelism.folds_experts:
        found.append(
            Loss(
                f"expert_tp {parallelism.expert_tp} beside tp {parallelism.tp}",
                "the emitted configuration has no tensor parallelism of its own for experts",
                "leave expert_tp out",
                fatal=True,
            )
        )
    if parallelism.pp > 1 and shape.tie_word_embeddings:
        found.append(Loss("tied embeddings with pp", "torchtitan refuses them", "pp 1", fatal=True))
    if training.precision is Precision.FP16:
        found.append(Loss("precision fp16", "torchtitan has bfloat16 and float32", "precision bf16", fatal=True))
    if training.optimizer.type == "adam":
        found.append(Loss("optimizer adam", "torchtitan's default is AdamW", "weight_decay 0, or adamw"))
    if (schedule := training.lr_scheduler) is not None:
        if schedule.warmup_steps and schedule.warmup_start_lr > 0:
            why = "torchtitan's warm-up starts at lr / warmup_steps"
            found.append(Loss("warm-up from a first rate", why, "it starts there"))
        if schedule.type == "inverse_sqrt":
            why = "torchtitan has no such schedule: the rate stays after the warm-up"
            found.append(Loss("lr_scheduler inverse_sqrt", why, "another type"))
        if schedule.decay_type == "exponential":
            why = "torchtitan's falls are linear, sqrt and cosine: linear is written"
            found.append(Loss("decay_type exponential", why, "one of these"))
    if len({len(stage.layers) for stage in spec.stages}) > 1 or parallelism.num_virtual_stages_per_pipeline_rank > 1:
        found.append(
            Loss(
                "pipeline stages", "torchtitan deals its layers to stages itself", "set its pipeline_parallel_* options"
            )
        )
    if parallelism.cp > 1 and parallelism.cp_layout is not CpLayout.ZIGZAG:
        found.append(
            Loss(
                f"cp_layout {parallelism.cp_layout.value}",
                "its load balancers are headtail (zigzag) and, for flex attention, ptrr",
                "headtail is used: the same numbers up to the order of sums",
            )
        )
    if parallelism.cp > 1 and parallelism.cp_implementation is not CpImplementation.ALL_GATHER:
        found.append(
            Loss(
                f"cp_implementation {parallelism.cp_implementation.value}",
                "no option names it: torch gathers all keys",
                "all-gather is used: the same numbers, more memory for keys",
            )
        )
    if spec.zero_stage in (0, 1):
        found.append(
            Loss(
                f"zero.stage {spec.zero_stage}",
                "FSDP shards gradients and weights as well (fsdp_reshard_after_forward never: like stage 2)",
                "less memory, more communication; the numbers of a step are the same up to the order of sums",
            )
        )
    if (rate := training.moe_router_bias_update_rate) is not None:
        found.append(
            Loss(f"moe_router_bias_update_rate {rate}", "it is load_balance_coeff of a model's own arguments", "set it")
        )
    if not isinstance(training.activation_checkpointing, str):
        found.append(
            Loss(
                f"activation_checkpointing {', '.join(training.activation_checkpointing)}",
                "activation_checkpoint of torchtitan is that of every stage",
                "compile with one word for all stages",
                fatal=True,
            )
        )
    if training.activation_checkpointing == "selective":
        found.append(
            Loss("activation_checkpointing selective", "torchtitan chooses the operations by itself", "its SelectiveAC")
        )
    if shape.vocab_size != plan.tensors()[next(iter(plan.tensors()))][1].full_shape[0]:
        found.append(Loss("padded vocabulary", "torchtitan does not pad", "uneven shards of the embedding"))
    if spec.model.source not in FLAVORS:
        found.append(
            Loss(f"model {spec.model.source}", "torchtitan has no configuration of it", "call apply() on one of yours")
        )
    found.append(Loss("data", "the spec does not name it", "the configuration of torchtitan's model names c4"))
    return found
