"""One call from a plan to a DeepSpeed engine.

The plan's learning rates, step by step.

DeepSpeed's own schedules are others for the same words (runtime/lr_schedules.py): the first two steps have the lowest
rate, that of the cosine 0 in the first, and the cosine begins to fall one step early.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.backends.deepspeed.lax import is_on
from parcompile.backends.deepspeed.write import ds_config
from parcompile.doctor.records import FOLDER as RECORDS_FOLDER
from parcompile.layout.groups import EXPERT_DP
from parcompile.plan import Plan, load_plan
from parcompile.runtime.checkpoint.agreement import on_all_ranks, on_rank_0
from parcompile.runtime.checkpoint.manifest import refuse_inside
from parcompile.runtime.checkpoint.saved_models import let_engine_save
from parcompile.runtime.data import PlanLoader
from parcompile.runtime.deepspeed_patches import check_names, cpu_adam
from parcompile.runtime.deepspeed_patches.engine import with_optimizer, without_bf16_optimizer
from parcompile.runtime.deepspeed_patches.optimizer_state import add_in_place, shard_weights
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.expert_parallel import for_deepspeed, is_dealt, take_over_norm, warn_of_empty_tables
from parcompile.runtime.groups import Mesh, Mpu, join
from parcompile.runtime.inject import inject
from parcompile.runtime.inject.heads import count_once
from parcompile.runtime.inject.injection import draws_all, initial_model
from parcompile.runtime.inject.regions import recompute_as_planned
from parcompile.runtime.inject.selfcheck import SelfCheck, check_small_copy
from parcompile.runtime.inject.user_module import prepare_user_module
from parcompile.runtime.liveness import doing, follow, records, share_errors, share_errors_of
from parcompile.runtime.loss import SequenceLoss, without_waiting
from parcompile.runtime.model.lora import without_peft
from parcompile.runtime.model.pretrained import build_model, is_small
from parcompile.runtime.model.slices import check_head
from parcompile.runtime.model.text_head import TORCH_DTYPES
from parcompile.runtime.optimizers import apart_by_decay, apart_by_muon, fresh_optimizer, join_shards
from parcompile.runtime.profiling.recorder import FILE, Recorder
from parcompile.runtime.tensor_parallel import is_sharded
from parcompile.runtime.transport.backend import gather_objects
from parcompile.spec import Training, learning_rate, weight_decay_of

from .loop import attach_loop, guard_backward, let_batch_grow
from .metering import STOP_AFTER, FiniteWatch
from .router_bias import attach_biases, keep_biases
from .unsharded import sum_once

_MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""What sections of DeepSpeed's configuration write with (deepspeed/monitor)."""


class PlanSchedule:
    """Sets rates and weight decay of an optimizer before its first step and after each one; DeepSpeed calls `step`.

    A group with a rate or a weight decay of its own rises to that, and falls in proportion. The state is that of
    DeepSpeed's schedules: the number of steps made, less one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, training: Training) -> None:
        self.optimizer, self._training = optimizer, training
        self._highest = [float(group["lr"]) for group in optimizer.param_groups]
        self._decays = [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]
        self.last_batch_iteration = -1
        self._consumed: int | None = None
        self.set_rates()

    def follow(self, consumed: int) -> None:
        """Sets the rate of the step before which so many samples were taken, where the batch grows."""
        self._consumed = consumed
        self.set_rates()

    def step(self) -> None:
        """Goes on to the next step's rate."""
        self.last_batch_iteration += 1
        self.set_rates()

    def get_lr(self) -> list[float]:
        """The rate of each group for the next step."""
        rate = learning_rate(self._training, self.last_batch_iteration + 2, self._consumed)
        share = rate / self._training.optimizer.lr
        return [highest * share for highest in self._highest]

    def get_last_lr(self) -> list[float]:
        """As `get_lr`."""
        return self.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """How many steps have been made."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the steps of a state."""
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self.set_rates()

    def set_rates(self) -> None:
        """Those of the next step."""
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        optimizer = self._training.optimizer
        if optimizer.start_weight_decay is None:
            return
        decay = weight_decay_of(self._training, self.last_batch_iteration + 2, self._consumed)
        for group, last in zip(self.optimizer.param_groups, self._decays, strict=True):
            if last:  # others are left out of it
                group["weight_decay"] = last * decay / optimizer.weight_decay


