"""What transformers' Trainer and accelerate make of "auto", by their own code."""

from __future__ import annotations

import copy
import types
from typing import Any

HIDDEN_SIZE = 64


def filled(tree: dict[str, Any], filler: str, *, world: int, steps: int) -> dict[str, Any]:
    """A configuration as DeepSpeed gets it from `filler` ("transformers" or "accelerate").

    Raises:
        ValueError: the filler refuses it.
    """
    config = copy.deepcopy(tree)
    if filler == "transformers":
        config = _by_trainer(config, world, steps)
    return _by_accelerate(config, world, steps)


def _value(tree: Any, *path: str, default: Any) -> Any:
    for step in path:
        tree = tree.get(step) if isinstance(tree, dict) else None
    return default if tree is None or tree == "auto" else tree


def _by_trainer(config: dict[str, Any], world: int, steps: int) -> dict[str, Any]:
    """The Trainer, told the values that the file gives, so that only what it cannot fill is refused."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    betas = _value(config, "optimizer", "params", "betas", default=[0.9, 0.999])
    micro = _value(config, "train_micro_batch_size_per_gpu", default=1)
    accumulated = _value(config, "gradient_accumulation_steps", default=1)
    rate = _value(
        config,
        "optimizer",
        "params",
        "lr",
        default=_value(config, "scheduler", "params", "warmup_max_lr", default=1e-4),
    )
    given = types.SimpleNamespace(
        world_size=world,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulated,
        max_grad_norm=_value(config, "gradient_clipping", default=1.0),
        learning_rate=rate,
        adam_beta1=betas[0] if isinstance(betas, list) and betas else 0.9,
        adam_beta2=betas[1] if isinstance(betas, list) and len(betas) > 1 else 0.999,
        adam_epsilon=_value(config, "optimizer", "params", "eps", default=1e-8),
        weight_decay=_value(config, "optimizer", "params", "weight_decay", default=0.0),
        save_on_each_node=False,
        fp16=bool(_value(config, "fp16", "enabled", default=False)),
        fp16_full_eval=False,
        bf16=bool(_value(config, "bf16", "enabled", default=False)),
        bf16_full_eval=False,
        get_warmup_steps=lambda _total: _value(config, "scheduler", "params", "warmup_num_steps", default=10),
    )
    holder = HfTrainerDeepSpeedConfig(config)
    holder.trainer_config_process(given)
    model = types.SimpleNamespace(config=types.SimpleNamespace(hidden_size=HIDDEN_SIZE))
    # Other numbers in the file than in the arguments are the user's to mend; they are no fault of the file.
    holder.mismatches = []
    total = _value(config, "scheduler", "params", "total_num_steps", default=steps)
    holder.trainer_config_finalize(given, model, total)
    return holder.config  # type: ignore[no-any-return]


def _by_accelerate(config: dict[str, Any], world: int, steps: int) -> dict[str, Any]:
    """What Accelerator.prepare makes of its plugin's configuration, for DummyOptim and DummyScheduler."""
    from accelerate.utils.dataclasses import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config=config)
    half = "no" if any(_value(config, kind, "enabled", default=False) for kind in ("fp16", "bf16")) else "bf16"
    plugin.set_mixed_precision(half)
    micro = (
        1 if plugin.is_auto("train_micro_batch_size_per_gpu") else plugin.get_value("train_micro_batch_size_per_gpu")
    )
    plugin.fill_match("gradient_accumulation_steps", must_match=False, gradient_accumulation_steps=1)
    known: dict[str, Any] = {
        "gradient_clipping": 1.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        "zero_optimization.reduce_bucket_size": HIDDEN_SIZE * HIDDEN_SIZE,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * HIDDEN_SIZE * HIDDEN_SIZE),
        "zero_optimization.stage3_param_persistence_threshold": 10 * HIDDEN_SIZE,
        "optimizer.params.lr": 1e-4,
        "optimizer.params.weight_decay": 0.0,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": 1e-4,
        "scheduler.params.warmup_num_steps": 10,
        "scheduler.params.total_num_steps": steps,
    }
    if micro is not None:
        known["train_micro_batch_size_per_gpu"] = micro
        if isinstance(micro, int):
            known["train_batch_size"] = micro * plugin.get_value("gradient_accumulation_steps") * world
    plugin.deepspeed_config_process(must_match=False, **known)
    return plugin.deepspeed_config  # type: ignore[no-any-return]
