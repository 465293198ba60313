"""Hugging Face's `Trainer` around a plan: its callbacks, logging and schedules; the plan's model, groups and batches.

Trainer builds its own engine through accelerate, which hands DeepSpeed an mpu only for Ulysses, and counts every rank
as data-parallel. So the engine gets the plan's mpu while `train` runs, batches come from `PlanLoader`, and the batch
size is left to what DeepSpeed makes of the plan's. Needs the extra `[hf]` and accelerate.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import RandomSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from parcompile.backends.deepspeed.write import ds_config
from parcompile.cost.step import utilisation
from parcompile.plan import Plan, load_plan

from .checkpoint import load, save
from .checkpoint.state_file import random_state, set_random_state
from .data import PlanLoader
from .deepspeed_patches.engine import initialize_with
from .engine import options_for_deepspeed, prepare, seed_ranks, take_over
from .engine.loop import evaluate, own_deals, refuse_ramp
from .engine.metering import known_work
from .errors import differs_from_plan, everywhere
from .groups import Mesh, Mpu, join
from .inject.adapters import INJECTED_FIRST
from .inject.injection import load_pretrained
from .labels import IGNORED_LABEL
from .model.lora import matrix_layout, matrix_of, without_peft
from .model.pretrained import build_model
from .model.slices import Slices
from .profiling.recorder import peak_bytes
from .router_losses import RouterLosses
from .run_log import RunLog
from .tensor_parallel import VocabParallelEmbedding
from .transport.backend import gather_objects, gather_tensors
from .whole_logits import WholeLogits

T = TypeVar("T", bound=type[Trainer] | type[Accelerator])


def _decided(plan: Plan) -> dict[str, Any]:
    """The arguments of `TrainingArguments` that the plan decides."""
    refuse_ramp(plan, "Hugging Face's Trainer")
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
        raise everywhere(f"the plan decides {', '.join(decided)}: change the spec and compile it again")
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
    "model_init_kwargs": "the plan has precision and attention of the model",
    "sync_ref_model": "the reference model is whole, the trained one is split",
    "activation_offloading": "training.activation_offloading of the spec moves what injected layers keep for backward",
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
    wrong += own_deals("accelerator_config", values)
    if wrong:
        raise differs_from_plan(type(given).__name__, wrong, "these arguments")
    # Trainer would count every rank as data-parallel.
    further = {"use_cpu": plan.spec.cluster.accelerator == "cpu", "average_tokens_across_devices": False}
    if "activation_checkpointing" in fields:  # the name since transformers 5.20, of which the older one is a copy
        further["activation_checkpointing"] = False
    return type(given)(**{**values, **decided, **further})


_Trainer: Any = object
"""What stands behind the classes below: `Trainer`, or a class of it."""


class _InEngine(_Trainer):  # type: ignore[misc]
    """What every trainer of a plan does: the engine gets the plan's groups, and what is saved is whole."""

    mesh: Mesh
    current_flos: float
    _rate: float = 0.0
    _numel: int | None = None
    _other_tokens = "dp"

    @property
    def _tokens(self) -> int | None:
        """Of a step, where every batch has as many."""
        return None

    @contextlib.contextmanager
    def _in_engine(self) -> Iterator[None]:
        """Within it Trainer makes the engine of the plan, and its log is written for `parcompile report`.

        Raises:
            RunError: the checkpoint that is to be loaded at the end might be removed before.
        """
        if self.args.load_best_model_at_end and self.args.save_total_limit is not None:
            raise everywhere(
                f"save_total_limit {self.args.save_total_limit} may remove the checkpoint that load_best_model_at_end "
                "loads: leave one of them out"
            )
        rows = _Rows(self.mesh, self._tokens)
        self.add_callback(rows)
        try:
            with rows, initialize_with(Mpu(self.mesh), lambda engine: take_over(engine, self.mesh), self._options):
                yield
        finally:
            self.remove_callback(rows)

    def _options(self, model: nn.Module, **options: Any) -> Any:
        """With weight decay for the parameters that Trainer decays, where the plan leaves none out itself."""
        if self.mesh.plan.spec.training.optimizer.no_weight_decay is not None:
            return options_for_deepspeed(self.mesh, model, **options)
        decayed: list[str] = self.get_decay_parameter_names(model)
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                groups[name in decayed].append(parameter)
        rates = {True: self.args.weight_decay, False: 0.0}
        options["model_parameters"] = [
            {"params": held, "weight_decay": rates[decays]} for decays, held in groups.items() if held
        ]
        return options_for_deepspeed(self.mesh, model, **options)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Of these tokens by the whole model, as `Trainer` estimates it."""
        if self._numel is None:
            self._numel = _numel_without_embeddings(self.model, self.mesh)
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None  # GRPO's are rows of prompts
        return 0 if tokens is None else 6 * tokens.numel() * self._numel

    def store_flos(self) -> None:
        """As in `Trainer`, over the ranks that get other tokens."""
        done = torch.tensor([self.current_flos], dtype=torch.float64, device=self.mesh.device)
        if (group := self.mesh.parallel_group(self._other_tokens)) is not None:
            dist.all_reduce(done, group=group)
        self.state.total_flos += done.item()
        self.current_flos = 0

    @property
    def _folder(self) -> Path:
        return Path(self.args.output_dir) / "checkpoints"

    def training_step(self, *args: Any, **others: Any) -> Any:
        """As in `Trainer`, whose log gets the rate of the step: DeepSpeed has that of the next one behind it."""
        self._rate = super()._get_learning_rate()
        return self._made_step(*args, **others)

    def _made_step(self, *args: Any, **others: Any) -> Any:
        return super().training_step(*args, **others)

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

    _other_tokens = "dp-cp"  # batches of `PlanLoader` are split

    @property
    def _tokens(self) -> int:
        training = self.mesh.plan.spec.training
        return training.global_batch_size * training.sequence_length

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
            raise everywhere("evaluate needs an eval_dataset and an engine, which train makes")
        metrics = {f"{metric_key_prefix}_loss": evaluate(self.model_wrapped, dataset)}
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _numel_without_embeddings(model: nn.Module, mesh: Mesh) -> int:
    """What `num_parameters(exclude_embeddings=True)` counts of the whole model, adapters included."""
    base, slices = without_peft(model), Slices(mesh)
    kinds = (nn.Embedding, VocabParallelEmbedding)
    embeddings = {f"{name}.weight" for name, module in base.named_modules() if isinstance(module, kinds)}
    if (group := mesh.parallel_group("pp")) is not None:
        embeddings.update(*gather_objects(embeddings, group))
    shapes = [row.shape for name, row in mesh.plan.parameters.expanded() if name not in embeddings]
    for name, parameter in model.named_parameters():
        if (matrix := matrix_of(name)) is not None:
            layout = slices.of(matrix.weight).layout
            shapes.append(matrix_layout(matrix, layout, getattr(parameter, "ds_shape", parameter.shape)).full_shape)
    return sum(map(math.prod, shapes))


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
        raise everywhere(INJECTED_FIRST)
    if hasattr(model, "peft_config"):
        raise everywhere("a model that has adapters is given with a peft_config: leave one of them out")
    from peft import get_peft_model

    model = build_model(plan) if model is None else model
    with torch.random.fork_rng():
        torch.manual_seed(plan.spec.training.seed)
        adapted: nn.Module = get_peft_model(model, peft_config)
    return adapted


_OF_LOG = {"loss": "loss", "gradient_norm": "grad_norm", "lr": "learning_rate"}


class _Rows(TrainerCallback):  # type: ignore[misc]
    """Writes the lines of Trainer's log to metrics.jsonl in its output folder, under the names of `StepMeter`.

    `seconds` is the mean of the steps since the line before, without what evaluation and saving take between them.
    `tokens` are those of a step, where all steps have as many.
    """

    def __init__(self, mesh: Mesh, tokens: int | None) -> None:
        self._mesh, self._tokens = mesh, tokens
        self._log: RunLog | None = None
        self._peak: dict[str, float] = {}
        self._step, self._since, self._ended, self._waited, self._pauses = 0, 0.0, 0.0, 0.0, False

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._log is not None:
            self._log.__exit__(*raised)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 -- Trainer's
        now = time.perf_counter()
        if self._log is None:  # behind a resume
            self._step = state.global_step
            self._log = RunLog(args.output_dir, self._step, writes=self._mesh.rank == 0, plan=self._mesh.plan)
        if not self._since:
            self._since, self._waited = now, 0.0
        elif self._pauses:
            self._waited += now - self._ended
        self._pauses = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 -- Trainer's
        """What comes before the next step counts, but for evaluation and saving.

        Memory is gathered here, where all ranks come to: a script may log on one alone.
        """
        self._ended = time.perf_counter()
        if control.should_log:
            peak = torch.tensor(float(peak_bytes(self._mesh.device)), dtype=torch.float64, device=self._mesh.device)
            if self._mesh.plan.world_size > 1:
                dist.all_reduce(peak, dist.ReduceOp.MAX)
            self._peak = {"memory_peak_bytes": float(peak)}

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._pauses = True

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        steps = state.global_step - self._step
        if self._log is None or "loss" not in logs or not steps:
            return
        seconds = (time.perf_counter() - self._since - self._waited) / steps
        row = {name: float(logs[key]) for name, key in _OF_LOG.items() if key in logs} | {"seconds": seconds}
        if self._tokens is not None:
            row |= {"tokens": self._tokens, "tokens_per_s": self._tokens / seconds}
            if (work := known_work(self._mesh)) is not None:
                row["mfu"] = utilisation(work, row["tokens_per_s"] / self._mesh.plan.world_size)
        self._log.add(state.global_step, **row, **self._peak)
        self._step, self._since = state.global_step, 0.0


class _Resume(TrainerCallback):  # type: ignore[misc]
    """Loads a checkpoint when the engine is there and nothing is trained yet."""

    def __init__(self, trainer: PlanTrainer, folder: Path) -> None:
        self._trainer, self._folder = trainer, folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 -- Trainer's
        trainer = self._trainer
        done = load(trainer.model_wrapped, self._folder)
        if done >= state.max_steps:
            raise everywhere(f"the checkpoint has made {done} steps, and max_steps is {state.max_steps}")
        state.global_step = trainer._batches.step = done
        # What Trainer divides its logged loss and its speed by.
        trainer._globalstep_last_logged = trainer._initial_global_step = done


# Trainers of other packages and of scripts, as they are.


class OneOrder:
    """A sampler with the order of the first rank of dp and cp, on all of them.

    Samplers of other libraries draw from torch's generator, which is not the same on ranks with other tokens.
    """

    def __init__(self, sampler: Any, group: Any) -> None:
        self._sampler, self._group = sampler, group

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        order = [list(self._sampler)]
        dist.broadcast_object_list(order, group=self._group, group_src=0)
        return iter(order[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def parallelise(trainer: T, plan: Plan | str | Path) -> T:
    """Makes a class of `Trainer`, or accelerate's `Accelerator`, train by a plan: one line before it is made.

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
        RunError: it is neither a class of transformers' `Trainer` nor `Accelerator`, or the plan has pipeline stages.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer | Accelerator)):
        raise everywhere(
            f"parallelise takes a class of transformers' Trainer, such as SFTTrainer, or accelerate's Accelerator, not "
            f"{trainer!r}: write SFTTrainer = parallelise(SFTTrainer, plan) before the trainer is made"
        )
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    if (pp := plan.spec.parallelism.pp) > 1:
        raise everywhere(f"parallelise takes no pipeline stages (pp {pp}): use PlanTrainer")
    if issubclass(trainer, Accelerator):
        from .accelerator import PlannedAccelerator, follow_launch

        follow_launch(plan)
        return cast(T, type(trainer.__name__, (PlannedAccelerator, trainer), {"_plan": plan}))
    members = {"_plan": plan, "__module__": trainer.__module__, "__doc__": trainer.__doc__}
    kind = _Sampling if hasattr(trainer, _SAMPLES) else _Planned
    return cast(T, type(trainer.__name__, (kind, trainer), members))