@contextmanager
def options_for_deepspeed(mesh: Mesh, model: nn.Module, **options: Any) -> Iterator[dict[str, Any]]:
    """Within it `deepspeed.initialize`, with the options that come, makes the engine of the plan.

    Args:
        mesh: the live ranks.
        model: the injected model.
        options: what `deepspeed.initialize` would be called with for one rank.
    """
    training = mesh.plan.spec.training
    if options.get("optimizer") is None:
        groups = list(options.get("model_parameters") or [one for one in model.parameters() if one.requires_grad])
        if training.optimizer.no_weight_decay is not None and not isinstance(groups[0], dict):
            groups = apart_by_decay(groups, model, mesh, training.optimizer)
        if training.optimizer.is_muon:
            groups = apart_by_muon(groups, model, mesh, training.optimizer)
        options["model_parameters"] = groups
    if training.optimizer.type in ("muon", "adagrad") and options.get("optimizer") is None:
        on_host = mesh.plan.spec.offload_optimizer is not None
        options["optimizer"] = partial(fresh_optimizer, optimizer=training.optimizer, on_host=on_host)
    changes_decay = training.optimizer.start_weight_decay is not None
    if changes_decay and options.get("lr_scheduler") is not None:
        raise everywhere(
            f"training.optimizer.start_weight_decay {training.optimizer.start_weight_decay:g}: the plan's schedule "
            "changes weight decay, and an lr_scheduler of its own takes its place: leave it out, or give the plan a "
            "training.lr_scheduler, which trainers leave to the plan"
        )
    if (training.lr_scheduler is not None or changes_decay) and options.get("lr_scheduler") is None:
        options["lr_scheduler"] = partial(PlanSchedule, training=training)
    with for_deepspeed(mesh, model, **options) as given:
        if mesh.plan.spec.shards_weights:
            _shard_weights(model, mesh)
        if mesh.plan.spec.zero_stage:
            with without_bf16_optimizer():
                yield given
            return
        from .unsharded import UnshardedOptimizer

        with with_optimizer(lambda engine, optimizer: UnshardedOptimizer(engine, optimizer, mesh)):
            yield given


def _shard_weights(model: nn.Module, mesh: Mesh) -> None:
    """Leaves each rank its shards: over expert-dp of experts that are dealt, over dp · cp of all else."""
    whole, experts = mesh.group("dp-cp"), mesh.groups.get(EXPERT_DP)
    shard_weights(
        model.parameters(),
        lambda parameter: experts if experts is not None and is_dealt(parameter) else whole,
        lambda parameter: _make_replicas_equal(parameter, mesh),
        ds_config(mesh.plan),
        Mpu(mesh),
    )


