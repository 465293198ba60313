"""The spec after resolution: every value decided, nothing optional, nothing "auto".

The learning rate of each step: one function, which the runtime executes and targets are compared with.

Steps count from 1. Step n trains at position n - 1 of the schedule, as in Megatron-LM
(core/optimizer_param_scheduler.py) and transformers (optimization.py): the first step at `warmup_start_lr`, step
`warmup_steps` + 1 at the optimizer's lr, and a falling rate arrives at `min_lr` when the last step is done.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parcompile.cost.workload import Workload
from parcompile.layout.groups import DENSE_AXES, Axis, Grid
from parcompile.layout.pipeline import PipelineSplit, Schedule, Stage, merged, rank_stages
from parcompile.layout.sequence import ContextParallel, CpImplementation, CpLayout
from parcompile.layout.shards import ADAM_STATE_BYTES, MOMENTUM_BYTES
from parcompile.machines import Accelerator
from parcompile.model.key_types import architecture
from parcompile.model.shape import ModelShape

from .rampup import RampupBatchSize


class Precision(str, enum.Enum):
    """The type of weights and activations."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is Precision.FP32 else 2


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines. With a `preset` from a file, `accelerator` names the built-in one that it is like."""

    nodes: int
    gpus_per_node: int
    accelerator: str
    preset: Accelerator | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Sizes and order of the axes."""

    tp: int
    cp: int
    ep: int
    dp: int
    pp: int
    order: tuple[Axis, ...]
    sequence_parallel: bool
    cp_layout: CpLayout
    make_vocab_size_divisible_by: int
    cp_implementation: CpImplementation
    hierarchical_cp_sizes: tuple[int, int] | None
    """Ranks of the inner and of the outer level of an implementation that has two."""
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    num_virtual_stages_per_pipeline_rank: int
    microbatch_group_size_per_virtual_pipeline_stage: int | None
    expert_tp: int | None
    """Ranks that share each routed expert; None: those of tp."""

    @property
    def folds_experts(self) -> bool:
        """Whether experts are shared by fewer ranks than the dense layers (Megatron's parallel folding)."""
        return self.ep > 1 and self.expert_tp is not None and self.expert_tp < self.tp

    @property
    def grid(self) -> Grid:
        """The dense grid. Experts are laid over its dp · cp ranks, so ep takes no ranks of its own."""
        return Grid.of(self.order, {axis: self.size(axis) for axis in DENSE_AXES})

    def size(self, axis: Axis) -> int:
        """Ranks along an axis."""
        return int(getattr(self, axis))

    @property
    def context(self) -> ContextParallel:
        """How attention runs over the cp ranks."""
        return ContextParallel(self.cp_implementation, self.cp, self.hierarchical_cp_sizes)

    @property
    def pipeline_split(self) -> PipelineSplit:
        """How the layers are counted out to the stages."""
        return PipelineSplit(
            self.pp,
            self.num_virtual_stages_per_pipeline_rank,
            embedding=self.account_for_embedding_in_pipeline_split,
            loss=self.account_for_loss_in_pipeline_split,
            first=self.num_layers_in_first_pipeline_stage,
            last=self.num_layers_in_last_pipeline_stage,
        )

    @property
    def zero_shards(self) -> int:
        """Ranks that share the optimizer state."""
        return self.dp * self.cp