def _check_reference(values: Mapping[str, Any], takes_one: bool) -> None:
    """What a class of trl makes of its reference model is possible under a plan.

    Raises:
        RunError: it is not.
    """
    if not takes_one or values.get("ref_model") is not None:
        return
    if hasattr(values.get("model"), "peft_config"):
        raise everywhere(
            "the model has adapters already, and there is no ref_model: trl would train beside a second copy of them. "
            "Give the model without adapters and a peft_config, whose reference is the model itself, or a ref_model"
        )
    if getattr(values["args"], "precompute_ref_log_probs", False):
        raise everywhere(
            "precompute_ref_log_probs without a ref_model would deal batches to ranks that share a sequence: give a "
            "whole ref_model, or leave precompute_ref_log_probs out"
        )


class _Planned(_InEngine):
    """In front of a class of Trainer."""

    _plan: Plan
    _rows_share: float = 1.0

    def __init__(self, *given: Any, **named: Any) -> None:
        make: Any = super().__init__
        values = inspect.signature(make).bind_partial(*given, **named).arguments
        values |= values.pop("kwargs", {})
        plan = self._plan
        if values.get("args") is None:
            raise everywhere("the trainer has no args: give TrainingArguments, or those of its class")
        for name in ("model_init", "optimizers", "optimizer_cls_and_kwargs", "quantization_config"):
            if values.get(name) not in (None, (None, None)):
                raise everywhere(f"{name} is not for a plan, which has model, precision and optimizer: leave it out")
        _check_reference(values, "ref_model" in inspect.signature(make).parameters)
        self.mesh, self._classifies = join(plan), bool(plan.spec.model.shape.head.labels)
        values["args"] = _planned_arguments(plan, values["args"])
        config = values.get("peft_config")
        model = prepare(plan, self.mesh, _adapted(plan, values.get("model"), config))
        self._logits = WholeLogits(model, self.mesh)
        with contextlib.ExitStack() as given_adapters:
            values["model"] = model
            if config is not None:  # trl makes a reference of a model that it has wrapped itself
                values["model"] = without_peft(model)
                for module in {sys.modules[one.__module__] for one in type(self).__mro__}:
                    if hasattr(module, "get_peft_model"):
                        wrapped = mock.patch.object(module, "get_peft_model", lambda *_, **__: model)
                        given_adapters.enter_context(wrapped)
            make(**values)
        seed_ranks(self.mesh)
        if getattr(self.args, "temperature", 1.0) != 1.0:
            raise everywhere(f"temperature {self.args.temperature}: log-probabilities have 1.0")
        if type(self).create_optimizer is not Trainer.create_optimizer:
            raise everywhere(f"{type(self).__name__} has a create_optimizer, and the plan an optimizer")
        losses = [vars(one)["compute_loss"] for one in type(self).__mro__ if "compute_loss" in vars(one)]
        of_trainer = next(one for one in losses if one is not _Planned.compute_loss) is Trainer.compute_loss
        self._own_loss = not of_trainer or bool(self.compute_loss_func or self.label_smoother)
        if self._classifies and of_trainer:
            raise everywhere(
                f"{type(self).__name__} has no loss of its own for a classifier, and the plan has none for its labels: "
                "use a class with a compute_loss, such as trl's RewardTrainer"
            )
        self._logits.whole = self._own_loss
        if getattr(self, "aux_loss_enabled", False):
            raise everywhere(
                f"router_aux_loss_coef is {self.router_aux_loss_coef}: {type(self).__name__} adds a balancing loss of "
                "its own, which is not computed over ranks. Write router_aux_loss_coef=0.0 in its arguments"
            )
        if self._own_loss and isinstance(without_peft(model).loss_function, RouterLosses):
            raise everywhere(
                f"{type(self).__name__} computes its own loss, without those of routers: leave training.router out of "
                "the spec, and output_router_logits out of the model's configuration"
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, **others: Any) -> Any:
        """As in `Trainer`, from the first step, or after the last checkpoint (True) or that of a folder `checkpoint-N`.

        Raises:
            RunError: there is no such checkpoint.
        """
        output = Path(self.args.output_dir)
        if resume_from_checkpoint is True:
            last = get_last_checkpoint(output) if output.is_dir() else None
            resume_from_checkpoint = last or str(output / "checkpoint-N")
        if resume_from_checkpoint and not (Path(resume_from_checkpoint) / TRAINER_STATE_NAME).is_file():
            raise everywhere(
                f"{resume_from_checkpoint} has no {TRAINER_STATE_NAME}: a parallelised trainer resumes from the "
                f"folders checkpoint-N that it has written to its output folder ({output}), beside {self._folder}"
            )
        with (
            mock.patch.multiple(self.accelerator, gather=self._of_dp, gather_for_metrics=self._for_metrics),
            self._in_engine(),
            mock.patch("transformers.trainer.deepspeed_load_checkpoint", self._load_engine),
        ):
            return super().train(resume_from_checkpoint=resume_from_checkpoint or None, **others)

    def _save_checkpoint(self, *given: Any, **named: Any) -> None:
        """As in `Trainer`: its state is in `checkpoint-N`, weights and those of the engine in `checkpoints`."""

        def save_engine(folder: str, **_: Any) -> None:
            save(self.model_wrapped, self._folder, self.state.global_step, keep=self.args.save_total_limit)
            Path(folder).mkdir(parents=True, exist_ok=True)

        with mock.patch.object(self, "save_model", save_engine):
            super(_InEngine, self)._save_checkpoint(*given, **named)

    def _load_engine(self, engine: Any, folder: str, **_: Any) -> None:
        load(engine, Path(folder).parent / self._folder.name / Path(folder).name.replace("checkpoint", "step"))
        self._random = random_state()

    def _load_rng_state(self, _: str | None) -> None:
        """Those of the engine's checkpoint, when batches have been passed over."""
        set_random_state(self._random)

    def _load_best_model(self) -> None:
        self._load_engine(self.model_wrapped, self.state.best_model_checkpoint)

    def _in_checkpoint(self, *_: Any) -> None:
        """The engine's checkpoint has them."""

    _save_optimizer_and_scheduler = _save_scaler = _save_rng_state = _in_checkpoint
    _load_optimizer_and_scheduler = _load_scaler = _in_checkpoint

    def _of_dp(self, given: Any) -> Any:
        """What accelerate gathers for metrics: the values of dp ranks, each of which tp and cp ranks have too."""
        if (dp := self.mesh.size("dp")) == 1:
            return given

        group = self.mesh.group("dp")

        def gather(tensor: Tensor) -> Tensor:
            own = tensor.detach().reshape(tensor.shape or (1,))
            rows = [len(own)] * dp
            # RewardTrainer gathers means of rows, of which the last batch may have others on each rank.
            of_rows = self._classifies and not tensor.dim() and tensor.is_floating_point()
            if of_rows:
                own = own * self._rows_share
            if self._in_last_batch:  # of which ranks may have different shares
                rows = gather_objects(0 if self._repeats else len(own), group)
                own = torch.cat([own, own.new_zeros(max(0, max(rows) - len(own)), *own.shape[1:])])[: max(rows)]
            kept = torch.cat([one[:count] for one, count in zip(gather_tensors(own, group), rows, strict=True)])
            return kept * len(kept) / dp if of_rows else kept

        return recursively_apply(gather, given, error_on_other_type=True)

    def _for_metrics(self, given: Any) -> Any:
        """As accelerate's `gather_for_metrics` in one process, which cuts rows to those of the last batch."""
        state = self.accelerator.gradient_state
        left = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def rows(tensor: Tensor) -> Tensor:
            gathered: Tensor = self._of_dp(tensor)
            return gathered[:left] if tensor.dim() else gathered

        return recursively_apply(rows, given)

    @property
    def _in_last_batch(self) -> bool:
        """Whether the micro-batch under way ends an epoch."""
        state = self.accelerator.gradient_state
        return bool(self.mesh.size("dp") > 1 and state.end_of_dataloader and state.sync_gradients)

    @property
    def _repeats(self) -> bool:
        """Whether the last batch of the epoch has no row for this rank, which works on one that counts for nothing."""
        state = self.accelerator.gradient_state
        return bool(state.end_of_dataloader and 0 < state.remainder <= self.mesh.index("dp"))

    def get_total_train_batch_size(self, *_: Any) -> int:
        """Of the plan."""
        return self._plan.spec.training.global_batch_size

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *others: Any) -> Any:
        """As in the class, for the batches of one process: the other completions of KTO's KL are those of its batch."""
        args = copy.copy(args)
        args.per_device_train_batch_size *= self.mesh.size("dp")
        return super()._prepare_dataset(dataset, processing_class, args, *others)

    def _get_train_sampler(self, *given: Any) -> Any:
        sampler, group = super()._get_train_sampler(*given), self.mesh.parallel_group("dp-cp")
        plain = isinstance(sampler, RandomSampler) and not self.accelerator.use_seedable_sampler
        return OneOrder(sampler, group) if plain and group is not None else sampler

    def get_train_dataloader(self) -> Any:
        """This dp rank's batches, in the order of one process."""
        with self._dealt(self.mesh.size("dp"), self.mesh.index("dp")):
            return super().get_train_dataloader()

    def get_eval_dataloader(self, *args: Any, **others: Any) -> Any:
        """All batches: every rank evaluates all of them."""
        with self._dealt(1, 0):
            return super().get_eval_dataloader(*args, **others)

    @contextlib.contextmanager
    def _dealt(self, ranks: int, rank: int) -> Iterator[None]:
        """Within it accelerate deals batches over so many ranks."""
        accelerator = self.accelerator

        def deal(loader: Any) -> Any:
            with mock.patch("accelerate.data_loader.BatchSamplerShard", _Shares):
                return prepare_data_loader(
                    loader,
                    accelerator.device,
                    num_processes=ranks,
                    process_index=rank,
                    put_on_device=True,
                    use_seedable_sampler=accelerator.use_seedable_sampler,
                    data_seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
                )

        with mock.patch.object(accelerator, "prepare", deal):
            yield

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        """The predicted tokens of the step on all dp ranks / dp: engines average over dp."""
        wanted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if not wanted or not batch_samples or "labels" not in batch_samples[0]:
            return None
        own = batch_samples[:-1] if self.mesh.size("dp") > 1 and self._repeats else batch_samples
        labels = [one["shift_labels"] if "shift_labels" in one else one["labels"][..., 1:] for one in own]
        count = torch.zeros((), device=device)
        for one in labels:
            count += (one != IGNORED_LABEL).sum().to(device)
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
            share = self._rows_share = self._share(inputs, of_rows=num_items_in_batch is None)
            found = super().compute_loss(model, inputs, **options)
            return (found[0] * share, *found[1:]) if return_outputs else found * share
        if num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        share = self._share(inputs, of_rows=num_items_in_batch is None)
        outputs = model(**inputs)
        loss = outputs.loss if share == 1 else outputs.loss * share
        return (loss, outputs) if return_outputs else loss

    def _share(self, inputs: Mapping[str, Any], *, of_rows: bool) -> float:
        """The weight of this rank's loss: 1, except in the last batch, of which ranks may have different shares."""
        if not (self._in_last_batch and self.model.training):
            return 1.0
        if not of_rows:
            return 0.0 if self._repeats else 1.0
        own = 0 if self._repeats else next(len(one) for one in inputs.values() if isinstance(one, Tensor))
        rows = gather_objects(own, self.mesh.group("dp"))
        return float(own * len(rows) / sum(rows))

    def evaluation_loop(self, *args: Any, **others: Any) -> Any:
        """As in `Trainer`; ranks have nothing to gather from one another."""
        every = type(self.accelerator).gather_for_metrics.__get__(self.accelerator)
        with mock.patch.multiple(self.accelerator, gather=lambda given: given, gather_for_metrics=every):
            return super().evaluation_loop(*args, **others)


