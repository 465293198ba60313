"""The plan: the one artefact that the runtime reads. Everything in it is decided; a run executes it as it stands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any

from .cost.memory import static_memory
from .diagnostics import Diagnostic
from .layout.groups import GROUP_AXES, Groups
from .layout.optimizer import padded_numel
from .layout.sequence import CpLayout, balance, ring_schedule, token_ranges
from .layout.stages import even_stages
from .layout.tensor import TensorLayout, tensor_layout
from .model.hf_config import shape_from_config
from .model.parameters import Parameter, ParameterTable, parameter_table
from .spec import Cluster, Model, Optimizer, Origin, Parallelism, Precision, Provenance, Spec, Training
from .version import __version__

PLAN_VERSION = 1

REFUSAL_PREFIX = "X"
"""Codes of the rules that say what the runtime cannot execute."""


class PlanError(ValueError):
    """A plan that cannot be read or used; the message is meant for the user."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the runtime will not execute a plan."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A resolved spec with its identity.

    `spec_hash` is that of the spec the plan was compiled from, `plan_hash` that of the plan itself: ranks compare it before they start.
    """

    spec: Spec
    spec_hash: str
    refusals: tuple[Refusal, ...] = ()
    compiler_version: str = __version__

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.spec.cluster.world_size

    @property
    def kv_replicas(self) -> int:
        """Consecutive tp ranks that hold the same kv heads."""
        heads, tp = self.spec.model.shape.num_key_value_heads, self.spec.parallelism.tp
        return tp // heads if tp > heads else 1

    @property
    def groups(self) -> Groups:
        """The process groups."""
        return Groups(self.spec.parallelism.grid, self.kv_replicas)

    @property
    def parameters(self) -> ParameterTable:
        """Every parameter of the model."""
        return parameter_table(self.spec.model.shape)

    def tensors(self) -> dict[str, tuple[Parameter, TensorLayout]]:
        """Every parameter row by its name (`{layer}` stands for the layer's index) and how tp cuts it."""
        parallelism = self.spec.parallelism
        divisor = parallelism.make_vocab_size_divisible_by
        return {
            parameter.name: (parameter, tensor_layout(parameter, parallelism.tp, vocab_divisible_by=divisor))
            for parameter in self.parameters
        }

    def to_json(self) -> dict[str, Any]:
        """The plan as it is written; `plan_hash` covers everything else."""
        body = _body(self)
        return {**body, "plan_hash": _digest(body)}

    @property
    def plan_hash(self) -> str:
        """The plan's own identity."""
        return _digest(_body(self))

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: it is of another version, incomplete, or was edited by hand.
        """
        version, compiler = tree.get("plan_version"), tree.get("compiler_version")
        if version != PLAN_VERSION:
            raise PlanError(
                f"plan_version is {version!r}, this is parcompile {__version__}, which reads {PLAN_VERSION}"
            )
        if compiler != __version__:
            raise PlanError(f"the plan was compiled by parcompile {compiler}, this is {__version__}: compile it again")
        try:
            plan = cls(_spec(tree), tree["spec_hash"], tuple(Refusal(**one) for one in tree["runtime"]["refusals"]))
            same = plan.to_json() == dict(tree)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"the plan is incomplete or damaged ({error!r}): compile it again") from None
        if not same:
            raise PlanError("the plan was changed after it was compiled: change the spec and compile it again")
        return plan

    @classmethod
    def load(cls, path: str | FilePath) -> Plan:
        """Reads `plan.json`, or the folder that holds it.

        Raises:
            PlanError: the file cannot be read, or is not a plan of this version.
        """
        file = FilePath(path)
        if file.is_dir():
            file = file / "plan.json"
        try:
            tree = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"{file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise PlanError(f"{file} is not valid JSON: {error}") from None
        if not isinstance(tree, dict) or "plan_version" not in tree:
            raise PlanError(f"{file} is not a plan: compile a spec with `parcompile spec.json -o DIR`")
        try:
            return cls.from_json(tree)
        except PlanError as error:
            raise PlanError(f"{file}: {error}") from None


def compile_plan(spec: Spec, tree: object, diagnostics: list[Diagnostic]) -> Plan:
    """The plan of a resolved spec. `tree` is the spec as it was written; `diagnostics` say what the runtime refuses."""
    refusals = tuple(
        Refusal(found.code, found.message) for found in diagnostics if found.code.startswith(REFUSAL_PREFIX)
    )
    # The model's configuration may stand in a file beside the spec, so it is part of the spec's identity.
    return Plan(spec, _digest({"spec": tree, "model": dict(spec.model.hf_config)}), refusals)


def _digest(tree: object) -> str:
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _body(plan: Plan) -> dict[str, Any]:
    spec = plan.spec
    body = {
        "plan_version": PLAN_VERSION,
        "compiler_version": plan.compiler_version,
        "spec_hash": plan.spec_hash,
        "name": spec.name,
        "cluster": {**asdict(spec.cluster), "world_size": plan.world_size},
        "parallelism": {
            **asdict(spec.parallelism),
            "order": "-".join(spec.parallelism.order),
            "cp_layout": spec.parallelism.cp_layout.value,
        },
        "model": {"source": spec.model.source, "hf_config": dict(spec.model.hf_config)},
        "training": _training(spec),
        "zero": {"stage": spec.zero_stage},
        "deepspeed": dict(spec.deepspeed),
        "runtime": {"executable": not plan.refusals, "refusals": [asdict(refusal) for refusal in plan.refusals]},
        "groups": _groups(plan),
        "tensors": [_tensor_row(parameter, layout) for parameter, layout in plan.tensors().values()],
        "sequence": _sequence(spec),
        "optimizer_shards": _optimizer_shards(spec),
        "stages": [
            {
                "layers": [stage.layers.start, stage.layers.stop],
                "has_embedding": stage.has_embedding,
                "has_head": stage.has_head,
            }
            for stage in even_stages(spec.model.shape.num_hidden_layers, spec.parallelism.pp)
        ],
        "static_memory": asdict(static_memory(spec)),
        "provenance": {
            path: {"value": found.value, "origin": found.origin.value, "detail": found.detail}
            for path, found in spec.provenance.items()
        },
    }
    # As a reader will get it: tuples become lists, enums their values.
    return dict(json.loads(json.dumps(body)))


def _training(spec: Spec) -> dict[str, Any]:
    training = asdict(spec.training)
    training["precision"] = spec.training.precision.value
    training["gradient_accumulation_dtype"] = spec.training.gradient_accumulation_dtype.value
    training["optimizer"]["betas"] = list(spec.training.optimizer.betas)
    return training


def _groups(plan: Plan) -> dict[str, Any]:
    grid = plan.spec.parallelism.grid
    strides = {axis: {"size": grid.size((axis,)), "stride": grid.stride(axis)} for axis in grid.order if axis != "ep"}
    groups: dict[str, Any] = {name: {"axes": list(axes), "size": grid.size(axes)} for name, axes in GROUP_AXES.items()}
    if plan.kv_replicas > 1:
        groups["kv-replica"] = {"axes": ["tp"], "size": plan.kv_replicas}
    return {"axes": strides, "groups": groups}


def _tensor_row(parameter: Parameter, layout: TensorLayout) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "layers": None if parameter.layers is None else [parameter.layers.start, parameter.layers.stop],
        "shape": list(parameter.shape),
        "padded_shape": list(layout.full_shape),
        "local_shape": list(layout.local_shape),
        "split_dim": layout.dim,
        "ranges": None if layout.ranges is None else [[list(piece) for piece in pieces] for pieces in layout.ranges],
        "replicas": layout.replicas,
        "expert_dim": parameter.expert_dim,
    }


def _sequence(spec: Spec) -> dict[str, Any]:
    parallelism, length = spec.parallelism, spec.training.sequence_length
    layout = parallelism.cp_layout
    return {
        "layout": layout.value,
        "balance": float(balance(layout, parallelism.cp)),
        "ranks": [
            {
                "tokens": [[piece.start, piece.stop] for piece in token_ranges(layout, parallelism.cp, rank, length)],
                "ring": [asdict(step) for step in ring_schedule(layout, parallelism.cp, rank)],
            }
            for rank in range(parallelism.cp)
        ],
    }


def _optimizer_shards(spec: Spec) -> dict[str, Any]:
    shards = spec.parallelism.zero_shards
    memory = static_memory(spec)
    padded = padded_numel(memory.numel, shards)
    return {
        "rule": "DeepSpeed: pad to a multiple of 2 · shards, then cut evenly",
        "shards": shards,
        "numel": memory.numel,
        "padded_numel": padded,
        "shard_numel": padded // shards,
    }


def _spec(tree: Mapping[str, Any]) -> Spec:
    cluster, parallelism, training = dict(tree["cluster"]), dict(tree["parallelism"]), dict(tree["training"])
    cluster.pop("world_size")
    parallelism["order"] = tuple(parallelism["order"].split("-"))
    parallelism["cp_layout"] = CpLayout(parallelism["cp_layout"])
    optimizer = dict(training.pop("optimizer"))
    optimizer["betas"] = tuple(optimizer["betas"])
    for name in ("precision", "gradient_accumulation_dtype"):
        training[name] = Precision(training[name])
    config = tree["model"]["hf_config"]
    return Spec(
        name=tree["name"],
        model=Model(tree["model"]["source"], shape_from_config(config), config),
        cluster=Cluster(**cluster),
        parallelism=Parallelism(**parallelism),
        training=Training(**training, optimizer=Optimizer(**optimizer)),
        zero_stage=tree["zero"]["stage"],
        deepspeed=tree["deepspeed"],
        provenance={
            path: Provenance(found["value"], Origin(found["origin"]), found["detail"])
            for path, found in tree["provenance"].items()
        },
    )
