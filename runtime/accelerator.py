"""accelerate's `Accelerator` under a plan: a loop of one's own keeps its lines, and trains by the plan.

accelerate hands DeepSpeed an mpu only for Ulysses and takes every rank for data-parallel. Here the dp ranks are its
processes: they get other batches, and metrics are gathered over them.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.data_loader import prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DeepSpeedPlugin, DummyOptim, recursively_apply
from torch import Tensor, nn

from parcompile.backends.deepspeed.write import ds_config
from parcompile.plan import Plan

from .checkpoint import load, save
from .checkpoint.saved_models import whole_state_dict
from .deepspeed_patches.engine import initialize_with
from .engine import options_for_deepspeed, prepare, take_over
from .engine.loop import own_deals, refuse_ramp
from .errors import differs_from_plan, everywhere
from .groups import Mesh, Mpu, join
from .inject.adapters import INJECTED_FIRST
from .transport.backend import gather_objects, gather_tensors
from .whole_logits import WholeLogits

_UNPLANNED: Mapping[str, str] = {
    "deepspeed_plugin": "the plan has the configuration of DeepSpeed",
    "deepspeed_plugins": "the plan has the configuration of DeepSpeed",
    "fsdp_plugin": "DeepSpeed's engine holds the model",
    "torch_tp_plugin": "the plan has the groups",
    "megatron_lm_plugin": "DeepSpeed's engine holds the model",
    "parallelism_config": "the plan has the groups",
    "dynamo_backend": "injected layers are not compiled",
    "dynamo_plugin": "injected layers are not compiled",
    "gradient_accumulation_plugin": "the plan has the micro-batches of a step",
    "split_batches": "the plan has the micro-batch of a rank",
}
"""Arguments of `Accelerator` that would decide what the plan does."""
_COMPARED = ("lr", "betas", "eps", "momentum", "nesterov")
"""Settings of an optimizer that one and the same plan has for all parameters."""


def follow_launch(plan: Plan) -> None:
    """Takes over ranks that `accelerate launch` has started: the plan has what their environment says of an engine.

    Raises:
        RunError: it says otherwise than the plan.
    """
    parallelism, training = plan.spec.parallelism, plan.spec.training
    planned = {
        "ACCELERATE_MIXED_PRECISION": (_precision(plan), "no"),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (str(training.gradient_accumulation_steps), "1"),
        "ACCELERATE_USE_MEGATRON_LM": ("false", "false"),
        "PARALLELISM_CONFIG_TP_SIZE": (str(parallelism.tp), "1"),
        "PARALLELISM_CONFIG_CP_SIZE": (str(parallelism.cp), "1"),
    }
    _refuse(
        [
            f"{name} is {value}, the plan has {own}"
            for name, (own, free) in planned.items()
            if (value := os.environ.get(name)) is not None and value.lower() not in (own, free)
        ],
        "accelerate launch",
    )
    # By the first two accelerate would make another engine, and transformers load weights on one rank alone.
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        os.environ.pop(name, None)


def _precision(plan: Plan) -> str:
    """As accelerate calls it."""
    value = plan.spec.training.precision.value
    return "no" if value == "fp32" else str(value)


class PlannedAccelerator(Accelerator):  # type: ignore[misc]
    """In the place of accelerate's class; `parallelise` gives it its plan.

    Raises:
        RunError: an argument, the optimizer or the learning-rate scheduler says otherwise than the plan, or there is
            something that the plan does not have.
    """

    _plan: Plan

    def __init__(self, *given: Any, **named: Any) -> None:
        plan = self._plan
        refuse_ramp(plan, "a loop of accelerate")
        values = inspect.signature(Accelerator.__init__).bind_partial(self, *given, **named).arguments
        del values["self"]
        training, on_cpu = plan.spec.training, plan.spec.cluster.accelerator == "cpu"
        wrong = [f"{name} is given: {why}" for name, why in _UNPLANNED.items() if values.get(name)]
        wrong += own_deals("dataloader_config", values)
        for name, planned, free in (
            ("mixed_precision", _precision(plan), (None, "no")),
            ("gradient_accumulation_steps", training.gradient_accumulation_steps, (1,)),
            ("cpu", on_cpu, (False,)),
        ):
            value = values.pop(name, planned)
            if str(value) != str(planned) and value not in free:
                wrong.append(f"{name} is {value!r}, the plan has {planned!r}")
        _refuse(wrong, "Accelerator")
        self.mesh: Mesh = join(plan)
        PartialState(cpu=on_cpu)
        plugin = DeepSpeedPlugin(hf_ds_config=ds_config(plan), zero3_init_flag=False)
        steps = training.gradient_accumulation_steps
        super().__init__(deepspeed_plugin=plugin, gradient_accumulation_steps=steps, **values)
        plugin.dschf = None  # by it transformers would shard models of ZeRO 3 before their layers are split

    @property
    def num_processes(self) -> int:
        """The dp ranks: those that get other batches."""
        return self.mesh.size("dp")

    @property
    def process_index(self) -> int:
        """The index among the dp ranks."""
        return self.mesh.index("dp")

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """As in `Accelerator`, over dp ranks: those that share a sequence get the same batches."""
        if device_placement is None:
            device_placement = self.device_placement
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.num_processes,
            process_index=self.process_index,
            put_on_device=device_placement,
            rng_types=self.rng_types.copy(),
            even_batches=self.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=self.use_seedable_sampler,
            non_blocking=self.non_blocking,
        )
        self._dataloaders.append(prepared)
        return prepared

    def _prepare_deepspeed(self, *given: Any) -> Any:
        """The engine of the plan in the place of the model, with what the script's optimizer and scheduler say."""
        model = next((one for one in given if isinstance(one, nn.Module)), None)
        optimizer = next((one for one in given if isinstance(one, torch.optim.Optimizer | DummyOptim)), None)
        if model is None:
            if optimizer is not None:
                raise everywhere("prepare gets an optimizer without its model: give both in one call")
            return super()._prepare_deepspeed(*given)
        if getattr(model, "parcompile_mesh", None) is not None and optimizer is not None:
            raise everywhere(INJECTED_FIRST)
        scheduler = next((one for one in given if isinstance(one, torch.optim.lr_scheduler.LRScheduler)), None)
        decays = self._settings(model, optimizer, scheduler)
        injected = prepare(self._plan, self.mesh, model)
        self._logits = WholeLogits(injected, self.mesh, of_loops=True)
        held: dict[float, list[nn.Parameter]] = {}
        for name, parameter in injected.named_parameters():
            if parameter.requires_grad:
                held.setdefault(decays.get(name, self._plan.spec.training.optimizer.weight_decay), []).append(parameter)
        groups = [{"params": one, "weight_decay": decay} for decay, one in held.items()] if len(held) > 1 else None
        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:  # it goes on as the rates of a scheduler, without the whole model
                group["params"] = [torch.zeros(())]
            optimizer.state.clear()
        planned = self._plan.spec.training.optimizer
        dummy = DummyOptim(groups, lr=planned.lr, weight_decay=planned.weight_decay)
        instead = {id(model): injected, id(optimizer): dummy, id(scheduler): None}
        objects = [instead.get(id(one), one) for one in given]
        if optimizer is None:
            objects.append(dummy)
        with initialize_with(Mpu(self.mesh), lambda engine: take_over(engine, self.mesh), self._options):
            prepared = list(super()._prepare_deepspeed(*objects))
        engine, made = (prepared[next(i for i, one in enumerate(objects) if one is it)] for it in (injected, dummy))
        if scheduler is not None:
            rates = _Rates(scheduler, made, engine, self.step_scheduler_with_optimizer, self.num_processes)
            prepared[next(i for i, one in enumerate(given) if one is scheduler)] = rates
            self._schedulers.append(rates)
        return tuple(prepared[: len(given)])

    def _options(self, model: nn.Module, **options: Any) -> Any:
        if options.get("model_parameters") is None:
            options.pop("model_parameters", None)
        return options_for_deepspeed(self.mesh, model, **options)

    def _settings(self, model: nn.Module, optimizer: Any, scheduler: Any) -> dict[str, float]:
        """The weight decay of parameters by their name, as the script's optimizer has it.

        Raises:
            RunError: the optimizer or the scheduler and the plan differ.
        """
        training, wrong = self._plan.spec.training, []
        planned = training.optimizer
        if scheduler is not None and training.lr_scheduler is not None:
            wrong.append("a learning-rate scheduler is given, the plan has one of its own")
        if scheduler is not None and planned.start_weight_decay is not None and training.lr_scheduler is None:
            wrong.append("a learning-rate scheduler is given, and the plan's schedule changes weight decay")
        if scheduler is not None and scheduler.optimizer is not optimizer:
            wrong.append("the learning-rate scheduler is not of the optimizer that is prepared")
        if not isinstance(optimizer, torch.optim.Optimizer):
            _refuse(wrong, "the script")
            return {}
        if type(optimizer).__name__.lower() != planned.type:
            wrong.append(f"the optimizer is {type(optimizer).__name__}, the plan has {planned.type}")
        names = {id(one): name for name, one in model.named_parameters() if one.requires_grad}
        decays: dict[str, float] = {}
        for group in optimizer.param_groups:
            for name in _COMPARED:
                value, own = group.get("initial_lr", group["lr"]) if name == "lr" else group.get(name), None
                own = getattr(planned, name, None)
                if value is not None and own is not None and not _equal(value, own):
                    wrong.append(f"{name} is {value!r}, the plan has {own!r}")
            decay = float(group.get("weight_decay", 0.0))
            if decay not in (0.0, planned.weight_decay):
                wrong.append(f"weight_decay is {decay!r}, the plan has {planned.weight_decay!r}")
            decays.update({names[id(one)]: decay for one in group["params"] if id(one) in names})
        if missing := sorted(set(names.values()) - set(decays)):
            wrong.append(f"the optimizer lacks {len(missing)} of the model's trained parameters, such as {missing[0]}")
        if planned.no_weight_decay is None and planned.weight_decay and decays and not any(decays.values()):
            wrong.append(f"weight_decay is 0.0, the plan has {planned.weight_decay!r}")
        _refuse(sorted(set(wrong)), "the script")
        return {} if planned.no_weight_decay is not None else decays

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: int = 2) -> float:
        """The gradient norm of the step before clipping, over all axes. The engine has clipped by then.

        Raises:
            RunError: `max_norm` is not the plan's.
        """
        planned = self._plan.spec.training.gradient_clipping
        if norm_type != 2 or (planned or float("inf")) != max_norm:
            raise everywhere(
                f"clip_grad_norm_ has max_norm {max_norm} and norm_type {norm_type}, the plan's gradient_clipping is "
                f"{planned} of the 2-norm: write the same in both"
            )
        return float(super().clip_grad_norm_(parameters, max_norm) or 0.0)

    def gather(self, tensor: Any) -> Any:
        """The values of all dp ranks, in their order."""
        if self.mesh.size("dp") == 1:
            return recursively_apply(lambda one: one.reshape(one.shape or (1,)), tensor)

        def of_all(one: Tensor) -> Tensor:
            return torch.cat(gather_tensors(one.reshape(one.shape or (1,)), self.mesh.group("dp")))

        return recursively_apply(of_all, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As in `Accelerator`, over dp ranks."""

        def of_all(given: Sequence[Any]) -> list[Any]:
            every = gather_objects(given, self.mesh.group("dp")) if self.mesh.size("dp") > 1 else [given]
            return list(itertools.chain(*every))

        with mock.patch("accelerate.accelerator.gather_object", of_all):
            return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or the mean over dp ranks, times `scale`."""
        dp = self.mesh.size("dp")

        def of_all(one: Tensor) -> Tensor:
            one = one.clone()
            if dp > 1 and reduction != "none":
                dist.all_reduce(one, group=self.mesh.group("dp"))
            return one * (scale / dp if reduction == "mean" else scale)

        return recursively_apply(of_all, tensor, error_on_other_type=True)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """As in `Accelerator`, over dp ranks."""
        if self.mesh.size("dp") == 1:
            return tensor
        with mock.patch("accelerate.utils.operations.gather", self.gather):
            return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    def split_between_processes(self, *_: Any, **__: Any) -> Any:
        """Refused: ranks that share a sequence have to get the same inputs."""
        raise everywhere(
            "split_between_processes would give ranks that share a sequence other inputs: use a data loader"
        )

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Tensor]:  # noqa: ARG002 -- accelerate's
        """The whole weights on rank 0, nothing on others. Every rank calls it."""
        return whole_state_dict(self.unwrap_model(model), self.mesh)

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: Any = "10GB", safe_serialization: bool = True
    ) -> None:
        """Writes the whole model for `from_pretrained`. Every rank calls it."""
        options = {"max_shard_size": max_shard_size, "safe_serialization": safe_serialization}
        self.unwrap_model(model).save_pretrained(save_directory, **options)

    def save_state(self, output_dir: Any = None, *given: Any, **named: Any) -> Any:
        """As in `Accelerator`; the engine's part is a checkpoint of the plan, which other layouts load too."""
        with mock.patch.object(self, "_models", [_Checkpoints(*self._models)]):
            return super().save_state(output_dir, *given, **named)

    def load_state(self, input_dir: Any = None, *given: Any, **named: Any) -> None:
        """As in `Accelerator`."""
        with mock.patch.object(self, "_models", [_Checkpoints(*self._models)]):
            super().load_state(input_dir, *given, **named)
        for one in self._schedulers:
            if isinstance(one, _Rates):
                one.take_up()


