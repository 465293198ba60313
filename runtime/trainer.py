"""Hugging Face's `Trainer` around a plan: its callbacks, logging and schedules; the plan's model, groups and batches.

Trainer builds its own engine through accelerate, which hands DeepSpeed an mpu only for Ulysses, and counts every rank
as data-parallel. So the engine gets the plan's mpu while `train` runs, batches come from `PlanLoader`, and the batch
size is left to what DeepSpeed makes of the plan's. Needs the extra `[hf]` and accelerate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from parcompile.backends.deepspeed.write import ds_config
from parcompile.plan import Plan, load_plan

from .checkpoint import load, save
from .collectives import gather_from_group
from .data import PlanLoader
from .data.batches import with_positions
from .deepspeed_patches.engine import initialize_with
from .engine import options_for_deepspeed, prepare, seed_ranks, take_over
from .engine.loop import evaluate
from .errors import RunError
from .groups import Mesh, join
from .groups.mesh import Mpu
from .inject.adapters import INJECTED_FIRST
from .inject.loading import load_pretrained
from .labels import IGNORED_LABEL, shift_labels
from .loss import entropy, log_probs, whole_sequences
from .model.lora import without_peft
from .model.pretrained import build_model
from .ring_attention import split_sequence

__all__ = ["PlanTrainer", "parallelise", "training_arguments"]

T = TypeVar("T", bound=type[Trainer])


def _decided(plan: Plan) -> dict[str, Any]:
    """The arguments of `TrainingArguments` that the plan decides."""
    training = plan.spec.training
    config = ds_config(plan)
    # Trainer would compare it with a product over all ranks, as if each were data-parallel.
    config.pop("train_batch_size")
    if training.lr_scheduler is not None:
        # The engine follows the plan's schedule; Trainer would compare these with its own, and max_steps with its end.
        config["scheduler"]["params"] = {}
    return {
        "deepspeed": config,
        "per_device_train_batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "gradient_checkpointing": False,  # the plan's is injected
        "max_grad_norm": training.gradient_clipping,
        "bf16": training.precision.value == "bf16",
        "fp16": training.precision.value == "fp16",
        "seed": training.seed,
        "learning_rate": training.optimizer.lr,
        "adam_beta1": training.optimizer.betas[0],
        "adam_beta2": training.optimizer.betas[1],
        "adam_epsilon": training.optimizer.eps,
        "weight_decay": training.optimizer.weight_decay,
    }


def training_arguments(plan: Plan, output_dir: str, *, max_steps: int, **others: Any) -> TrainingArguments:
    """Arguments that say what the plan says; `others` are free.

    Raises:
        RunError: an argument is the plan's to decide.
    """
    values = _decided(plan)
    if decided := sorted(set(others) & set(values)):
        raise RunError(f"the plan decides {', '.join(decided)}: change the spec and compile it again", everywhere=True)
    options: dict[str, Any] = {"save_strategy": "no", "remove_unused_columns": False, "lr_scheduler_type": "constant"}
    # Without it accelerate has DeepSpeed compile a C++ extension for CPU ranks, which nothing here uses.
    options["use_cpu"] = plan.spec.cluster.accelerator == "cpu"
    return TrainingArguments(output_dir=output_dir, max_steps=max_steps, **values, **{**options, **others})


_UNPLANNED: Mapping[str, str] = {
    "fsdp": "DeepSpeed's engine holds the model",
    "parallelism_config": "the plan has the groups",
    "torch_compile": "injected layers are not compiled",
    "use_liger_kernel": "it writes over the layers that are injected",
    "neftune_noise_alpha": "each rank would draw noise of its own",
    "auto_find_batch_size": "the plan has the micro-batch",
    "optim_args": "the plan has the optimizer",
    "optim_target_modules": "the plan has the optimizer",
}
"""Arguments without effect on a plan, or with a wrong one."""


def _planned_arguments(plan: Plan, given: TrainingArguments) -> TrainingArguments:
    """The arguments of a script, with what the plan decides in the place of defaults.

    Raises:
        RunError: an argument that is no default says otherwise than the plan.
    """
    fields = {one.name: one for one in dataclasses.fields(given) if one.init}
    values, decided, wrong = {name: getattr(given, name) for name in fields}, _decided(plan), []
    kind = plan.spec.training.optimizer.type
    free: dict[str, Any] = {"optim": kind if kind in ("sgd", "adagrad") else "adamw_torch"}
    if plan.spec.training.lr_scheduler is not None:
        free |= {"lr_scheduler_type": "linear", "warmup_steps": 0}
    for name, planned in {**decided, **free}.items():
        value, default = values[name], fields[name].default
        value = getattr(value, "value", value)
        if value not in (planned, getattr(default, "value", default), None):
            wrong.append(f"{name} is {value!r}, the plan has {'one of its own' if name in free else repr(planned)}")
    wrong += [f"{name} is {value!r}: {why}" for name, why in _UNPLANNED.items() if (value := values.get(name))]
    deals = values.get("accelerator_config")
    wrong += [
        f"accelerator_config.{name} is True: the plan deals batches to dp ranks"
        for name in ("split_batches", "dispatch_batches")
        if getattr(deals, name, None)
    ]
    if wrong:
        raise RunError(
            f"{type(given).__name__} and the plan differ: {'; '.join(wrong)}. Leave these arguments out, or change the "
            "spec and compile it again",
            everywhere=True,
        )
    # Trainer would count every rank as data-parallel.
    further = {"use_cpu": plan.spec.cluster.accelerator == "cpu", "average_tokens_across_devices": False}
    return type(given)(**{**values, **decided, **further})


class _InEngine:
    """What every trainer of a plan does: the engine gets the plan's groups, and what is saved is whole."""

    mesh: Mesh
    args: TrainingArguments
    model: Any
    model_wrapped: Any
    processing_class: Any
    state: Any
    _rate: float = 0.0

    def _in_engine(self) -> contextlib.AbstractContextManager[None]:
        """Within it Trainer makes the engine of the plan.

        Raises:
            RunError: the checkpoint that is to be loaded at the end might be removed before.
        """
        if self.args.load_best_model_at_end and self.args.save_total_limit is not None:
            raise RunError(
                f"save_total_limit {self.args.save_total_limit} may remove the checkpoint that load_best_model_at_end "
                "loads: leave one of them out",
                everywhere=True,
            )
        return initialize_with(Mpu(self.mesh), lambda engine: take_over(engine, self.mesh), self._options)

    def _options(self, model: nn.Module, **options: Any) -> Any:
        return options_for_deepspeed(self.mesh, model, **options)

    @property
    def _folder(self) -> Path:
        return Path(self.args.output_dir) / "checkpoints"

    def training_step(self, *args: Any, **others: Any) -> Any:
        """As in `Trainer`, whose log gets the rate of the step: DeepSpeed has that of the next one behind it."""
        self._rate = super()._get_learning_rate()  # type: ignore[misc]
        return self._made_step(*args, **others)

    def _made_step(self, *args: Any, **others: Any) -> Any:
        return super().training_step(*args, **others)  # type: ignore[misc]

    def _get_learning_rate(self) -> float:
        return self._rate

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model, or its adapters, for `from_pretrained`, and the tokenizer. Every rank calls it.

        Raises:
            RunError: as `save_pretrained` of an injected model.
        """
        folder = output_dir or self.args.output_dir
        self.model.save_pretrained(folder)
        if self.args.should_save and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Saves, and notes the checkpoint of the best evaluation."""
        save(self.model_wrapped, self._folder, self.state.global_step, keep=self.args.save_total_limit)
        if (best := self.state.best_global_step) and (folder := self._folder / f"step-{best}").exists():
            self.state.best_model_checkpoint = str(folder)

    def _load_best_model(self) -> None:
        load(self.model_wrapped, self.state.best_model_checkpoint)