def initialize(
    *,
    plan: Plan | str,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Sequence[Any] | Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    first_step: int = 0,
    self_check: bool | None = None,
    measurements: Path | str | bool = True,
    stop_on_nonfinite: int | None = STOP_AFTER,
) -> tuple[Any, Any, PlanLoader | None, Any]:
    """A DeepSpeed engine that trains exactly as the plan says; the shape follows `deepspeed.initialize`.

    Joins the other ranks, injects the model (tensor-parallel layers, ring attention, the parallel loss), and hands it
    to DeepSpeed with the plan's groups and configuration. Without a launcher, a plan for one rank runs as it is.

    Args:
        plan: the plan, or the path of `plan.json` or of its folder.
        model: a whole Hugging Face causal language model on the CPU, the same on every rank, or what `load_pretrained`
            returned; a user module where the plan has rules for it; None builds the plan's from its seed.
        optimizer: an optimizer or a function from parameters to one, in place of the plan's.
        model_parameters: a function from the injected model to its parameters or parameter groups, such as
            `decay_groups`; default: all that require gradients, in one group. Injection replaces parameters: a list of
            those that the model had before would train nothing, and is refused.
        training_data: samples for `PlanLoader`: a sequence, or an iterable such as `datasets.IterableDataset`.
        lr_scheduler: as in `deepspeed.initialize`, in place of the plan's.
        first_step: the step at which the loader starts, after a resume; `load` sets it, with another batch size too.
        self_check: compare one forward and backward of the injected model with the original, and refuse to go on when
            they differ. None: the model itself where it is given whole and has up to 20 million parameters, or is a
            user module; a small model of the same configuration for others, and where windows are long. True: the
            model itself in any case. False: nothing.
        measurements: the file to which peak memory and step time are written, for `parcompile calibrate`. True:
            measurements.csv beside a plan that is given as a path; False: none.
        stop_on_nonfinite: after how many optimizer steps in a row without a finite loss and gradient norm `engine.step`
            raises `RunError`, which names the last checkpoint before them; None: never. A dynamic loss scale of
            fp16 may skip steps until it is at its minimum.

    Returns:
        engine, optimizer, loader (None without `training_data`), lr_scheduler.

    Raises:
        PlanError: the plan cannot be read.
        RunError: it cannot be executed here; every rank raises.
    """
    import deepspeed

    file = _measurements_file(plan, measurements)
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    if file is not None:
        refuse_inside(file.parent)
        records.folder = file.parent / RECORDS_FOLDER
    mesh = join(plan)
    with doing("building the model"), share_errors():
        model = prepare(plan, mesh, model, self_check)
    if callable(model_parameters):
        model_parameters = model_parameters(model)
    if model_parameters is None:
        model_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _check_parameters(model_parameters, model)
    _check_stages_train(model_parameters, mesh)
    given = {"optimizer": optimizer, "model_parameters": model_parameters, "lr_scheduler": lr_scheduler}
    with options_for_deepspeed(mesh, model, **given) as options:
        engine, optimizer, _, lr_scheduler = deepspeed.initialize(
            **options, mpu=Mpu(mesh), config=ds_config(plan), dist_init_required=False
        )
    take_over(engine, mesh, stop_on_nonfinite)
    let_batch_grow(engine)
    if file is not None:
        Recorder(engine, mesh, file)
    loader = engine.parcompile_loader = None if training_data is None else PlanLoader(training_data, mesh, first_step)
    return engine, optimizer, loader, lr_scheduler


def prepare(plan: Plan, mesh: Mesh, model: nn.Module | None, self_check: bool | None = None) -> nn.Module:
    """The model as DeepSpeed gets it: injected, compared with the original, recomputing what the plan says."""
    check_names()
    _look_for_monitors(plan)
    if plan.spec.takes_cpu_adam:
        _load_cpu_adam(mesh)
    if model is None:
        # A model of any size, where transformers' rules draw all of it; a small one is compared with the original.
        in_slices = not is_small(plan) and self_check is not True and draws_all(plan)
        model = initial_model(plan, mesh) if in_slices else build_model(plan)
    _refuse_quantized(model)
    rules, check = plan.spec.model.shape.user_module, None
    if mesh.rank == 0:
        warn_of_empty_tables(model)
    if rules is not None and getattr(model, "parcompile_mesh", None) is None:
        prepare_user_module(model, mesh)
    if getattr(model, "parcompile_mesh", None) is not mesh:
        if rules is None:
            check_head(without_peft(model), plan)
        if self_check if self_check is not None else rules is not None or is_small(plan):
            check = SelfCheck(without_peft(model), mesh)
        model = inject(model, mesh)
    elif self_check:
        raise everywhere("a model that was loaded in slices has no original to compare with")
    recompute_as_planned(model, plan, mesh.rank)
    # DeepSpeed casts the weights to the type of training: cast before they move, they take half as much of the device.
    # Weights that are sharded stay where they are until then: a device holds one of them whole at a time.
    stay = plan.spec.shards_weights and check is None
    _place(model, mesh.device, None if check is not None else TORCH_DTYPES[plan.spec.training.precision], stay=stay)
    model.train()
    seed_ranks(mesh)
    for parameter in () if stay else model.parameters():
        _make_replicas_equal(parameter, mesh)
    keep_biases(model, mesh)
    if check is not None:
        check.compare(without_peft(model))
    if self_check is not False and rules is None and (check is None or not check.crosses_all):
        check_small_copy(mesh)
    return model