class _Rates(AcceleratedScheduler):  # type: ignore[misc]
    """A script's scheduler of its own optimizer, whose rate the engine's optimizer gets."""

    def __init__(self, scheduler: Any, optimizer: Any, engine: Any, with_optimizer: bool, processes: int) -> None:
        super().__init__(scheduler, optimizer, step_with_optimizer=with_optimizer)
        self._engine, self._processes = engine, processes
        scheduler.optimizer._opt_called = True  # torch warns of schedulers that are ahead of their optimizer
        self.hand_on()

    def step(self, *given: Any, **named: Any) -> None:
        """As in accelerate, which counts a step of a schedule for each process: for each dp rank."""
        state = SimpleNamespace(num_processes=self._processes)
        with mock.patch("accelerate.scheduler.AcceleratorState", lambda: state):
            super().step(*given, **named)
        self.hand_on()

    def take_up(self) -> None:
        """Goes on with a state that was loaded: of the rate, torch keeps what the scheduler has given last."""
        for group, rate in zip(self.scheduler.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = rate
        self.hand_on()

    def hand_on(self) -> None:
        """Gives the engine's optimizer the rate.

        Raises:
            RunError: the scheduler has several.
        """
        rates = {group["lr"] for group in self.scheduler.optimizer.param_groups}
        if len(rates) > 1:
            raise everywhere(f"the scheduler gives groups other rates ({sorted(rates)}): a plan has one")
        for group in self._engine.optimizer.param_groups:
            group["lr"] = next(iter(rates))


class _Checkpoints:
    """An engine as accelerate saves and loads it, whose checkpoints are the plan's."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def save_checkpoint(self, folder: str, *_: Any) -> None:
        save(self._engine, Path(folder) / "checkpoint", self._engine.global_steps)

    def load_checkpoint(self, folder: str, *_: Any) -> None:
        load(self._engine, Path(folder) / "checkpoint")


def _refuse(wrong: Sequence[str], who: str) -> None:
    if wrong:
        raise differs_from_plan(who, wrong, "this")


def _equal(value: Any, planned: Any) -> bool:
    if isinstance(value, list | tuple):
        return [float(one) for one in value] == [float(one) for one in planned]
    return float(value) == float(planned)
