"""YAMLs of axolotl, shrunken: in one process as they are, and by a plan with its plug-in."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import torch
import yaml
from axolotl.integrations.base import BasePlugin
from closeness import Margin, margins
from families import tiny_config
from training_runs import initial_model, make_plan
from trl_runs import tokenizer

from parcompile.backends.trainers.write import axolotl_layout
from parcompile.plan import Plan, plan_tree
from parcompile.runtime.local import LocalWorld

LENGTH = 64
QUIET = {
    "AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
NOT_HERE = (
    *("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "plugins", "qat", "load_in_8bit", "load_in_4bit", "tf32"),
    *("attn_implementation", "flash_attention", "tokenizer_type", "model_type", "base_model_config", "resume_from"),
    *("use_ray", "ray_num_workers", "hub_model_id", "chat_template", "tokens", "dataset_prepared_path", "resize_token"),
    *("resume_from_checkpoint", "auto_resume_from_checkpoints", "trust_remote_code", "save_safetensors", "eval_table"),
    *("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_model_dir", "lora_modules_to_save", "debug"),
    *(
        "gradient_checkpointing_kwargs",
        "torch_compile",
        "use_kernels",
        "experts_implementation",
        "quantize_moe_experts",
    ),
    *("saves_per_epoch", "loss_watchdog_threshold", "loss_watchdog_patience", "use_tensorboard", "max_steps"),
    *("dp_shard_size", "tensor_parallel_size", "context_parallel_size", "activation_offloading", "use_wandb"),
    *("early_stopping_patience", "eval_table_size", "eval_max_new_tokens", "resize_token_embeddings_to_32x"),
    *("do_causal_lm_eval", "eval_causal_lm_metrics"),
    # In one process the balancing loss of experts stands in the log, and no gradient of it reaches the adapters.
    "model_config",
    *("activation_checkpointing", "fused_attn_kernel", "include_tokens_per_second", "expert_parallel_size"),
)
"""What needs an accelerator, the Hub or another trainer, and what a plan refuses."""


def shrunken(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """An example on a tiny model and a few rows, within reach of a CPU."""
    drop = (
        "wandb_",
        "liger_",
        "flash_attn",
        "scattermoe",
        "nvfp4",
        "dynamic",
        "lora_target_p",
        "save",
        "flex_attn",
        "peft_",
    )
    kept = {name: one for name, one in given.items() if name not in NOT_HERE and not name.startswith(drop)}
    kind = "alpaca" if any("alpaca" in str(one.get("type")) for one in given.get("datasets") or ()) else "completion"
    adapter = kept.pop("adapter", None)
    if adapter:
        kept |= {"adapter": "lora", "lora_dropout": 0.0, "lora_r": 4, "lora_target_linear": None}
        kept["lora_target_modules"] = ["q_proj", "v_proj", "o_proj"]
        kept |= dict.fromkeys(("lora_qkv_kernel", "lora_mlp_kernel", "lora_o_kernel"), False)
    kept |= {
        "base_model": str(folder / "model"),
        "datasets": [{"path": str(folder / f"{kind}.jsonl"), "ds_type": "json", "type": kind}],
        "dataset_prepared_path": str(folder / "prepared"),
        "sequence_len": LENGTH,
        "pad_to_sequence_len": None,
        "micro_batch_size": min(2, given.get("micro_batch_size") or 1),
        "gradient_accumulation_steps": 2 if (given.get("gradient_accumulation_steps") or 1) > 1 else 1,
        "num_epochs": 2,
        "optimizer": "adamw_torch",
        "bf16": False,
        "fp16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "val_set_size": 0.2 if given.get("val_set_size") else 0,
        "special_tokens": {"pad_token": "0", "eos_token": "2"},
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "dataloader_prefetch_factor": None,
        "dataset_num_proc": 1,
        "max_grad_norm": 0.5,
        "seed": 1234,
        "adam_epsilon": 1e-3,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": given.get("weight_decay") or 0.1,
        "learning_rate": 1e-3,
    }
    return {name: one for name, one in kept.items() if one is not None}


def plan_for(given: dict[str, Any], family: str, world: int, parallelism: dict[str, Any]) -> Plan:
    """What the YAML trains, over these ranks."""
    micro, steps = given["micro_batch_size"], given["gradient_accumulation_steps"]
    training = {
        "sequence_length": LENGTH, "micro_batch_size": micro, "global_batch_size": micro * steps,
        "gradient_clipping": given["max_grad_norm"], "seed": given["seed"],
        "activation_checkpointing": "full" if given.get("gradient_checkpointing") else "none",
        "optimizer": {"lr": given["learning_rate"], "eps": 1e-3, "weight_decay": given["weight_decay"]},
    }  # fmt: skip
    room = {"vocab_size": 64} if family == "qwen2" else {}  # axolotl adds a token to Qwen's tokenizers
    return make_plan(world, parallelism, model=tiny_config(family) | room, whole_model=True, training=training)


def write(folder: Path, plan: Plan, given: dict[str, Any]) -> tuple[Path, Path]:
    """The model, the rows, and the two YAMLs: without and with the plug-in."""
    initial_model(plan).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    choose = random.Random(1)

    def text(count: int) -> str:
        return " ".join(str(choose.randint(5, 59)) for _ in range(count))

    rows = [{"text": text(6 + 5 * n % 7 + n)} for n in range(12)]
    asked = [{"instruction": text(3 + n % 4), "input": "", "output": text(4 + n % 6)} for n in range(12)]
    for kind, lines in (("completion", rows), ("alpaca", asked)):
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (folder / "plan").mkdir()
    (folder / "plan" / "plan.json").write_text(json.dumps(plan_tree(plan)))
    files = folder / "one.yaml", folder / "ranks.yaml"
    alone = {**given, "output_dir": str(folder / "one"), "plugins": ["axolotl_runs.Seeded"]}
    planned = {
        **given,
        "output_dir": str(folder / "ranks"),
        "plugins": ["parcompile.runtime.axolotl.Plugin"],
        "parcompile": {"plan": "plan"},
    }
    for file, tree in zip(files, (alone, {**planned, **axolotl_layout(plan)}), strict=True):
        file.write_text(yaml.safe_dump(tree))
    return files


class Seeded(BasePlugin):
    """A plug-in for one process: adapters are drawn as those of a plan, and documents of a row do not see each other.

    Without an accelerator axolotl lets them.
    """

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        return {"sample_packing_drop_attention_mask": True}

    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        torch.manual_seed(cfg.seed)


def train(_rank: int, file: str) -> list[dict[str, float]]:
    """What `axolotl train FILE` does; the lines of the log."""
    os.environ |= QUIET
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.integrations.base import PluginManager
    from axolotl.train import train as trained

    cfg = load_cfg(file)
    PluginManager.get_instance().load_datasets(cfg, preprocess=False)
    _, _, trainer = trained(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
    clocks = ("runtime", "per_second", "per_sec_per_gpu")
    return [
        {name: one for name, one in line.items() if not name.endswith(clocks) and not name.startswith("memory")}
        for line in trainer.state.log_history
    ]


PRELOAD = ("torch", "transformers", "deepspeed", "axolotl.cli.train", "axolotl.train", "axolotl.core.builders")


def runs(world: int, file: Path) -> list[Any]:
    """`train` on so many processes."""
    with LocalWorld(world, process_group=False, start_method="forkserver", preload=PRELOAD) as ranks:
        return ranks.run(train, str(file), timeout=600)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


def compare(given: dict[str, Any], family: str, world: int, parallelism: dict[str, Any], folder: Path) -> list[Margin]:
    """How far ranks of a plan are from axolotl in one process: each number of the log, each saved weight."""
    tree = shrunken(given, folder)
    if parallelism.get("cp") and tree.get("sample_packing"):
        tree["micro_batch_size"] = 1  # axolotl takes no more there
    if family == "gemma2":
        tree["attn_implementation"] = "eager"  # transformers' other kernels on CPUs leave out the soft-cap
    alone, planned = write(folder, plan_for(tree, family, world, parallelism), tree)
    (one,), ranks = runs(1, alone), runs(world, planned)
    for rank in ranks[1:]:
        assert rank == ranks[0], "the ranks differ in their logs"
    expected = {"log": one, "parameters": saved(folder / "one")}
    found = {"log": ranks[0], "parameters": saved(folder / "ranks")}
    for log in (one, ranks[0]):
        log[-1].pop("total_flos", None)
    return margins(found, expected)