def _look_for_monitors(plan: Plan) -> None:
    """Packages of DeepSpeed's monitors that are enabled, which write on rank 0 alone.

    Raises:
        RunError: one is not installed there; every rank raises.
    """
    enabled = [name for name in _MONITORS if is_on(f"{name}.enabled", plan.spec.deepspeed.get(name, {}).get("enabled"))]

    def look() -> None:
        for name in enabled:
            if importlib.util.find_spec(_MONITORS[name]) is None:
                raise RunError(
                    f"deepspeed.{name} of the spec is enabled, and {_MONITORS[name]} is not installed on "
                    f"{socket.gethostname()}: pip install {_MONITORS[name]}, or remove deepspeed.{name} "
                    "and compile the spec again"
                )

    if enabled:
        on_rank_0(look)


def _load_cpu_adam(mesh: Mesh) -> None:
    """DeepSpeedCPUAdam, which one rank of each host compiles while the others wait.

    Raises:
        RunError: a host lacks what that takes; every rank raises.
    """

    def look() -> str:
        if why := cpu_adam.what_is_missing():
            raise RunError(f"DeepSpeedCPUAdam cannot be compiled on {socket.gethostname()}: {why}")
        return socket.gethostname()

    hosts = on_all_ranks(look)
    is_first = hosts.index(hosts[mesh.rank]) == mesh.rank
    with doing("compiling DeepSpeedCPUAdam"):
        if is_first and not cpu_adam.is_built():
            cpu_adam.say_that_it_is_built()
        on_all_ranks(cpu_adam.load_extension if is_first else lambda: None)
        on_all_ranks(cpu_adam.load_extension)


def _refuse_quantized(model: nn.Module) -> None:
    """Layers of quantized weights, as of bitsandbytes for QLoRA, are not cut."""
    base: Any = without_peft(model)
    if not getattr(base, "is_quantized", False):
        return
    method = getattr(base, "quantization_method", None)
    raise everywhere(
        f"{type(base).__name__} is quantized ({getattr(method, 'value', method)}): QLoRA is not supported, and weights "
        "are trained, or frozen under LoRA, in the plan's precision. Load the model without quantization_config"
    )


def _place(model: nn.Module, device: torch.device, dtype: torch.dtype | None, *, stay: bool = False) -> None:
    """Moves a model to its device; weights are cast to `dtype` on the way, one after the other. Buffers keep theirs.

    With `stay` weights are cast alone.
    """
    for parameter in model.parameters() if dtype is not None else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype).to(parameter.device if stay else device)
    if not stay:
        model.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def seed_ranks(mesh: Mesh) -> None:
    """The ranks of a tensor-parallel group work on the same tokens: what they draw at random has to be the same.

    Ranks with other tokens, and stages with other layers, draw otherwise.
    """
    if mesh.size("tp-pp") > 1:
        place = mesh.index("pp") * mesh.size("dp-cp") + mesh.index("dp-cp")
        torch.manual_seed(mesh.plan.spec.training.seed + place)