class _Shares(BatchSamplerShard):  # type: ignore[misc]
    """Deals the batches of one process over dp ranks, also the last one, which accelerate would fill up."""

    def __iter__(self) -> Iterator[list[Any]]:
        ranks, rank = self.num_processes, self.process_index
        if self.batch_size is None:  # a sampler's own batches
            yield from super().__iter__()
            return
        rows: list[Any] = []
        for batch in self.batch_sampler:
            rows = rows + batch
            if len(rows) == ranks * self.batch_size:
                yield rows[rank * self.batch_size : (rank + 1) * self.batch_size]
                rows = []
        if rows and not self.drop_last:
            rows += itertools.repeat(rows[0], max(0, ranks - len(rows)))  # see `_repeats`
            yield rows[rank * len(rows) // ranks : (rank + 1) * len(rows) // ranks]


_SAMPLES = "_generate_and_score_completions"
"""The method by which classes of trl let the model that they train write completions, and score them."""


class _Sampling(_Planned):
    """In front of trl's GRPOTrainer. All ranks that share a sequence write, score and train the same completions."""

    def __init__(self, *given: Any, **named: Any) -> None:
        values = inspect.signature(super(_Planned, self).__init__).bind_partial(*given, **named).arguments
        if (args := values.get("args")) is not None:
            self._check(args, values)
            # Trainer's classes count every rank as one that gets other prompts: only one of these two may be given.
            if args.steps_per_generation in (None, args.gradient_accumulation_steps):
                args.steps_per_generation = None
            args.generation_batch_size = None
        super().__init__(*given, **named)
        held = self._plan.spec.training.micro_batch_size * self.mesh.size("dp") * self.args.steps_per_generation
        self.args.generation_batch_size = held
        if held % self.args.num_generations:
            raise everywhere(
                f"num_generations {self.args.num_generations} does not divide the {held} completions of a generation "
                "(the plan's micro_batch_size x dp x steps_per_generation): change one of them"
            )

    def _check(self, args: Any, values: Mapping[str, Any]) -> None:
        """A plan can do what a script of GRPO asks.

        Raises:
            RunError: it cannot.
        """
        spec, rewards = self._plan.spec, values.get("reward_funcs")
        rewards = rewards if isinstance(rewards, list | tuple) else [rewards]
        wrong = {
            f"{type(self).__name__} samples otherwise than GRPOTrainer: use GRPOTrainer": not any(
                one.__name__ == "GRPOTrainer" for one in type(self).__mro__
            ),
            "use_vllm is True: a plan's ranks have no vLLM. Leave it out, or give a rollout_func": args.use_vllm,
            "use_transformers_continuous_batching is True: injected models write completions by generate alone. "
            "Leave it out": args.use_transformers_continuous_batching,
            f"beta is {args.beta}: trl would load its reference model anew. Write beta=0.0, or give a peft_config, "
            "whose reference is the model without adapters": args.beta and values.get("peft_config") is None,
            f"scale of tokens by their entropy (top_entropy_quantile {args.top_entropy_quantile}) looks at all ranks: "
            "write 1.0": args.top_entropy_quantile != 1.0,
            "reward_funcs has a model, which trl would prepare as if each rank had other prompts: give a function that "
            "calls it": any(isinstance(one, str | nn.Module) for one in rewards),
            "tools and environments answer on each rank by themselves: give a rollout_func": values.get("tools")
            or values.get("environment_factory"),
            "zero.stage 3 shards the weights that generate needs, whose ranks have other prompts: use stage 2, or give "
            "a rollout_func": spec.shards_weights and values.get("rollout_func") is None,
            f"positions of {spec.model.shape.model_type} are a table, and prompts of different lengths begin at "
            "different ones: use a model with rotary positions": not spec.model.shape.positions.rotary,
        }
        if refused := [sentence for sentence, asked in wrong.items() if asked]:
            raise everywhere(f"{type(self).__name__}: {'; '.join(refused)}")

    @contextlib.contextmanager
    def _among_dp(self) -> Iterator[None]:
        """Within it trl takes the dp ranks for all there are; in evaluation, where each has all prompts, itself."""
        trains = bool(self.model.training)
        dp, index = (self.mesh.size("dp"), self.mesh.index("dp")) if trains else (1, 0)

        def gather(given: Any) -> Any:
            return self._of_dp(given) if trains else given

        def gather_object(given: list[Any]) -> list[Any]:
            return list(itertools.chain(*gather_objects(given, self.mesh.group("dp")))) if dp > 1 else list(given)

        def reduce(given: Tensor, **_: Any) -> Tensor:
            if dp > 1:
                dist.all_reduce(given, group=self.mesh.group("dp"))
            return given

        kind, instead = type(self.accelerator), {"gather": gather, "gather_object": gather_object}
        with contextlib.ExitStack() as within:
            within.enter_context(mock.patch.object(kind, "num_processes", dp))
            within.enter_context(mock.patch.object(kind, "process_index", index))
            within.enter_context(mock.patch.object(self.accelerator, "gather", gather))
            within.enter_context(mock.patch.object(self.accelerator, "reduce", reduce))
            for module in {sys.modules[one.__module__] for one in type(self).__mro__ if hasattr(one, _SAMPLES)}:
                for name, one in instead.items():
                    if hasattr(module, name):
                        within.enter_context(mock.patch.object(module, name, one))
            yield

    def _prepare_inputs(self, batch: Any) -> Any:
        """As in the class; ranks that share sequences draw the same completions, in the same order."""
        devices = [self.mesh.device] if self.mesh.device.type == "cuda" else []
        with self._among_dp(), torch.random.fork_rng(devices):
            torch.manual_seed((self.args.seed + self.mesh.index("dp")) * 1_000_003 + self._step)
            return super()._prepare_inputs(batch)

    def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
        with self._logits.generating():
            return super()._generate_single_turn(*given, **named)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *given: Any, **named: Any
    ) -> Any:
        """As in the class; rows that are padded on the left begin with their first token meanwhile."""
        length = input_ids.shape[1]
        places = torch.arange(length, device=input_ids.device)
        first = attention_mask.argmax(1, keepdim=True)
        order = (places + first) % length
        rolled = [one.gather(1, order) for one in (input_ids, attention_mask)]
        found = super()._get_per_token_logps_and_entropies(model, *rolled, length - 1, *given, **named)
        kept = (places[-logits_to_keep:] - first - 1).clamp(min=0)
        return (*(None if one is None else one.gather(1, kept) for one in found[:2]), found[2])

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        """As in the class, whose means are over dp."""
        with self._among_dp():
            return super().compute_loss(*given, **named)

    # trl's sampler leaves out what fills no generation.
    _in_last_batch = _repeats = False

    def _for_metrics(self, given: Any) -> Any:
        return self._of_dp(given)
