"""The plan: the one artefact that the runtime reads, and what is made of it.

It is written as a JSON tree, and read back: from its file, or the spec of one that is not at hand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass, replace
from enum import Enum
from functools import cache
from math import prod
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from parcompile.atomic import locate, read_set
from parcompile.cost.memory import static_memory
from parcompile.diagnostics import Diagnostic
from parcompile.layout.groups import Axis
from parcompile.layout.sequence import CpImplementation, CpLayout
from parcompile.machines import preset_from_tree, preset_tree
from parcompile.model.hf_config import shape_from_config
from parcompile.spec import (
    Cluster,
    LrScheduler,
    Model,
    Offload,
    Optimizer,
    Origin,
    Parallelism,
    Precision,
    Provenance,
    RampupBatchSize,
    Router,
    Spec,
    Training,
)
from parcompile.spec.resolve.model import refuse_huge
from parcompile.spec.values import SWITCHES, workload_of
from parcompile.text.typed import shown
from parcompile.user_files import parse_json, read_text
from parcompile.version import __version__

from .plan import Plan, PlanError, Refusal
from .sections import groups, host_section, optimizer_shards, sequence, stage_rows, tensors, topology

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
        written(plan)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise PlanError(f"the plan is incomplete or damaged ({error!r}): compile it again") from None
    if not same:
        raise PlanError("the plan was changed after it was compiled: change the spec and compile it again")
    return plan


def _body(plan: Plan) -> dict[str, Any]:
    """Everything of a plan but its own hash."""
    spec, cluster = plan.spec, plan.spec.cluster
    body = {
        "plan_version": PLAN_VERSION,
        "compiler_version": plan.compiler_version,
        "spec_hash": plan.spec_hash,
        "name": spec.name,
        "cluster": {
            **asdict(replace(cluster, preset=None)),
            "preset": None if cluster.preset is None else preset_tree(cluster.preset),
            "world_size": cluster.world_size,
        },
        "parallelism": {**asdict(spec.parallelism), "order": "-".join(spec.parallelism.order)},
        "model": {"source": spec.model.source, "hf_config": dict(spec.model.hf_config)},
        "training": _training(spec),
        "zero": {
            "stage": spec.zero_stage,
            **{name: _offload(part) for name in _OFFLOADS if (part := getattr(spec, name)) is not None},
        },
        "deepspeed": dict(spec.deepspeed),
        **({"backends": {"megatron": dict(spec.megatron)}} if spec.megatron else {}),
        "runtime": {"executable": not plan.refusals, "refusals": [asdict(refusal) for refusal in plan.refusals]},
        "groups": groups(plan),
        "topology": topology(plan),
        "tensors": tensors(plan),
        "sequence": sequence(spec),
        "optimizer_shards": optimizer_shards(spec),
        "stages": stage_rows(spec),
        "static_memory": static_memory(workload_of(spec))._asdict(),
        **host_section(spec),
        "provenance": {
            path: {"value": found.value, "origin": found.origin.value, "detail": found.detail}
            for path, found in spec.provenance.items()
        },
    }
    # As a reader will get it: tuples become lists, enums their values. JSON has no word for numbers without end.
    return dict(json.loads(json.dumps(body, allow_nan=False)))


def spec_from_tree(tree: Mapping[str, Any]) -> Spec:
    """The spec of a plan's tree.

    Raises:
        KeyError, TypeError, ValueError: the tree is not a plan's.
    """
    cluster = {name: value for name, value in tree["cluster"].items() if name not in ("world_size", "preset")}
    preset = tree["cluster"]["preset"]
    axes = _made(Parallelism, {**tree["parallelism"], "order": tree["parallelism"]["order"].split("-")})
    if not all(axes.size(axis) >= 1 for axis in Axis):
        raise ValueError("an axis has less than 1 rank")
    sizes = axes.hierarchical_cp_sizes
    if axes.cp_implementation.has_levels == (sizes is None) or prod(sizes or [axes.cp]) != axes.cp:
        raise ValueError("hierarchical_cp_sizes do not fit cp")
    config = tree["model"]["hf_config"]
    refuse_huge(config, "model.hf_config")
    return Spec(
        name=_as((str,), "name", tree["name"]),
        model=Model(tree["model"]["source"], shape_from_config(config), config),
        cluster=_made(Cluster, {**cluster, "preset": None if preset is None else preset_from_tree(preset)}),
        parallelism=axes,
        training=_made(Training, tree["training"]),
        zero_stage=_as((int,), "zero_stage", tree["zero"]["stage"]),
        **{name: _made(Offload, part) for name in _OFFLOADS if (part := tree["zero"].get(name)) is not None},
        deepspeed=tree["deepspeed"],
        megatron=tree.get("backends", {}).get("megatron", {}),
        provenance={path: _made(Provenance, found) for path, found in tree["provenance"].items()},
    )


Values = TypeVar("Values")
_OF_JSON = frozenset({bool, int, float, str, type(None), list, dict})


@cache
def _kinds(of: type) -> dict[str, tuple[Any, ...]]:
    """The types that each field of a class may have."""
    hints = get_type_hints(of)
    return {name: hint.__args__ if isinstance(hint, UnionType) else (hint,) for name, hint in hints.items()}


def _made(of: type[Values], tree: Mapping[str, Any]) -> Values:
    """The values of a class as JSON has them, each as the type that the class names.

    Raises:
        KeyError, TypeError, ValueError: one is of another, or the class has no such field.
    """
    kinds: dict[str, tuple[Any, ...]] = _kinds(of)  # type: ignore[arg-type]  # a class can be hashed
    return of(**{name: _as(kinds[name], name, value) for name, value in tree.items()})


def _as(kinds: tuple[Any, ...], name: str, value: Any) -> Any:
    """A value as the first of these types that it can be: an enum, a list, values of a class, or what JSON has itself.

    Raises:
        KeyError, TypeError, ValueError: it can be none.
    """
    inner = [get_args(kind)[:1] for kind in kinds if get_origin(kind) is tuple]
    if isinstance(value, list) and inner:
        return tuple(_as(inner[0], name, one) for one in value)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Enum):
            return kind(value)
        if isinstance(value, dict) and isinstance(kind, type) and is_dataclass(kind):
            return _made(kind, value)
    fits = type(value) in kinds or object in kinds or (float in kinds and type(value) is int)
    if not fits and type(value) in _OF_JSON:
        raise TypeError(f"{name} is {shown(value)}")
    return value


_OFFLOADS = ("offload_optimizer", "offload_param")


def _offload(offload: Offload) -> dict[str, Any]:
    return {key: value for key, value in asdict(offload).items() if value != "torch"}


def _training(spec: Spec) -> dict[str, Any]:
    training = asdict(spec.training)
    training["optimizer"] = {key: value for key, value in training["optimizer"].items() if value is not None}
    if training["lr_scheduler"] is not None and training["lr_scheduler"]["total_steps"] is None:
        del training["lr_scheduler"]["total_steps"]
    for name in (*SWITCHES, "rampup_batch_size"):
        if not training[name]:
            del training[name]
    return training


# Reads a plan from its file.


def plan_file(path: str | Path) -> Path:
    """The file of a plan, which may be given as its folder.

    Raises:
        PlanError: the folder holds none.
    """
    file = Path(path)
    if file.is_dir():
        file = locate(file, "plan.json")
        if not file.exists():
            raise PlanError(f"{path} is a folder without a plan.json: name a file, or the folder of a compiled plan")
    elif file.name == "plan.json":
        file = locate(file.parent, file.name)
    return file


def load_plan(path: str | Path) -> Plan:
    """Reads `plan.json`, or the folder that holds it.

    Raises:
        PlanError: the file cannot be read, or is not a plan of this version.
    """
    file = plan_file(path)
    try:
        tree = parse_json(_content(Path(path), file))
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(tree, dict) or "plan_version" not in tree:
        raise PlanError(f"{file} is not a plan: compile a spec with `parcompile spec.json -o DIR`")
    try:
        return plan_from_tree(tree)
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None


def _content(path: Path, file: Path) -> str:
    """The text of a plan; one that a compilation is moving at this moment is found where it is."""
    if file.name != "plan.json":
        return read_text(file)
    content = read_set(path if path.is_dir() else path.parent, ["plan.json"])["plan.json"]
    return read_text(file) if content is None else content.decode("utf-8")


# The spec of a plan whose file is not at hand: the values that it gave stand in the provenance.


def written(plan: Plan) -> dict[str, Any]:
    """The spec as it was written, as far as its values tell: files beside it are replaced by what they held."""
    spec = plan.spec
    tree: dict[str, Any] = {"version": 1}
    for path, found in sorted(spec.provenance.items()):
        if found.origin is Origin.SPEC:
            *sections, key = path.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[key] = found.value
    if any(found.origin is Origin.CONFIG for found in spec.provenance.values()):
        tree["model"] = dict(spec.model.hf_config)
    if _machine_file(plan) is not None:
        tree["cluster"]["accelerator"] = spec.cluster.accelerator
    return tree


def lacking(plan: Plan) -> str | None:
    """What of a plan whose spec is not at hand a spec alone cannot say: the figures of a machine that a file held."""
    file = _machine_file(plan)
    return None if file is None else f"the figures of the machine in {file}"


def _machine_file(plan: Plan) -> str | None:
    """The file that described the accelerator, if one did."""
    given = plan.spec.provenance.get("cluster.accelerator")
    value = None if given is None or plan.spec.cluster.preset is None else given.value
    return value if isinstance(value, str) else None


REFUSAL_PREFIX = "X"
"""Codes of the rules that say what the runtime cannot execute."""


def compile_plan(spec: Spec, tree: object, diagnostics: Iterable[Diagnostic]) -> Plan:
    """The plan of a resolved spec. `tree` is the spec as it was written; `diagnostics` say what the runtime refuses."""
    refusals = tuple(
        Refusal(found.code, found.message) for found in diagnostics if found.code.startswith(REFUSAL_PREFIX)
    )
    # The model and the machine may stand in files beside the spec, so they are part of the spec's identity.
    identity: dict[str, object] = {"spec": tree, "model": dict(spec.model.hf_config)}
    if spec.cluster.preset is not None:
        identity["preset"] = preset_tree(spec.cluster.preset)
    return identified(Plan(spec, digest(identity), "", refusals))
