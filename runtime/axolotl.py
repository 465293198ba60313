"""A plug-in of axolotl: its trainer of causal language models trains by a plan.

    plugins: [parcompile.runtime.axolotl.Plugin]
    parcompile: {plan: FOLDER}      # from the folder of this file

What the plan decides may be left out of the YAML, or says the same. Sources: axolotl 0.19.0, `integrations/base.py`,
`core/trainers/base.py`, `train.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axolotl.integrations.base import BasePlugin

if TYPE_CHECKING:
    from parcompile.plan import Plan

# axolotl goes on without a plug-in whose module cannot be imported: all else is imported when it is registered.

_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
_UNPLANNED: Mapping[str, str] = {
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "dp_shard_size", "dp_replicate_size"), "the plan has ZeRO and dp"
    ),
    **dict.fromkeys(
        ("rl", "reward_model", "process_reward_model", "trainer_cls"), "the plug-in has axolotl's SFT alone"
    ),
    **dict.fromkeys(("relora", "qat", "lisa_step_interval", "lisa_n_layers"), "it changes layers under way"),
    **dict.fromkeys(("layer_offloading", "activation_offloading"), "injected layers keep their own activations"),
    **dict.fromkeys(
        ("embedding_lr", "embedding_lr_scale", "loraplus_lr_ratio", "lr_groups"), "the plan has one learning rate"
    ),
    **dict.fromkeys(("pretraining_dataset", "streaming"), "ranks that share a sequence need the same rows"),
    **dict.fromkeys(("orpo_alpha", "use_eaft", "chunked_cross_entropy"), "the plan has the loss"),
    **dict.fromkeys(("tiled_mlp", "cut_cross_entropy", "fp8", "unsloth_cross_entropy_loss"), "it writes over layers"),
    **dict.fromkeys(_LORA_KERNELS, "it writes over layers"),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "gptq"), "the runtime trains weights of 16 or 32 bits"),
    **dict.fromkeys(
        ("fix_untrained_tokens", "generate_samples", "do_bench_eval", "do_causal_lm_eval"), "rank 0 does it alone"
    ),
    **dict.fromkeys(("jagged_restart_steps", "use_ray", "torch_compile"), "the plan has none"),
}
"""Options that a plan has no place for, with the reason."""


class Plugin(BasePlugin):  # type: ignore[misc]
    """Trains by the plan that the section `parcompile` of the YAML names."""

    _plan: Plan

    def register(self, cfg: MutableMapping[str, Any]) -> None:
        """Reads the plan, and writes what it decides into the configuration.

        Raises:
            RunError: the section or an option is not one of a plan, or says otherwise than it.
        """
        from parcompile.plan import load_plan

        from .errors import differs_from_plan, everywhere

        section = cfg.pop("parcompile", None)
        if not isinstance(section, Mapping) or set(section) != {"plan"} or not isinstance(section["plan"], str):
            raise everywhere(
                f"the section parcompile of the YAML is {section!r}: it has one key, plan, the folder of a plan. "
                f"Write parcompile: {{plan: FOLDER}}"
            )
        self._plan = load_plan(Path(str(cfg.get("axolotl_config_path") or "")).parent / section["plan"])
        if wrong := _follow(self._plan, cfg):
            raise differs_from_plan(cfg.get("axolotl_config_path"), wrong, "these options")

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Sets what axolotl derives of the number of ranks, each of which it takes as data-parallel."""
        if not preprocess:
            cfg.batch_size = self._plan.spec.training.global_batch_size
            cfg.ddp = False
            cfg.device_map = None  # the whole model stays on the host, from which ranks take their parts

    def pre_lora_load(self, cfg: Any, model: Any) -> None:  # noqa: ARG002 -- axolotl's
        """All ranks draw the same adapters."""
        import torch

        torch.manual_seed(self._plan.spec.training.seed)

    def get_training_args(self, cfg: Any) -> dict[str, Any]:  # noqa: ARG002 -- axolotl's
        """Documents of a packed row are told by their positions, as without a mask."""
        return {"sample_packing_drop_attention_mask": True}

    def get_trainer_cls(self, cfg: Any) -> type:  # noqa: ARG002 -- axolotl's
        """Axolotl's trainer under the plan."""
        from axolotl.core.trainers.base import AxolotlTrainer

        return _planned(AxolotlTrainer, self._plan)