class PlanTrainer(_InEngine, Trainer):  # type: ignore[misc]
    """`Trainer(model, args, train_dataset)` for a plan.

    Checkpoints are those of `parcompile.runtime.checkpoint`, in the folder `checkpoints` of the output folder.

    Args:
        plan: the plan.
        args: from `training_arguments`.
        train_dataset: samples for `PlanLoader`.
        eval_dataset: samples for `evaluate`.
        model: as in `initialize`, or the path of a Hugging Face folder; None builds the plan's.
        peft_config: a `LoraConfig` of peft: adapters are put on the model before it is injected, drawn after
            `torch.manual_seed` of the plan's seed where the model is given whole.
        others: what `Trainer` takes, such as callbacks. Optimizers are the plan's.

    Raises:
        RunError: as `initialize`.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        args: TrainingArguments,
        train_dataset: Sequence[Any],
        eval_dataset: Sequence[Any] | None = None,
        model: nn.Module | str | Path | None = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        self.mesh: Mesh = join(plan)
        self._batches = PlanLoader(train_dataset, self.mesh)
        self._waiting: list[dict[str, Any]] = []
        model = prepare(plan, self.mesh, _adapted(plan, model, peft_config))
        super().__init__(model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **others)
        seed_ranks(self.mesh)  # Trainer has seeded all ranks alike
        # The divisor of the loss counts accumulation steps already; Trainer is to divide by them, as DeepSpeed would.
        self.model_accepts_loss_kwargs = False

    def train(self, resume_from_checkpoint: str | bool | None = None, **others: Any) -> Any:
        """As in `Trainer`, from the first step, or after the last checkpoint (True) or that of a folder."""
        resume = None
        if resume_from_checkpoint:
            resume = _Resume(self, self._folder if resume_from_checkpoint is True else Path(resume_from_checkpoint))
            self.add_callback(resume)
        try:
            with self._in_engine():
                return super().train(**others)
        finally:
            if resume is not None:
                self.remove_callback(resume)

    def get_train_dataloader(self) -> PlanLoader:
        """This rank's micro-batches, without end."""
        return self._batches

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        """The loss of this rank's sequences."""
        loss: Tensor = model(**inputs).loss
        return loss

    def _made_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **others: Any) -> Tensor:
        """Micro-batches that a pipeline, or a loss, takes together go when the last has come."""
        ahead = getattr(without_peft(self.model_wrapped.module).loss_function, "looks_ahead", False)
        if self.mesh.size("pp") == 1 and not ahead:
            loss: Tensor = super()._made_step(model, inputs, *args, **others)
            return loss
        self._waiting.append(inputs)
        if len(self._waiting) < self.args.gradient_accumulation_steps:
            return torch.zeros((), device=self.mesh.device)
        batches, self._waiting = self._waiting, []
        whole: Tensor = self.model_wrapped.train_batch(iter(batches))
        return whole

    def evaluate(
        self, eval_dataset: Sequence[Any] | None = None, *_: Any, metric_key_prefix: str = "eval", **__: Any
    ) -> dict[str, float]:
        """The loss of `parcompile.runtime.evaluate`, under way or after `train`.

        Raises:
            RunError: there is no data set, or no engine yet.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None or not hasattr(self.model_wrapped, "mesh"):
            raise RunError("evaluate needs an eval_dataset and an engine, which train makes", everywhere=True)
        metrics = {f"{metric_key_prefix}_loss": evaluate(self.model_wrapped, dataset)}
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _adapted(plan: Plan, model: nn.Module | str | Path | None, peft_config: Any) -> nn.Module | None:
    """The model that is to be injected, with adapters where they are asked for.

    Raises:
        RunError: the model is injected, or has adapters.
    """
    if isinstance(model, str | Path):
        return load_pretrained(model, plan, peft_config)
    if peft_config is None:
        return model
    if getattr(model, "parcompile_mesh", None) is not None:
        raise RunError(INJECTED_FIRST, everywhere=True)
    if hasattr(model, "peft_config"):
        raise RunError("a model that has adapters is given with a peft_config: leave one of them out", everywhere=True)
    from peft import get_peft_model

    model = build_model(plan) if model is None else model
    with torch.random.fork_rng():
        torch.manual_seed(plan.spec.training.seed)
        adapted: nn.Module = get_peft_model(model, peft_config)
    return adapted


class _Resume(TrainerCallback):  # type: ignore[misc]
    """Loads a checkpoint when the engine is there and nothing is trained yet."""

    def __init__(self, trainer: PlanTrainer, folder: Path) -> None:
        self._trainer, self._folder = trainer, folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 -- Trainer's
        trainer = self._trainer
        done = load(trainer.model_wrapped, self._folder)
        if done >= state.max_steps:
            raise RunError(f"the checkpoint has made {done} steps, and max_steps is {state.max_steps}", everywhere=True)
        state.global_step = trainer._batches.step = done
        # What Trainer divides its logged loss and its speed by.
        trainer._globalstep_last_logged = trainer._initial_global_step = done


# Trainers of other packages and of scripts, as they are.


def parallelise(trainer: T, plan: Plan | str | Path) -> T:
    """Makes a class of `Trainer` train by a plan: one line before the trainer is made.

    `SFTTrainer = parallelise(SFTTrainer, "plan")`: the script goes on as it is, with its own arguments, data set,
    collator and callbacks. Values that the plan decides (batch, precision, optimizer, clipping, seed) take the place of
    defaults; others that differ from the plan are refused. Each dp rank gets the samples that one process would take,
    in the same order; sequences are padded to the plan's where cp splits them.

    The model may be whole, a path, or None for the plan's own; a `peft_config` is put on it before it is injected.
    Trainer's own loss is the plan's. What trl's trainers take from their fused head (log-probabilities, entropy) is
    computed from split logits; another `compute_loss` is called with whole logits, which each rank then holds.

    Args:
        trainer: a class, such as trl's `SFTTrainer`.
        plan: or its folder.

    Raises:
        RunError: it is no class of transformers' `Trainer`, or the plan has pipeline stages.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise RunError(
            f"parallelise takes a class of transformers' Trainer, such as SFTTrainer, not {trainer!r}: write "
            "SFTTrainer = parallelise(SFTTrainer, plan) before the trainer is made",
            everywhere=True,
        )
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    if (pp := plan.spec.parallelism.pp) > 1:
        raise RunError(f"parallelise takes no pipeline stages (pp {pp}): use PlanTrainer", everywhere=True)
    members = {"_plan": plan, "__module__": trainer.__module__, "__doc__": trainer.__doc__}
    return cast(T, type(trainer.__name__, (_Planned, trainer), members))


