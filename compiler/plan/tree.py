"""The plan as the JSON tree that is written, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import UnionType
from typing import Any, TypeVar, get_type_hints

from parcompile.cost.memory import static_memory
from parcompile.layout.context_parallel import CpImplementation
from parcompile.layout.grid import Axis
from parcompile.layout.sequence import CpLayout
from parcompile.machines.preset import preset_from_tree, preset_tree
from parcompile.model.hf_config import shape_from_config
from parcompile.spec import (
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
from parcompile.spec.workload import workload_of
from parcompile.text.typed import shown
from parcompile.version import __version__

from .plan import Plan, PlanError, Refusal
from .sections import groups, optimizer_shards, sequence, stage_rows, tensors, topology

PLAN_VERSION = 1
KEYS = (
    *("plan_version", "compiler_version", "spec_hash", "name", "cluster", "parallelism", "model", "training", "zero"),
    *("deepspeed", "runtime", "groups", "topology", "tensors", "sequence", "optimizer_shards", "stages"),
    *("static_memory", "provenance", "plan_hash"),
)
"""The keys of a plan, in the order in which they are written."""


def digest(tree: object) -> str:
    """The identity of a JSON tree, whatever the order of its keys."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def plan_tree(plan: Plan) -> dict[str, Any]:
    """The plan as it is written."""
    return {**_body(plan), "plan_hash": plan.plan_hash}


def identified(plan: Plan) -> Plan:
    """The plan with the hash of what it says now."""
    return replace(plan, plan_hash=digest(_body(plan)))


def plan_from_tree(tree: Mapping[str, Any]) -> Plan:
    """The plan that `plan_tree` wrote.

    Raises:
        PlanError: it is of another version, incomplete, or was edited by hand.
    """
    version, compiler = tree.get("plan_version"), tree.get("compiler_version")
    if version != PLAN_VERSION:
        raise PlanError(f"plan_version is {version!r}, this is parcompile {__version__}, which reads {PLAN_VERSION}")
    if compiler is None:
        raise PlanError("the plan does not say which parcompile compiled it (compiler_version): compile it again")
    if compiler != __version__:
        raise PlanError(f"the plan was compiled by parcompile {compiler}, this is {__version__}: compile it again")
    body = {key: value for key, value in tree.items() if key != "plan_hash"}
    if digest(body) != tree.get("plan_hash"):
        missing = ", ".join(key for key in KEYS if key not in tree)
        if missing:
            raise PlanError(f"the plan is incomplete or damaged (it lacks {missing}): compile it again")
        raise PlanError("the plan was changed after it was compiled: change the spec and compile it again")
    try:
        refusals = tuple(Refusal(**one) for one in tree["runtime"]["refusals"])
        plan = Plan(spec_from_tree(tree), tree["spec_hash"], tree["plan_hash"], refusals)
        # A hash that was made to fit does not help: what the values give is compared with what stands there.
        same = _body(plan) == body
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise PlanError(f"the plan is incomplete or damaged ({error!r}): compile it again") from None
    if not same:
        raise PlanError("the plan was changed after it was compiled: change the spec and compile it again")
    return plan


def _body(plan: Plan) -> dict[str, Any]:
    """Everything of a plan but its own hash."""
    spec = plan.spec
    body = {
        "plan_version": PLAN_VERSION,
        "compiler_version": plan.compiler_version,
        "spec_hash": plan.spec_hash,
        "name": spec.name,
        "cluster": _cluster(spec.cluster),
        "parallelism": {
            **asdict(spec.parallelism),
            "order": "-".join(spec.parallelism.order),
            "cp_layout": spec.parallelism.cp_layout.value,
            "cp_implementation": spec.parallelism.cp_implementation.value,
        },
        "model": {"source": spec.model.source, "hf_config": dict(spec.model.hf_config)},
        "training": _training(spec),
        "zero": {"stage": spec.zero_stage},
        "deepspeed": dict(spec.deepspeed),
        **({"backends": {"megatron": dict(spec.megatron)}} if spec.megatron else {}),
        "runtime": {"executable": not plan.refusals, "refusals": [asdict(refusal) for refusal in plan.refusals]},
        "groups": groups(plan),
        "topology": topology(plan),
        "tensors": tensors(plan),
        "sequence": sequence(spec),
        "optimizer_shards": optimizer_shards(spec),
        "stages": stage_rows(spec),
        "static_memory": asdict(static_memory(workload_of(spec))),
        "provenance": {
            path: {"value": found.value, "origin": found.origin.value, "detail": found.detail}
            for path, found in spec.provenance.items()
        },
    }
    # As a reader will get it: tuples become lists, enums their values.
    return dict(json.loads(json.dumps(body)))