_MUON = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "ns_dtype": "bf16", "adjust_lr": "match_rms_adamw"}
OPTIMIZER_KEYS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"betas": None, "eps": None},
    "adam": {"betas": None, "eps": None},
    "muon": {"betas": None, "eps": None, **_MUON},
    "sgd": {"momentum": 0.0, "nesterov": False},
    "adagrad": {"eps": None},
}
"""Of each optimizer the keys that it has beside lr and weight_decay, with the values that depend on the optimizer."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer and its settings; those of Muon and SGD are None where it is another."""

    type: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    momentum: float | None = None
    nesterov: bool | None = None
    ns_steps: int | None = None
    ns_dtype: str | None = None
    adjust_lr: str | None = None
    no_weight_decay: str | None = None
    """What weight decay leaves out, as `layout.shards.is_decayed` reads it; None: nothing."""
    start_weight_decay: float | None = None
    """Of the first step, where weight decay changes; `weight_decay_of` gives that of each step."""
    weight_decay_style: str | None = None

    @property
    def is_muon(self) -> bool:
        """Whether matrices of the layers are orthogonalised."""
        return self.type == "muon"

    @property
    def state_bytes(self) -> int:
        """What is kept of an element in fp32; of matrices that Muon orthogonalises, `MOMENTUM_BYTES`."""
        if self.type == "adagrad" or (self.type == "sgd" and self.momentum):
            return MOMENTUM_BYTES
        return 0 if self.type == "sgd" else ADAM_STATE_BYTES


@dataclass(frozen=True, slots=True)
class LrScheduler:
    """The learning rate rises from `warmup_start_lr` to the optimizer's lr over `warmup_steps`; then it follows `type`.

    `type` is "constant"; "linear" or "cosine": from lr to `min_lr` at the end of step `total_steps`;
    "inverse_sqrt": lr · √(warmup_steps / steps done), at least `min_lr`; or "wsd": lr, and in the last `decay_steps` of
    `total_steps` to `min_lr` as `decay_type` says. A `total_steps` of None is that of the training. `learning_rate`
    gives the rate of each step. Where the batch grows, a step of the schedule is `global_batch_size` samples.
    """

    type: str
    warmup_steps: int
    min_lr: float
    warmup_start_lr: float
    decay_steps: int | None = None
    decay_type: str | None = None
    total_steps: int | None = None

    def end(self, train_steps: int | None) -> int | None:
        """The step at whose end a rate that falls has arrived at `min_lr`, in a training of so many steps."""
        return train_steps if self.total_steps is None else self.total_steps


SWITCHES = ("activation_offloading", "linear_cross_entropy", "gather_inputs_again", "tiled_mlp")
"""Of `training`: what is off unless a spec says otherwise. Plans of specs that do not say so do not name it."""
MICRO_BATCH, GLOBAL_BATCH = "micro_batch", "global_batch"
"""Scopes of the balancing loss: all layers and tokens of a micro-batch as one; the tokens of a step, layer by layer."""


@dataclass(frozen=True, slots=True)
class Router:
    """Losses of the routers of experts, the move of their correction bias, and a limit of rows: `training.router`."""

    aux_loss: float
    aux_loss_scope: str
    z_loss: float
    bias_update_rate: float | None
    expert_capacity: float | None = None
    """Rows that an expert takes of the tokens of a rank over its even share; None: all that come."""

    @property
    def has_losses(self) -> bool:
        """Whether anything is added to the loss of tokens."""
        return bool(self.aux_loss or self.z_loss)

    @property
    def said(self) -> list[str]:
        """What it asks for, in words."""
        words = [f"aux_loss {self.aux_loss} ({self.aux_loss_scope})"] if self.aux_loss else []
        words += [f"z_loss {self.z_loss}"] if self.z_loss else []
        words += [] if self.bias_update_rate is None else [f"bias_update_rate {self.bias_update_rate}"]
        return words + ([] if self.expert_capacity is None else [f"expert_capacity {self.expert_capacity}"])