class _Planned(_InEngine):
    """In front of a class of Trainer."""

    _plan: Plan
    create_optimizer: Any
    accelerator: Any
    model_accepts_loss_kwargs: bool
    compute_loss_func: Any
    label_smoother: Any

    def __init__(self, *given: Any, **named: Any) -> None:
        make: Any = super().__init__
        values = inspect.signature(make).bind_partial(*given, **named).arguments
        values |= values.pop("kwargs", {})
        plan = self._plan
        if values.get("args") is None:
            raise RunError("the trainer has no args: give TrainingArguments, or those of its class", everywhere=True)
        for name in ("model_init", "optimizers", "optimizer_cls_and_kwargs"):
            if values.get(name) not in (None, (None, None)):
                raise RunError(
                    f"{name} is not for a plan, which has model and optimizer: leave it out", everywhere=True
                )
        if (name := type(values.get("model")).__name__).endswith("Classification"):
            raise RunError(
                f"{name} is a classifier, such as trl's RewardTrainer trains: plans are of causal language models",
                everywhere=True,
            )
        self.mesh = join(plan)
        values["args"] = _planned_arguments(plan, values["args"])
        values["model"] = prepare(plan, self.mesh, _adapted(plan, values.get("model"), values.pop("peft_config", None)))
        self._logits = _WholeLogits(values["model"], self.mesh)
        make(**values)
        seed_ranks(self.mesh)
        if getattr(self.args, "temperature", 1.0) != 1.0:
            raise RunError(f"temperature {self.args.temperature}: log-probabilities have 1.0", everywhere=True)
        if type(self).create_optimizer is not Trainer.create_optimizer:
            raise RunError(f"{type(self).__name__} has a create_optimizer, and the plan an optimizer", everywhere=True)
        owner: Any = next(one for one in type(self).__mro__ if one is not _Planned and "compute_loss" in vars(one))
        self._own_loss = owner is not Trainer or bool(self.compute_loss_func or self.label_smoother)
        self._logits.whole = self._own_loss

    def train(self, resume_from_checkpoint: str | bool | None = None, **others: Any) -> Any:
        """As in `Trainer`; checkpoints are those of `PlanTrainer`.

        Raises:
            RunError: it is to resume, which `PlanTrainer` does.
        """
        if resume_from_checkpoint:
            raise RunError(
                "a parallelised trainer does not resume: PlanTrainer resumes from the same checkpoints", everywhere=True
            )
        self.accelerator.gather = self._of_dp
        try:
            with self._in_engine():
                return super().train(**others)  # type: ignore[misc]
        finally:
            del self.accelerator.gather

    def _options(self, model: nn.Module, **options: Any) -> Any:
        """With weight decay for the parameters that Trainer decays."""
        decayed: list[str] = self.get_decay_parameter_names(model)  # type: ignore[attr-defined]
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                groups[name in decayed].append(parameter)
        rates = {True: self.args.weight_decay, False: 0.0}
        options["model_parameters"] = [
            {"params": held, "weight_decay": rates[decays]} for decays, held in groups.items() if held
        ]
        return super()._options(model, **options)

    def _of_dp(self, given: Any) -> Any:
        """What accelerate gathers for metrics: the values of dp ranks, each of which tp and cp ranks have too."""
        from accelerate.utils import recursively_apply

        if (dp := self.mesh.size("dp")) == 1:
            return given

        def gather(tensor: Tensor) -> Tensor:
            own = tensor.detach().reshape(tensor.shape or (1,)).contiguous()
            found = [torch.empty_like(own) for _ in range(dp)]
            dist.all_gather(found, own, group=self.mesh.group("dp"))
            return torch.cat(found)

        return recursively_apply(gather, given, error_on_other_type=True)

    def get_total_train_batch_size(self, *_: Any) -> int:
        """Of the plan."""
        return self._plan.spec.training.global_batch_size

    def get_train_dataloader(self) -> Any:
        """This dp rank's batches, in the order of one process."""
        with self._dealt(self.mesh.size("dp"), self.mesh.index("dp")):
            return super().get_train_dataloader()  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **others: Any) -> Any:
        """All batches: every rank evaluates all of them."""
        with self._dealt(1, 0):
            return super().get_eval_dataloader(*args, **others)  # type: ignore[misc]

    @contextlib.contextmanager
    def _dealt(self, ranks: int, rank: int) -> Iterator[None]:
        """Within it accelerate deals batches over so many ranks."""
        from accelerate.data_loader import prepare_data_loader

        accelerator = self.accelerator

        def deal(loader: Any) -> Any:
            return prepare_data_loader(
                loader,
                accelerator.device,
                num_processes=ranks,
                process_index=rank,
                put_on_device=True,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            )

        accelerator.prepare = deal
        try:
            yield
        finally:
            del accelerator.prepare

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        """The predicted tokens of the step on all dp ranks / dp: engines average over dp."""
        wanted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if not wanted or not batch_samples or "labels" not in batch_samples[0]:
            return None
        labels = [one["shift_labels"] if "shift_labels" in one else one["labels"][..., 1:] for one in batch_samples]
        count = torch.stack([(one != IGNORED_LABEL).sum() for one in labels]).sum().float().to(device)
        if (dp := self.mesh.size("dp")) > 1:
            dist.all_reduce(count, group=self.mesh.group("dp"))
        return count.clamp(min=1) / dp

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The plan's loss, or that of the class from whole logits."""
        self._logits.whole = self._own_loss or return_outputs
        if self._own_loss:
            options = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
            return super().compute_loss(model, inputs, **options)  # type: ignore[misc]
        if num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def evaluation_loop(self, *args: Any, **others: Any) -> Any:
        """As in `Trainer`; ranks have nothing to gather from one another."""
        before, self.accelerator.gather = self.accelerator.gather, lambda given: given
        try:
            return super().evaluation_loop(*args, **others)  # type: ignore[misc]
        finally:
            self.accelerator.gather = before


