"""Batches, precision, and the optimizer; and the implementation of context parallelism, chosen for the workload."""

from __future__ import annotations

import functools
import math
from dataclasses import fields, replace
from typing import Any

from parcompile.cost.coefficients import time_values
from parcompile.cost.context_time import attention_seconds, candidates, cheapest, costs
from parcompile.cost.workload import Workload
from parcompile.layout.groups import AXES, Axis
from parcompile.layout.sequence import ContextParallel, CpImplementation
from parcompile.machines import accelerators
from parcompile.schema import default
from parcompile.spec import (
    OPTIMIZER_KEYS,
    LrScheduler,
    Offload,
    Optimizer,
    Origin,
    Precision,
    Provenance,
    RampupBatchSize,
    Router,
    Spec,
    Training,
)
from parcompile.spec.values import workload_of
from parcompile.units import format_milliseconds

from .model import ModelValues
from .reader import MISSING, ParallelismValues, Switch, Unavailable, Value

WARMUP_UNITS = ("steps", "ratio", "samples", "tokens")
"""What a warm-up may be counted in."""


class TrainingValues(ParallelismValues):
    """What the sections `training` and `zero` say."""

    sequence_length = Value(int, "training", "sequence_length")
    """Tokens of a whole sequence."""
    precision = Value(Precision, "training", "precision")
    """The type of weights and activations."""
    gradient_accumulation_dtype = Value(Precision, "training", "gradient_accumulation_dtype")
    """The type in which gradients are summed."""
    zero_stage = Value(int, "zero", "stage")
    """The stage of ZeRO."""
    lr = Value(float, "training", "optimizer", "lr")
    """The highest learning rate."""
    activation_offloading = Switch("training", "activation_offloading")
    """Whether the host holds what recomputed layers keep."""
    linear_cross_entropy = Switch("training", "linear_cross_entropy")
    """Whether the head's product and the loss run in chunks."""
    tiled_mlp = Switch("training", "tiled_mlp")
    """Whether dense MLPs run in tiles."""
    gather_inputs_again = Switch("training", "gather_inputs_again")
    """Whether gathered inputs are not kept."""

    @property
    def micro_batch_size(self) -> int:
        """Sequences of one forward pass of one model copy."""
        name, steps = "micro_batch_size", "gradient_accumulation_steps"
        if self.given("training", name) or not (
            self.given("training", "global_batch_size") and self.given("training", steps)
        ):
            return self._given_or_one(name)
        total, passes, dp = self._batch("global_batch_size"), self._batch(steps), self.axis(Axis.DP)
        return self._whole_ratio(name, total, passes * dp, f"global_batch_size {total} / ({steps} {passes} · dp {dp})")

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes of one optimizer step."""
        name = "gradient_accumulation_steps"
        if self.given("training", name) or not self.given("training", "global_batch_size"):
            return self._given_or_one(name)
        total, micro, dp = self._batch("global_batch_size"), self.micro_batch_size, self.axis(Axis.DP)
        return self._whole_ratio(name, total, micro * dp, f"global_batch_size {total} / (micro {micro} · dp {dp})")

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step."""
        if self.given("training", "global_batch_size"):
            return self._batch("global_batch_size")
        micro, passes, dp = self.micro_batch_size, self.gradient_accumulation_steps, self.axis(Axis.DP)
        equation = f"micro {micro} · gradient_accumulation_steps {passes} · dp {dp}"
        self.get("training", "global_batch_size")
        path = "training.global_batch_size"
        self.provenance[path] = Provenance(micro * passes * dp, Origin.DERIVED, equation)
        return micro * passes * dp

    @property
    def rampup_batch_size(self) -> RampupBatchSize | None:
        """How the batch grows; None where every step has `global_batch_size`."""
        path = ("training", "rampup_batch_size")
        if not self.given(*path):
            return None
        start, increment, samples = (int(self.get(*path, key)) for key in ("start", "increment", "samples"))
        return RampupBatchSize(start, increment, samples)

    def _batch(self, name: str) -> int:
        return int(self.get("training", name))

    def _given_or_one(self, name: str) -> int:
        """A size of the batch that does not follow from the others: 1 unless it is given."""
        found = self.get("training", name)
        if found is None:
            self.provenance[f"training.{name}"] = Provenance(1, Origin.DEFAULT)
        return int(found or 1)

    def eval_batch(self, name: str, training: int) -> int:
        """A batch size of evaluation: that of training unless it is given."""
        path = ("training", f"eval_{name}")
        if self.given(*path):
            return int(self.get(*path))
        return int(self.record(path, training, Origin.DERIVED, f"{name} {training}"))

    def _whole_ratio(self, name: str, total: int, divisor: int, equation: str) -> int:
        if total % divisor:
            raise Unavailable(name)
        self.record(("training", name), total // divisor, Origin.DERIVED, equation)
        return total // divisor

    def offload_of(self, part: str) -> Offload | None:
        """Where the host holds the state of the "optimizer", or weights ("param"); None where the accelerator does."""
        path = ("zero", f"offload_{part}")
        if not self.given(*path):
            return None
        more = [self.get(*path, "implementation")] if part == "optimizer" else []
        found = Offload(self.get(*path, "device"), bool(self.get(*path, "pin_memory")), *more)
        return None if found.device == "none" else found

    @property
    def activation_checkpointing(self) -> str | tuple[str, ...]:
        """What is recomputed in the backward pass: one word, or one for each stage where they differ.

        Raises:
            Unavailable: it is invalid, or there is not one word for each stage, which a rule says.
        """
        given = self.get("training", "activation_checkpointing")
        if isinstance(given, str):
            return given
        if len(given) != self.axis(Axis.PP) or self.virtual_stages > 1:
            raise Unavailable("activation_checkpointing")
        if len(set(given)) > 1:
            return tuple(given)
        path = "training.activation_checkpointing"
        self.provenance[path] = replace(self.provenance[path], value=given[0])
        return str(given[0])

    @property
    def lr_scheduler(self) -> LrScheduler | None:
        """How the learning rate changes; None when it stays."""
        path = ("training", "lr_scheduler")
        if self.get(*path) is None:
            return None
        kind, lowest = self.get(*path, "type"), float(self.get(*path, "min_lr"))
        start, shape = self.if_given(*path, "warmup_start_lr"), str(self.get(*path, "decay_type"))
        ends = kind not in ("constant", "inverse_sqrt")
        falls = kind == "wsd" and self.given(*path, "decay_steps")
        return LrScheduler(
            type=kind,
            warmup_steps=self._warmup_steps(path),
            min_lr=lowest,
            warmup_start_lr=lowest if start is None else float(start),
            decay_steps=int(self.get(*path, "decay_steps")) if falls else None,
            decay_type=shape if falls else None,
            total_steps=int(self.get(*path, "total_steps")) if ends and self.given(*path, "total_steps") else None,
        )

    @property
    def steps_of_schedule(self) -> int | None:
        """Steps of the whole schedule: total_steps, or else train_steps; None where neither is given."""
        paths = (("training", "lr_scheduler", "total_steps"), ("training", "train_steps"))
        return next((int(self.get(*path)) for path in paths if self.given(*path)), None)

    def _warmup_steps(self, path: tuple[str, ...]) -> int:
        """Whole steps of the warm-up, in whichever unit it is given.

        Raises:
            Unavailable: the warm-up or what it is a share of is missing or wrong, which other diagnostics say.
        """
        unit = next((unit for unit in WARMUP_UNITS if self.lookup((*path, f"warmup_{unit}")) is not MISSING), None)
        if unit is None:
            raise Unavailable("warmup_steps")
        given = self.get(*path, f"warmup_{unit}")
        if unit == "steps":
            return int(given)
        if unit == "ratio":
            end = self.steps_of_schedule
            if end is None:
                raise Unavailable("train_steps")
            steps, how = math.ceil(given * end), f"warmup_ratio {given:g} · {end} steps"
        else:
            batch, how = self.global_batch_size, f"warmup_{unit} {given} / global_batch_size {self.global_batch_size}"
            if unit == "tokens":
                batch, how = batch * self.sequence_length, f"{how} / sequence_length {self.sequence_length}"
            steps = -(-given // batch)
        return int(self.record((*path, "warmup_steps"), steps, Origin.DERIVED, how))

    @property
    def router(self) -> Router | None:
        """Losses of routers, the move of their bias, and a limit of rows; None where the spec says nothing of them."""
        path = ("training", "router")
        if not self.given(*path):
            return None
        rate, capacity = (self.if_given(*path, name) for name in ("bias_update_rate", "expert_capacity"))
        found = Router(
            aux_loss=float(self.get(*path, "aux_loss")),
            aux_loss_scope=str(self.get(*path, "aux_loss_scope")),
            z_loss=float(self.get(*path, "z_loss")),
            bias_update_rate=None if rate is None else float(rate),
            expert_capacity=None if capacity is None else float(capacity),
        )
        return found if found.said else None

    @property
    def optimizer(self) -> Optimizer:
        """What updates the weights; what its type does not know is None."""
        path, kind = ("training", "optimizer"), str(self.get("training", "optimizer", "type"))

        def own(key: str) -> Any:
            return self.get(*path, key) if self.given(*path, key) else OPTIMIZER_KEYS[kind].get(key)

        start, style = (self.if_given(*path, name) for name in ("start_weight_decay", "weight_decay_style"))
        first, second = self.get(*path, "betas")
        return Optimizer(
            type=kind,
            lr=self.lr,
            betas=(float(first), float(second)),
            eps=float(self.get(*path, "eps")),
            weight_decay=float(self.get(*path, "weight_decay")),
            **{key: own(key) for key in ("momentum", "nesterov", "ns_steps", "ns_dtype", "adjust_lr")},
            no_weight_decay=self.if_given(*path, "no_weight_decay"),
            start_weight_decay=None if start is None else float(start),
            weight_decay_style=None if start is None else str(style or "linear"),
        )

    def training(self) -> Training:
        """The whole section."""
        steps = self.get("training", "train_steps")
        return Training(
            eval_global_batch_size=self.eval_batch("global_batch_size", self.global_batch_size),
            eval_micro_batch_size=self.eval_batch("micro_batch_size", self.micro_batch_size),
            gradient_clipping=float(self.get("training", "gradient_clipping")),
            loss_scale=float(self.get("training", "loss_scale")),
            train_steps=None if steps is None else int(steps),
            seed=int(self.get("training", "seed")),
            **{name: getattr(self, name) for name in _SAME},
        )


_SAME = tuple(one.name for one in fields(Training) if one.name in dir(TrainingValues))
"""Fields of `Training` that `TrainingValues` has by the same names."""


_NAME = ("parallelism", "cp_implementation")
_SIZES = ("parallelism", "hierarchical_cp_sizes")
AUTO = "auto"


class Resolution(ModelValues, TrainingValues):
    """The values of a spec. The arguments are those of `SpecReader`."""

    def spec(self) -> Spec:
        """The resolved spec.

        Raises:
            Unavailable: an error was reported that leaves a value undecided.
        """
        return Spec(
            name=self.get("name"),
            model=self.model(),
            cluster=self.cluster,
            parallelism=self.parallelism(self.context_parallel),
            training=self.training(),
            zero_stage=self.zero_stage,
            offload_optimizer=self.offload_of("optimizer"),
            offload_param=self.offload_of("param"),
            deepspeed=dict(self.get("deepspeed")),
            provenance=dict(sorted(self.provenance.items())),
            megatron=dict(self.get("backends", "megatron")) if self.given("backends", "megatron") else {},
        )

    @functools.cached_property
    def work(self) -> Workload:
        """The step of the resolved spec, which several rules ask about.

        Raises:
            Unavailable: as `spec`.
            ValueError: the layout cannot be cut.
        """
        return workload_of(self.spec())

    # What `parallelism.cp_implementation` and its sizes say.

    @property
    def named_implementation(self) -> str:
        """The implementation that is written, or the default; it may be "auto".

        Raises:
            Unavailable: it is invalid.
        """
        if self.is_invalid(_NAME):
            raise Unavailable("cp_implementation")
        return str(self.lookup(_NAME) if self.given(*_NAME) else default("spec", _NAME))

    @property
    def given_sizes(self) -> tuple[int, int] | None:
        """The ranks of the inner and of the outer level that are written.

        Raises:
            Unavailable: they are invalid.
        """
        if not self.given(*_SIZES):
            if self.is_invalid(_SIZES):
                raise Unavailable("hierarchical_cp_sizes")
            return None
        inner, outer = self.get(*_SIZES)
        return int(inner), int(outer)

    @functools.cached_property
    def context_parallel(self) -> ContextParallel:
        """The implementation with its sizes.

        Raises:
            Unavailable: it cannot run on these ranks, which a rule says.
        """
        found = self._context_parallel()
        origin = Origin.SPEC if self.given(*_NAME) else Origin.DEFAULT
        self.record(_NAME, found.implementation.value, origin)
        self.record(_SIZES, found.sizes and list(found.sizes), Origin.SPEC if found.sizes else Origin.DEFAULT)
        return found

    def _context_parallel(self) -> ContextParallel:
        cp, name, sizes = self.axis(Axis.CP), self.named_implementation, self.given_sizes
        if cp == 1 or (name == AUTO and not self.shape.attends):
            # Nobody shares a sequence, or asks for keys: there is nothing to choose.
            why = "cp 1" if cp == 1 else "no layer attends"
            self.record(_NAME, CpImplementation.RING.value, Origin.DERIVED, why)
            return ContextParallel(CpImplementation.RING, cp)
        if name == AUTO or (sizes is None and CpImplementation(name).has_levels):
            return self._chosen(name, sizes)
        if not CpImplementation(name).has_levels:
            return ContextParallel(CpImplementation(name), cp)
        assert sizes is not None
        if sizes[0] * sizes[1] != cp:
            raise Unavailable("hierarchical_cp_sizes")
        return ContextParallel(CpImplementation(name), cp, sizes)

    def _chosen(self, name: str, sizes: tuple[int, int] | None) -> ContextParallel:
        """What the cost model takes of all that is open."""
        work = self._workload()
        possible, refused = candidates(work)
        if name != AUTO:
            possible = [one for one in possible if one.implementation.value == name]
        if sizes is not None:
            possible = [one for one in possible if one.sizes in (None, sizes)]
        if not possible:
            raise Unavailable("cp_implementation")
        chosen = cheapest(work, possible).context
        attention = attention_seconds(work, time_values(work))
        best: dict[object, str] = {}
        for one in costs(work, possible):
            key = one.context.implementation if name == AUTO else one.context.sizes
            best.setdefault(key, f"{one.context.name} {format_milliseconds(one.seconds)}")
        listed = ", ".join(best.values())
        why = (
            f"cost model, for each layer and micro-batch beyond {format_milliseconds(attention)} of attention: "
            f"{listed}; the simplest within 2 % of the fastest"
        )
        if name == AUTO:
            impossible = dict.fromkeys(f"{kind.value} ({fault})" for kind, _, fault in refused)
            why += "".join(f"; not {one}" for one in impossible)
            self.record(_NAME, chosen.implementation.value, Origin.DERIVED, why)
        if chosen.sizes is not None and sizes is None:
            self.record(_SIZES, list(chosen.sizes), Origin.DERIVED, why)
        return chosen

    def _workload(self) -> Workload:
        """The layout as far as attention depends on it."""
        cluster = self.cluster
        if cluster.preset is None and cluster.accelerator not in accelerators():
            raise Unavailable("accelerator")
        sizes: dict[str, Any] = {axis.value: self.axis(axis) for axis in AXES}
        return Workload(
            shape=self.shape,
            nodes=cluster.nodes,
            gpus_per_node=cluster.gpus_per_node,
            accelerator=cluster.accelerator,
            preset=cluster.preset,
            sequence_length=self.sequence_length,
            micro_batch=self.micro_batch_size,
            micro_batches=1,
            **sizes,
            order=self.order,
            cp_layout=self.cp_layout.value,
            element_bytes=self.precision.bytes,
            recompute=self.activation_checkpointing,
        )