def take_over(engine: Any, mesh: Mesh, stop_on_nonfinite: int | None = STOP_AFTER) -> None:
    """Checks that an engine is the plan's, and gives it its mesh. `stop_on_nonfinite` is that of `initialize`.

    Raises:
        RunError: DeepSpeed made something else of the configuration.
    """
    _check_engine(engine, mesh)
    take_over_norm(engine, mesh)
    join_shards(engine, mesh)
    count_once(engine)
    add_in_place(engine.optimizer)
    if mesh.plan.spec.training.optimizer.type in ("adam", "adamw"):
        cpu_adam.load_either_form(engine.optimizer)
    sum_once(engine, mesh)
    engine.mesh = mesh
    attach_biases(engine)
    _leave_loss_on_its_way(engine)
    follow(engine)
    records.follow_layers(engine.module, mesh.plan.parameters.layer[0].name.partition(".{layer}")[0])
    guard_backward(engine)
    attach_loop(engine, mesh)
    FiniteWatch(engine, mesh, stop_on_nonfinite)
    let_engine_save(engine)
    share_errors_of(engine)


def _leave_loss_on_its_way(engine: Any) -> None:
    """Backward does not wait for the sum of the loss over cp, which is only its value."""
    backward = engine.backward

    def start(loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        scaled: Tensor = backward(without_waiting(loss), retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        if not isinstance(loss, SequenceLoss):
            return scaled
        return loss.detach() / (engine.gradient_accumulation_steps() if scale_wrt_gas else 1)

    engine.backward = start


def _measurements_file(plan: Plan | str, wanted: Path | str | bool) -> Path | None:
    if isinstance(wanted, bool):
        if not wanted or isinstance(plan, Plan):
            return None
        return (Path(plan) if Path(plan).is_dir() else Path(plan).parent) / FILE
    return Path(wanted)


def _make_replicas_equal(parameter: nn.Parameter, mesh: Mesh) -> None:
    """DeepSpeed broadcasts over dp × cp only: what the tp ranks share has to be made equal here, on the device."""
    parameter.data = parameter.data.to(mesh.device)
    if (group := mesh.parallel_group("tp")) is not None and not is_sharded(parameter):
        dist.broadcast(parameter.data, mesh.plan.groups.of_rank("tp", mesh.rank)[0], group=group)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: weight decay for matrices and tables, none for norms, biases and scalars.

    For `initialize(model_parameters=lambda model: decay_groups(model, 0.1))`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = (
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": weight_decay},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]


def _flat(given: Any) -> list[nn.Parameter]:
    """The parameters of parameter groups, or of a list of them."""
    return [one for entry in given for one in (entry["params"] if isinstance(entry, dict) else [entry])]


def _check_stages_train(given: Any, mesh: Mesh) -> None:
    """DeepSpeed makes no optimizer without parameters."""
    if (group := mesh.parallel_group("pp")) is None:
        return
    counts = gather_objects(len(_flat(given)), group)
    if idle := [stage for stage, count in enumerate(counts) if not count]:
        raise everywhere(
            f"stage {', '.join(map(str, idle))} of pp {len(counts)} has no parameter to train, and DeepSpeed's "
            "optimizer needs one on every rank: give it layers that are trained, freeze fewer parameters, or "
            "use a smaller pp"
        )


def _check_parameters(given: Any, model: nn.Module) -> None:
    live = set(map(id, model.parameters()))
    flat = _flat(given)
    if strangers := [one for one in flat if id(one) not in live]:
        raise everywhere(
            f"{len(strangers)} of the {len(flat)} model_parameters are not the injected model's: give a function, "
            "model_parameters=lambda model: [...], which is called after injection"
        )


def _check_engine(engine: Any, mesh: Mesh) -> None:
    """What DeepSpeed made of the configuration is what the plan says."""
    training = mesh.plan.spec.training
    for name, planned in (
        ("train_batch_size", training.global_batch_size),
        ("train_micro_batch_size_per_gpu", training.micro_batch_size),
        ("gradient_accumulation_steps", training.gradient_accumulation_steps),
        ("zero_optimization_stage", mesh.plan.spec.zero_stage),
        ("gradient_clipping", training.gradient_clipping),
    ):
        live = getattr(engine, name)()
        if live != planned:
            raise everywhere(f"DeepSpeed's {name} is {live}, the plan says {planned}")