class _WholeLogits:
    """Lets an injected model take sequences of any length up to the plan's, and give whole logits where asked for."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.whole, self._mesh, self._length = False, mesh, 0
        self._fused: Tensor | None = None
        self._planned = mesh.plan.spec.training.sequence_length
        model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._leave)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = with_positions(kwargs)
        # Under this name trl calls models, and wants values of single tokens in the place of logits.
        self._fused = kwargs.get("labels") if kwargs.pop("fused_lm_head", False) else None
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None or self._mesh.size("cp") == 1:
            self._length = 0 if tokens is None else tokens.shape[1]
            return args, kwargs
        self._length = tokens.shape[1]
        missing = self._planned - self._length
        if missing < 0:
            raise RunError(
                f"sequences have {self._length} tokens, the plan's sequence_length is {self._planned}: give the "
                "trainer a maximum length (max_length), or compile a plan for longer sequences",
                everywhere=True,
            )
        if missing == 0:
            return args, kwargs
        kwargs = {"input_ids": tokens, **kwargs}
        if kwargs.get("position_ids") is None and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = torch.ones_like(tokens)
        fill = {"labels": IGNORED_LABEL, "shift_labels": IGNORED_LABEL}
        for name, one in kwargs.items():
            if isinstance(one, Tensor) and one.dim() == 2 and one.shape[1] == self._length:
                kwargs[name] = F.pad(one, (0, missing), value=fill.get(name, 0))
        if kwargs.get("position_ids") is not None:  # what is added is a document of its own
            kwargs["position_ids"][:, self._length :] = torch.arange(missing, device=tokens.device)
        return args[1:], kwargs

    def _leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        if self._fused is not None:
            return self._of_tokens(output, self._fused)
        if not self.whole:
            return None
        mesh = self._mesh
        logits = gather_from_group(output.logits, -1, mesh.parallel_group("tp"))
        size = mesh.plan.spec.model.shape.vocab_size
        output.logits = whole_sequences(logits, mesh)[:, : self._length, :size]
        return output

    def _of_tokens(self, output: Any, labels: Tensor) -> Any:
        """What trl's `add_fused_lm_head` computes from a whole head, at temperature 1, from logits that are split."""
        from trl.trainer.utils import FusedCausalLMOutput

        mesh, logits, size = self._mesh, output.logits, self._mesh.plan.spec.model.shape.vocab_size
        shifted = shift_labels(labels)
        own = F.pad(shifted, (0, self._planned - shifted.shape[1]), value=IGNORED_LABEL)
        if mesh.size("cp") > 1:
            own = split_sequence(own, 1, mesh.plan.spec.parallelism.cp_layout, mesh.size("cp"), mesh.index("cp"))
        else:
            own = shifted
        group, columns = mesh.parallel_group("tp"), logits.shape[-1]
        start = 0 if group is None else dist.get_rank(group) * columns
        with torch.no_grad():
            held = logits[..., : max(0, min(columns, size - start))].float()
            sums = held.sum(-1)
            best = held.amax(-1) if held.shape[-1] else torch.full_like(sums, -torch.inf)
            top = best.clone()
            if group is not None:
                dist.all_reduce(sums, group=group)
                dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            winner = torch.where(best == top, held.argmax(-1) + start if held.shape[-1] else size, size)
            if group is not None:
                dist.all_reduce(winner, dist.ReduceOp.MIN, group=group)
            doubled = log_probs(logits * 2, own, mesh)
        chosen = log_probs(logits, own, mesh)
        values = {
            "log_probs": chosen,
            "entropy": entropy(logits, mesh, own),
            "log_sum_sq_probs": 2 * chosen.detach() - doubled,
            "mean_logits": (sums / size).masked_fill(own == IGNORED_LABEL, 0.0),
            "is_top1": ((winner == own) & (own != IGNORED_LABEL)).float(),
        }
        found = {name: whole_sequences(one, mesh)[:, : self._length][:, :-1] for name, one in values.items()}
        found["is_top1"] = found["is_top1"].bool()
        return FusedCausalLMOutput(**found, loss=output.loss, label_mask=shifted[:, :-1] != IGNORED_LABEL)