def spec_from_tree(tree: Mapping[str, Any]) -> Spec:
    """The spec of a plan's tree.

    Raises:
        KeyError, TypeError, ValueError: the tree is not a plan's.
    """
    cluster, parallelism, training = dict(tree["cluster"]), dict(tree["parallelism"]), dict(tree["training"])
    cluster.pop("world_size")
    preset = cluster.pop("preset")
    parallelism["order"] = tuple(map(Axis, parallelism["order"].split("-")))
    parallelism["cp_layout"] = CpLayout(parallelism["cp_layout"])
    parallelism["cp_implementation"] = CpImplementation(parallelism["cp_implementation"])
    levels = parallelism["hierarchical_cp_sizes"]
    parallelism["hierarchical_cp_sizes"] = None if levels is None else tuple(levels)
    optimizer = dict(training.pop("optimizer"))
    optimizer["betas"] = tuple(optimizer["betas"])
    schedule = training.pop("lr_scheduler")
    for name in ("precision", "gradient_accumulation_dtype"):
        training[name] = Precision(training[name])
    if not isinstance(training["activation_checkpointing"], str):
        training["activation_checkpointing"] = tuple(training["activation_checkpointing"])
    config = tree["model"]["hf_config"]
    spec = Spec(
        name=tree["name"],
        model=Model(tree["model"]["source"], shape_from_config(config), config),
        cluster=_typed(Cluster(**{**cluster, "preset": None if preset is None else preset_from_tree(preset)})),
        parallelism=_typed(Parallelism(**parallelism)),
        training=_typed(
            Training(
                **training,
                optimizer=_typed(Optimizer(**optimizer)),
                lr_scheduler=None if schedule is None else _typed(LrScheduler(**schedule)),
            )
        ),
        zero_stage=tree["zero"]["stage"],
        deepspeed=tree["deepspeed"],
        megatron=tree.get("backends", {}).get("megatron", {}),
        provenance={
            path: _typed(Provenance(found["value"], Origin(found["origin"]), found["detail"]))
            for path, found in tree["provenance"].items()
        },
    )
    return _typed(spec)


Values = TypeVar("Values")
_PLAIN = frozenset({bool, int, float, str, type(None)})


def _typed(values: Values) -> Values:
    """The values, whose plain ones have the types that their class names.

    Raises:
        TypeError: one has another.
    """
    for name, hint in get_type_hints(type(values)).items():
        kinds, value = hint.__args__ if isinstance(hint, UnionType) else (hint,), getattr(values, name)
        if _PLAIN.issuperset(kinds) and type(value) not in kinds and not (float in kinds and type(value) is int):
            raise TypeError(f"{name} is {shown(value)}")
    return values


def _cluster(cluster: Cluster) -> dict[str, Any]:
    return {
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "accelerator": cluster.accelerator,
        "preset": None if cluster.preset is None else preset_tree(cluster.preset),
        "world_size": cluster.world_size,
    }


def _training(spec: Spec) -> dict[str, Any]:
    training = asdict(spec.training)
    training["precision"] = spec.training.precision.value
    training["gradient_accumulation_dtype"] = spec.training.gradient_accumulation_dtype.value
    training["optimizer"]["betas"] = list(spec.training.optimizer.betas)
    return training