@dataclass(frozen=True, slots=True)
class Training:
    """Batch, sequence, precision and optimizer. Sizes are in sequences and tokens."""

    sequence_length: int
    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    eval_global_batch_size: int
    eval_micro_batch_size: int
    precision: Precision
    gradient_accumulation_dtype: Precision
    optimizer: Optimizer
    lr_scheduler: LrScheduler | None
    gradient_clipping: float
    activation_checkpointing: str | tuple[str, ...]
    loss_scale: float
    train_steps: int | None
    seed: int
    router: Router | None = None
    activation_offloading: bool = False
    """What recomputed layers keep lies in the host's memory."""
    linear_cross_entropy: bool = False
    """The head's product and the loss run in chunks of tokens."""
    gather_inputs_again: bool = False
    """Inputs of blocks that are gathered over tp are not kept for backward."""
    tiled_mlp: bool = False
    """Dense MLPs run in tiles of tokens, which are computed again in backward."""
    rampup_batch_size: RampupBatchSize | None = None

    def batch(self, consumed: int) -> int:
        """Sequences of the step before which the run took so many samples."""
        ramp, full = self.rampup_batch_size, self.global_batch_size
        return full if ramp is None else ramp.batch(consumed, full)

    def samples_after(self, steps: int, consumed: int = 0) -> int:
        """Samples that the run has taken when so many steps have followed those that took `consumed`."""
        ramp, full = self.rampup_batch_size, self.global_batch_size
        return consumed + steps * full if ramp is None else ramp.samples_after(steps, full, consumed)


@dataclass(frozen=True, slots=True)
class Offload:
    """A part of a rank's states in the host's memory, page-locked where `pin_memory` says so."""

    device: str
    pin_memory: bool
    implementation: str = "torch"
    """Of an optimizer: whose kernel steps."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model: its shape, and the Hugging Face configuration from which the runtime builds it."""

    source: str
    shape: ModelShape
    hf_config: Mapping[str, Any]

    @property
    def architecture(self) -> dict[str, Any]:
        """What of the configuration decides the model: two models are the same when this is."""
        return architecture(self.hf_config)