def _follow(plan: Plan, cfg: MutableMapping[str, Any]) -> list[str]:
    """Fills in what the plan decides; returns what the configuration says otherwise."""
    from parcompile.backends.trainers.read import OPTIMIZERS
    from parcompile.backends.trainers.write import AXOLOTL, axolotl_layout, decided

    training = plan.spec.training
    wrong = [f"{name} is {cfg[name]!r}: {why}" for name, why in _UNPLANNED.items() if cfg.get(name)]
    if cfg.get("adapter") not in (None, "lora"):
        wrong.append(f"adapter is {cfg['adapter']!r}: a plan has lora alone")
    liger = [name for name, value in cfg.items() if name.startswith("liger_") and value]
    wrong += [f"{name} is {cfg[name]!r}: it writes over layers that are injected" for name in liger]
    cfg.update(dict.fromkeys(_LORA_KERNELS, False))  # axolotl switches them on by itself

    layout = {**{name: 1 for names in AXOLOTL.parallel.values() for name in names}, **axolotl_layout(plan)}
    layout["sequence_parallel_degree"] = layout["context_parallel_size"]
    for name, planned in {**layout, "ring_attn_func": layout.get("ring_attn_func")}.items():
        if (value := cfg.pop(name, None)) not in (None, planned):
            wrong.append(f"{name} is {value!r}, the plan has {planned!r}")
    if cfg.get("multipack_real_batches") is False:
        wrong.append("multipack_real_batches is False: rows of a plan have its sequence_length")
    cfg["multipack_real_batches"] = True
    recomputes = training.activation_checkpointing != "none"
    if (value := cfg.get("gradient_checkpointing")) is not None and bool(value) is not recomputes:
        wrong.append(f"gradient_checkpointing is {value!r}, the plan has {training.activation_checkpointing!r}")
    cfg["gradient_checkpointing"] = False  # the plan's is injected
    cfg.pop("gradient_checkpointing_kwargs", None)

    planned = decided(plan, AXOLOTL)
    schedule = {name: planned.pop(name, None) for name in ("lr_scheduler", "warmup_steps")}
    if "max_steps" in planned and cfg.get("max_steps") is None:
        cfg["max_steps"] = planned["max_steps"]
    planned.pop("max_steps", None)
    given = cfg.get("optimizer")
    if given is not None and OPTIMIZERS.get(str(given)) != training.optimizer.type:
        wrong.append(f"optimizer is {given!r}, the plan has {training.optimizer.type!r}")
    cfg["optimizer"] = planned.pop("optimizer", "adamw_torch")
    for name, value in planned.items():
        said = None if cfg.get(name) == "auto" else cfg.get(name)
        if said is not None and (float(said) if isinstance(value, float) else said) != value:
            wrong.append(f"{name} is {said!r}, the plan has {value!r}")
        cfg[name] = value
    if training.lr_scheduler is not None:
        said = {name: cfg.pop(name, None) for name in ("lr_scheduler", "warmup_steps", "warmup_ratio")}
        other = [name for name, value in said.items() if value not in (None, schedule.get(name))]
        wrong += [f"{name} is {said[name]!r}, the plan has a schedule of its own" for name in other]
        cfg["lr_scheduler"], cfg["warmup_steps"] = "linear", 0  # Trainer's own defaults, which the plan replaces
    return wrong


def _planned(trainer: Any, plan: Plan) -> type:
    """Axolotl's trainer with the loss and the optimizer of a plan, whose weights all ranks save together."""
    import torch.distributed as dist
    from transformers import Trainer

    from .labels import IGNORED_LABEL
    from .trainer import OneOrder, parallelise

    class Planned(trainer):  # type: ignore[misc]
        # axolotl's own call these, unless an option asks for more: `_UNPLANNED` has those.
        compute_loss = Trainer.compute_loss
        create_optimizer = Trainer.create_optimizer

    class Saved(parallelise(Planned, plan)):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self._save_whole = self.model.save_pretrained
            # axolotl calls it on rank 0 alone, at the end and when it is interrupted: no rank would answer.
            self.model.save_pretrained = lambda *_, **__: None

        def _create_multipack_sampler(self, base_sampler: Any, dataset: Any) -> Any:
            if (group := self.mesh.parallel_group("dp-cp")) is not None:
                base_sampler = OneOrder(base_sampler, group)
            return super()._create_multipack_sampler(base_sampler, dataset)

        def train(self, *given: Any, **named: Any) -> Any:
            """As under the plan; then all ranks save."""
            done = super().train(*given, **named)
            self.save_model(self.args.output_dir)
            return done

        def save_model(self, *given: Any, **named: Any) -> None:
            """As under the plan."""
            kept, self.model.save_pretrained = self.model.save_pretrained, self._save_whole
            try:
                super().save_model(*given, **named)
            finally:
                self.model.save_pretrained = kept

        def training_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
            """As under the plan; counts tokens as axolotl's `compute_loss` does, over the ranks that have others."""
            if self.args.include_tkps:
                labels = inputs["labels" if "labels" in inputs else "input_ids"]
                counts = labels.new_tensor([(labels != IGNORED_LABEL).sum(), labels.numel()])
                if (group := self.mesh.parallel_group("dp")) is not None:
                    dist.all_reduce(counts, group=group)
                seen = getattr(self.state, "tokens", {})
                self.state.tokens = {
                    name: seen.get(name, 0) + count.reshape(1).float().cpu()
                    for name, count in zip(("trainable", "total"), counts, strict=True)
                }
            return super().training_step(model, inputs, *given, **named)

    Saved.__name__ = Saved.__qualname__ = trainer.__name__
    return Saved
