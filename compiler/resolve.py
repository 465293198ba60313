"""Decides every value of a spec, lazily, and remembers where each comes from.

Rules read a `Resolution`. A value that is wrong, or that depends on one that is, raises `Unavailable` when it is read,
and the rule that asked stays quiet: each mistake is reported once, where it is. When no rule complains,
`Resolution.spec()` is complete.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from pathlib import Path as FilePath
from typing import Any

from .diagnostics import Path, format_path
from .layout.grid import AXES
from .layout.sequence import CpLayout
from .layout.stages import Slots
from .layout.tensor import padded_vocab_size
from .model.hf_config import ModelConfigError, shape_from_config
from .model.parameters import ParameterTable, parameter_table
from .model.presets import find_preset
from .model.shape import ModelShape
from .spec import (
    Cluster,
    LrScheduler,
    Model,
    Optimizer,
    Origin,
    Parallelism,
    Precision,
    Provenance,
    Spec,
    Training,
)

_MISSING = object()


class Unavailable(Exception):  # noqa: N818 -- not an error: a value that another diagnostic already speaks of
    """A value cannot be had because something it depends on is missing or wrong."""


class Resolution:
    """The values of a spec.

    Args:
        tree: the parsed spec. Values that the schema refused are named in `invalid` and are never used.
        invalid: paths at which the schema found something wrong.
        folder: the folder of the spec: paths in the spec are relative to it.
    """

    def __init__(self, tree: object, invalid: Collection[Path] = (), folder: FilePath | None = None) -> None:
        self.tree: Mapping[str, Any] = tree if isinstance(tree, dict) else {}
        self._invalid = frozenset(invalid)
        self._folder = folder or FilePath()
        self.provenance: dict[str, Provenance] = {}

    # -- reading the spec ---------------------------------------------------------------------------------------------

    def given(self, *path: str) -> bool:
        """Whether the spec has a usable value at this path."""
        return self._lookup(path) is not _MISSING and not self._is_invalid(path)

    def get(self, *path: str, default: object = _MISSING) -> Any:
        """The spec's value at a path, or the default.

        Raises:
            Unavailable: the value is invalid, or missing without a default.
        """
        if self._is_invalid(path):
            raise Unavailable(format_path(path))
        value = self._lookup(path)
        if isinstance(value, list) and any(found[: len(path)] == path for found in self._invalid):
            # A list with a wrong entry is wrong as a whole.
            raise Unavailable(format_path(path))
        if value is _MISSING:
            if default is _MISSING:
                raise Unavailable(format_path(path))
            return self._record(path, default, Origin.DEFAULT)
        return self._record(path, value, Origin.SPEC)

    def _lookup(self, path: tuple[str, ...]) -> object:
        node: object = self.tree
        for step in path:
            if not isinstance(node, dict) or step not in node:
                return _MISSING
            node = node[step]
        return node

    def _is_invalid(self, path: tuple[str, ...]) -> bool:
        return any(path[:length] in self._invalid for length in range(len(path) + 1))

    def _record(self, path: tuple[str, ...], value: Any, origin: Origin, detail: str = "") -> Any:
        self.provenance.setdefault(format_path(path), Provenance(value, origin, detail))
        return value

    # -- cluster ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def cluster(self) -> Cluster:
        """The machines."""
        return Cluster(
            nodes=int(self.get("cluster", "nodes", default=1)),
            gpus_per_node=int(self.get("cluster", "gpus_per_node")),
            accelerator=self.get("cluster", "accelerator", default="h100-sxm"),
        )

    @property
    def world_size(self) -> int:
        """Ranks of the run: nodes · gpus_per_node."""
        return self.cluster.world_size

    # -- model --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def model_config(self) -> Mapping[str, Any]:
        """The Hugging Face configuration of the model.

        Raises:
            ModelConfigError: the preset or the file does not exist or holds no configuration.
        """
        given = self.get("model")
        if "preset" in given:
            preset = find_preset(self.get("model", "preset"))
            if preset is None:
                raise ModelConfigError(f"there is no preset {given['preset']!r}", "preset")
            return preset.config
        if "hf_config" in given:
            return self._read_config(FilePath(self.get("model", "hf_config")))
        if any(path[:1] == ("model",) for path in self._invalid):
            # A dimension that is missing or wrong has been reported: what remains describes no model.
            raise Unavailable("model")
        return {key: self.get("model", key) for key in given}

    def _read_config(self, relative: FilePath) -> Mapping[str, Any]:
        path = self._folder / relative
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelConfigError(f"{path} cannot be read: {error.strerror}", "hf_config") from None
        except ValueError as error:
            raise ModelConfigError(f"{path} is not valid JSON: {error}", "hf_config") from None
        if not isinstance(config, dict):
            raise ModelConfigError(f"{path} holds no JSON object", "hf_config")
        return config

    @functools.cached_property
    def shape(self) -> ModelShape:
        """The dimensions of the model."""
        try:
            return shape_from_config(self.model_config)
        except ModelConfigError:
            raise Unavailable("model") from None

    @functools.cached_property
    def parameters(self) -> ParameterTable:
        """Every parameter of the model."""
        return parameter_table(self.shape)

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary with padding."""
        return padded_vocab_size(self.shape.vocab_size, self.axis("tp"), self.make_vocab_size_divisible_by)

    # -- parallelism --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def auto_axes(self) -> tuple[str, ...]:
        """The axes that the world size decides: those that are "auto", and dp when it is left out."""
        found = [axis for axis in ("tp", "cp", "pp", "dp") if self._axis_text(axis) == "auto"]
        return tuple(found)

    def _axis_text(self, axis: str) -> object:
        node = self._lookup(("parallelism", axis))
        if node is _MISSING:
            # Left out, dp takes what the world leaves, unless another axis is to.
            others = ("tp", "cp", "pp")
            return "auto" if axis == "dp" and all(self._axis_text(other) != "auto" for other in others) else 1
        return node

    def axis(self, name: str) -> int:
        """The size of an axis.

        Raises:
            Unavailable: it is invalid, or "auto" and the world does not decide it.
        """
        if name == "ep":
            return int(self.get("parallelism", "ep", default=1))
        if name not in self.auto_axes:
            return int(self.get("parallelism", name, default=1))
        if len(self.auto_axes) > 1 or self._is_invalid(("parallelism", name)):
            raise Unavailable(name)
        rest = 1
        for other in ("tp", "cp", "pp", "dp"):
            if other != name:
                rest *= self.axis(other)
        if self.world_size % rest:
            raise Unavailable(name)
        others = " · ".join(f"{axis} {self.axis(axis)}" for axis in ("tp", "cp", "pp", "dp") if axis != name)
        size = self.world_size // rest
        self._record(("parallelism", name), size, Origin.DERIVED, f"world {self.world_size} / ({others})")
        return size

    @property
    def order(self) -> tuple[str, ...]:
        """The axes, innermost first. An axis that is not named comes last: it has size 1 (rule W004)."""
        named = tuple(self.get("parallelism", "order", default="-".join(AXES)).split("-"))
        return named + tuple(axis for axis in AXES if axis not in named)

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between tensor-parallel blocks are split over tp."""
        return bool(self.get("parallelism", "sequence_parallel", default=False))

    @property
    def cp_layout(self) -> CpLayout:
        """How the sequence is dealt to the cp ranks."""
        return CpLayout(self.get("parallelism", "cp_layout", default="zigzag"))

    @property
    def make_vocab_size_divisible_by(self) -> int:
        """The divisor of the padded vocabulary, per tp rank."""
        return int(self.get("parallelism", "make_vocab_size_divisible_by", default=128))

    @property
    def slots(self) -> Slots:
        """How the layers are counted out to the pipeline stages."""
        first, last = (
            self.get("parallelism", f"num_layers_in_{end}_pipeline_stage", default=None) for end in ("first", "last")
        )
        embedding, loss = (
            bool(self.get("parallelism", f"account_for_{part}_in_pipeline_split", default=False))
            for part in ("embedding", "loss")
        )
        return Slots(
            self.axis("pp"),
            self.virtual_stages,
            embedding=embedding,
            loss=loss,
            first=None if first is None else int(first),
            last=None if last is None else int(last),
        )

    @property
    def virtual_stages(self) -> int:
        """Stages that each pp rank holds."""
        return int(self.get("parallelism", "num_virtual_stages_per_pipeline_rank", default=1))

    @property
    def microbatch_group_size(self) -> int | None:
        """Micro-batches that run one after the other on a virtual stage; None without virtual stages."""
        name = "microbatch_group_size_per_virtual_pipeline_stage"
        if self.virtual_stages == 1:
            return None
        if self.given("parallelism", name):
            return int(self.get("parallelism", name))
        return int(self._record(("parallelism", name), self.axis("pp"), Origin.DERIVED, f"pp {self.axis('pp')}"))

    # -- training -----------------------------------------------------------------------------------------------------

    @property
    def sequence_length(self) -> int:
        """Tokens of a whole sequence."""
        return int(self.get("training", "sequence_length"))

    @property
    def micro_batch_size(self) -> int:
        """Sequences of one forward pass of one model copy."""
        name, steps = "micro_batch_size", "gradient_accumulation_steps"
        if self.given("training", name) or not self.given("training", "global_batch_size"):
            return int(self.get("training", name, default=1))
        if not self.given("training", steps):
            return int(self.get("training", name, default=1))
        total, passes, dp = self._batch("global_batch_size"), self._batch(steps), self.axis("dp")
        return self._whole_ratio(name, total, passes * dp, f"global_batch_size {total} / ({steps} {passes} · dp {dp})")

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes of one optimizer step."""
        name = "gradient_accumulation_steps"
        if self.given("training", name) or not self.given("training", "global_batch_size"):
            return int(self.get("training", name, default=1))
        total, micro, dp = self._batch("global_batch_size"), self.micro_batch_size, self.axis("dp")
        return self._whole_ratio(name, total, micro * dp, f"global_batch_size {total} / (micro {micro} · dp {dp})")

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step."""
        if self.given("training", "global_batch_size"):
            return self._batch("global_batch_size")
        micro, passes, dp = self.micro_batch_size, self.gradient_accumulation_steps, self.axis("dp")
        equation = f"micro {micro} · gradient_accumulation_steps {passes} · dp {dp}"
        self.get("training", "global_batch_size", default=None)
        path = "training.global_batch_size"
        self.provenance[path] = Provenance(micro * passes * dp, Origin.DERIVED, equation)
        return micro * passes * dp

    def _batch(self, name: str) -> int:
        return int(self.get("training", name))

    def eval_batch(self, name: str, training: int) -> int:
        """A batch size of evaluation: that of training unless it is given."""
        path = ("training", f"eval_{name}")
        if self.given(*path):
            return int(self.get(*path))
        return int(self._record(path, training, Origin.DERIVED, f"{name} {training}"))

    def _whole_ratio(self, name: str, total: int, divisor: int, equation: str) -> int:
        if total % divisor:
            raise Unavailable(name)
        self._record(("training", name), total // divisor, Origin.DERIVED, equation)
        return total // divisor

    @property
    def precision(self) -> Precision:
        """The type of weights and activations."""
        return Precision(self.get("training", "precision", default="bf16"))

    @property
    def gradient_accumulation_dtype(self) -> Precision:
        """The type in which gradients are summed."""
        name = "gradient_accumulation_dtype"
        if self.given("training", name):
            return Precision(self.get("training", name))
        self._record(("training", name), self.precision.value, Origin.DERIVED, "the type of the weights")
        return self.precision

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO."""
        return int(self.get("zero", "stage", default=1))

    # -- all of it ----------------------------------------------------------------------------------------------------

    def spec(self) -> Spec:
        """The resolved spec.

        Raises:
            Unavailable: an error was reported that leaves a value undecided.
        """
        return Spec(
            name=self.get("name", default="unnamed"),
            model=self._model(),
            cluster=self.cluster,
            parallelism=self._parallelism(),
            training=self._training(),
            zero_stage=self.zero_stage,
            deepspeed=dict(self.get("deepspeed", default={})),
            provenance=dict(sorted(self.provenance.items())),
        )

    def _model(self) -> Model:
        shape, given = self.shape, self.get("model")
        source = str(given.get("preset") or given.get("hf_config") or "dimensions")
        origin = Origin.PRESET if "preset" in given else Origin.CONFIG if "hf_config" in given else Origin.SPEC
        for key, value in self.model_config.items():
            self._record(("model", key), value, origin, source if origin is not Origin.SPEC else "")
        return Model(source, shape, dict(self.model_config))

    def _parallelism(self) -> Parallelism:
        slots = self.slots
        return Parallelism(
            **{axis: self.axis(axis) for axis in AXES},
            order=self.order,
            sequence_parallel=self.sequence_parallel and self.axis("tp") > 1,
            # One rank holds the whole sequence in order: there is nothing to deal.
            cp_layout=self.cp_layout if self.axis("cp") > 1 else CpLayout.CONTIGUOUS,
            make_vocab_size_divisible_by=self.make_vocab_size_divisible_by,
            account_for_embedding_in_pipeline_split=slots.embedding,
            account_for_loss_in_pipeline_split=slots.loss,
            num_layers_in_first_pipeline_stage=slots.first,
            num_layers_in_last_pipeline_stage=slots.last,
            num_virtual_stages_per_pipeline_rank=slots.virtual,
            microbatch_group_size_per_virtual_pipeline_stage=self.microbatch_group_size,
        )

    def _training(self) -> Training:
        steps = self.get("training", "train_steps", default=None)
        return Training(
            sequence_length=self.sequence_length,
            micro_batch_size=self.micro_batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            global_batch_size=self.global_batch_size,
            eval_global_batch_size=self.eval_batch("global_batch_size", self.global_batch_size),
            eval_micro_batch_size=self.eval_batch("micro_batch_size", self.micro_batch_size),
            precision=self.precision,
            gradient_accumulation_dtype=self.gradient_accumulation_dtype,
            optimizer=Optimizer(
                type=self.get("training", "optimizer", "type", default="adamw"),
                lr=self.lr,
                betas=self._betas(),
                eps=float(self.get("training", "optimizer", "eps", default=1e-8)),
                weight_decay=float(self.get("training", "optimizer", "weight_decay", default=0.1)),
            ),
            lr_scheduler=self.lr_scheduler,
            gradient_clipping=float(self.get("training", "gradient_clipping", default=1.0)),
            activation_checkpointing=self.get("training", "activation_checkpointing", default="none"),
            loss_scale=float(self.get("training", "loss_scale", default=0)),
            train_steps=None if steps is None else int(steps),
            seed=int(self.get("training", "seed", default=1234)),
        )

    @property
    def lr(self) -> float:
        """The highest learning rate."""
        return float(self.get("training", "optimizer", "lr", default=3e-4))

    @property
    def lr_scheduler(self) -> LrScheduler | None:
        """How the learning rate changes; None when it stays."""
        if self.get("training", "lr_scheduler", default=None) is None:
            return None
        return LrScheduler(
            type=self.get("training", "lr_scheduler", "type"),
            warmup_steps=int(self.get("training", "lr_scheduler", "warmup_steps")),
            min_lr=float(self.get("training", "lr_scheduler", "min_lr", default=0.0)),
        )

    def _betas(self) -> tuple[float, float]:
        first, second = self.get("training", "optimizer", "betas", default=[0.9, 0.95])
        return float(first), float(second)