class Origin(str, enum.Enum):
    """Where a resolved value comes from."""

    SPEC = "spec"
    DERIVED = "derived"
    PRESET = "preset"
    CONFIG = "config"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Provenance:
    """A resolved value, where it comes from, and how: the equation for a derived one, the file for a config's."""

    value: object
    origin: Origin
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Spec:
    """A resolved spec. `provenance` tells for every value, by its dotted path, where it comes from."""

    name: str
    model: Model
    cluster: Cluster
    parallelism: Parallelism
    training: Training
    zero_stage: int
    deepspeed: Mapping[str, Any]
    provenance: Mapping[str, Provenance]
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """Options of Megatron-LM that are written as they stand."""
    offload_optimizer: Offload | None = None
    """None: the accelerator holds master weights and optimizer state."""
    offload_param: Offload | None = None
    """None: the accelerator holds the shards of weights."""

    def __repr__(self) -> str:
        return f"Spec({self.name!r}, world_size={self.cluster.world_size})"

    def other_machine(self, device: str | None = None) -> str | None:
        """Why predictions of time are not of the machine that a run used; None where nothing speaks against it.

        `device` is what it ran on, "cpu" or "cuda", where that is known.
        """
        name, said = self.cluster.accelerator, self.provenance.get("cluster.accelerator")
        if self.cluster.preset is None and name == "cpu":
            return "predictions are of the preset cpu, which is not this machine: measure it with `parcompile profile`"
        if device == "cpu" and name != "cpu":
            return f"the run was on CPUs, and predictions are of {name}"
        if said is None or said.origin is Origin.DEFAULT:
            return f"the spec names no accelerator, and predictions are of {name}"
        return None

    @property
    def virtual_stages(self) -> tuple[tuple[Stage, ...], ...]:
        """For each pp rank its virtual stages (one unless they are interleaved)."""
        return rank_stages(self.model.shape.num_hidden_layers, self.parallelism.pipeline_split)

    @property
    def fuses_adam(self) -> bool:
        """Whether Adam is one kernel: torch's on GPUs, torch's or DeepSpeed's on the host of an offloaded optimizer."""
        on_gpu = self.cluster.accelerator != "cpu"
        return self.training.optimizer.type in ("adam", "adamw") and (on_gpu or self.offload_optimizer is not None)

    @property
    def takes_cpu_adam(self) -> bool:
        """Whether DeepSpeedCPUAdam steps on the host, which is compiled there."""
        return self.offload_optimizer is not None and self.offload_optimizer.implementation == "deepspeed"

    @property
    def shards_weights(self) -> bool:
        """Whether a rank holds a shard of each weight, and gathers it around the modules that use it."""
        return self.zero_stage == 3

    @property
    def optimizer_shards(self) -> int:
        """Ranks that share the optimizer states of a parameter which dp · cp ranks hold; at ZeRO stage 0 none do."""
        return self.parallelism.zero_shards if self.zero_stage else 1

    @property
    def schedule(self) -> Schedule:
        """The passes of a step through the stages."""
        axes = self.parallelism
        return Schedule(
            axes.pp,
            self.training.gradient_accumulation_steps,
            axes.num_virtual_stages_per_pipeline_rank,
            axes.microbatch_group_size_per_virtual_pipeline_stage,
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """One stage for each pp rank, in which the layers that it holds are counted."""
        shape = self.model.shape
        boundary = shape.num_hidden_layers if shape.moe is None else shape.moe.first_moe_layer
        return tuple(merged(held, boundary) for held in self.virtual_stages)


def learning_rate(training: Training, step: int, consumed: int | None = None) -> float:
    """The rate of an optimizer step, counted from 1; after the schedule it stays at `min_lr` where it falls to it.

    Where the batch grows, the schedule counts samples, as Megatron-LM's does: `consumed` are those that the steps
    before took; None: as many as the plan says.
    """
    schedule, highest = training.lr_scheduler, training.optimizer.lr
    if schedule is None:
        return highest
    unit, done, steps = _counted(training, step, consumed)
    lowest, warmup = schedule.min_lr, schedule.warmup_steps * unit
    if done < warmup:
        return schedule.warmup_start_lr + (highest - schedule.warmup_start_lr) * done / warmup
    if schedule.type == "constant":
        return highest
    if schedule.type == "inverse_sqrt":
        return max(lowest, highest * math.sqrt(max(1, warmup) / max(1, done)))
    end = steps if schedule.total_steps is None else schedule.total_steps * unit
    assert end is not None, "a rule wants an end for a rate that falls"
    fall, shape = end - warmup, schedule.type
    if schedule.decay_steps is not None and schedule.decay_type is not None:
        fall, shape = schedule.decay_steps * unit, schedule.decay_type
    progress = min(1.0, max(0.0, (done - end + fall) / fall))
    return lowest + (highest - lowest) * _LEFT[shape](progress)


def _counted(training: Training, step: int, consumed: int | None) -> tuple[int, int, int | None]:
    """What one step of a schedule is, what is done before a step, and all of the training: samples where it grows."""
    done, steps = step - 1, training.train_steps
    if training.rampup_batch_size is None:
        return 1, done, steps
    before = training.samples_after(done) if consumed is None else consumed
    return training.global_batch_size, before, None if steps is None else training.samples_after(steps)


def weight_decay_of(training: Training, step: int, consumed: int | None = None) -> float:
    """The weight decay of an optimizer step, counted from 1, as Megatron-LM's OptimizerParamScheduler has it.

    `consumed` are the samples that the steps before took, where the batch grows; None: as many as the plan says.
    """
    optimizer = training.optimizer
    if optimizer.start_weight_decay is None:
        return optimizer.weight_decay
    _, done, end = _counted(training, step, consumed)
    assert end is not None, "a rule wants an end for a weight decay that changes"
    share = min(1.0, done / end)
    if optimizer.weight_decay_style == "cosine":
        share = (1 + math.cos(math.pi * (1 - share))) / 2
    return optimizer.start_weight_decay + (optimizer.weight_decay - optimizer.start_weight_decay) * share


_LEFT: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "exponential": lambda progress: 2 * 0.5**progress - 1,
}
"""What is left of the way from the highest rate to the lowest, by the share of the fall that is done."""


def workload_of(spec: Spec) -> Workload:
    """The step of a resolved spec, as the DeepSpeed runtime executes it.

    Raises:
        ValueError: some rank has no token.
    """
    axes, training = spec.parallelism, spec.training
    if training.sequence_length < axes.cp:
        raise ValueError(f"sequence_length {training.sequence_length} < cp {axes.cp}")
    machine, router = spec.provenance.get("cluster.accelerator"), training.router
    sizes: dict[str, Any] = {axis.value: axes.size(axis) for axis in Axis}
    return Workload(
        shape=spec.model.shape,
        nodes=spec.cluster.nodes,
        gpus_per_node=spec.cluster.gpus_per_node,
        accelerator=spec.cluster.accelerator,
        sequence_length=training.sequence_length,
        micro_batch=training.micro_batch_size,
        micro_batches=training.gradient_accumulation_steps,
        **sizes,
        expert_tp=axes.expert_tp,
        order=axes.order,
        cp_layout=axes.cp_layout.value,
        cp_implementation=axes.cp_implementation.value,
        cp_sizes=axes.hierarchical_cp_sizes,
        sequence_parallel=axes.sequence_parallel,
        recompute=training.activation_checkpointing,
        element_bytes=training.precision.bytes,
        gradient_bytes=training.gradient_accumulation_dtype.bytes,
        zero_stage=spec.zero_stage,
        vocab_divisible_by=axes.make_vocab_size_divisible_by,
        virtual_stages=axes.num_virtual_stages_per_pipeline_rank,
        micro_batch_group=axes.microbatch_group_size_per_virtual_pipeline_stage,
        router_scope=router_scope(spec),
        offloads_activations=training.activation_offloading,
        linear_loss=training.linear_cross_entropy,
        gathers_inputs=training.gather_inputs_again,
        tiled_mlp=training.tiled_mlp,
        router_z_loss=bool(router and router.z_loss),
        expert_capacity=router.expert_capacity if router else None,
        stage_layers=spec.stages,
        state_bytes=training.optimizer.state_bytes,
        muon=training.optimizer.is_muon,
        fused=spec.fuses_adam,
        no_weight_decay=training.optimizer.no_weight_decay,
        ns_steps=training.optimizer.ns_steps or Workload.ns_steps,
        ns_bytes=Precision(training.optimizer.ns_dtype or "bf16").bytes,
        preset=spec.cluster.preset,
        names_machine=machine is not None and machine.origin is not Origin.DEFAULT,
        on_host=spec.offload_optimizer is not None,
        pins_memory=spec.offload_optimizer is None or spec.offload_optimizer.pin_memory,
        weights_on_host=spec.offload_param is not None,
        pins_weights=spec.offload_param is not None and spec.offload_param.pin_memory,
        **_of_deepspeed(spec),
    )


def router_scope(spec: Spec) -> str | None:
    """The tokens over which a loss balances experts; None where none does. The model's own is over a micro-batch."""
    router = spec.training.router
    if router is not None and router.aux_loss:
        return router.aux_loss_scope
    return MICRO_BATCH if spec.model.shape.has_moe and spec.model.hf_config.get("output_router_logits") else None


def _of_deepspeed(spec: Spec) -> dict[str, Any]:
    """What the spec says of the reduce bucket and of overlap, and, by either of DeepSpeed's names, of stage 3."""
    given = spec.deepspeed.get("zero_optimization")
    section: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    overlap = section.get("overlap_comm")
    found: dict[str, Any] = {"overlap_comm": overlap if isinstance(overlap, bool) else None}
    gathering = {"small_numel": "param_persistence_threshold", "live_numel": "max_live_parameters"}
    keys = {"reduce_bucket": "reduce_bucket_size", "sub_group": "sub_group_size", **gathering}
    for name, key in keys.items():
        value = section.get(f"stage3_{key}", section.get(key))
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            found[name] = int(value)
    return found
