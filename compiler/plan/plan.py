"""The plan: the one artefact that the runtime reads. Everything in it is decided; a run executes it as it stands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from parcompile.atomic import locate
from parcompile.diagnostics import Diagnostic
from parcompile.layout.context_parallel import CpImplementation
from parcompile.layout.groups import Groups
from parcompile.layout.tensor import TensorLayout, tensor_layout
from parcompile.machines.preset import preset_tree
from parcompile.model.parameters import parameter_table
from parcompile.model.table import Parameter, ParameterTable
from parcompile.spec import Spec
from parcompile.version import __version__

from .tree import PLAN_VERSION, digest, plan_tree, spec_from_tree

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

    `spec_hash` is that of the spec the plan was compiled from, `plan_hash` that of the plan itself: ranks compare it
    before they start.
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
        parallelism = self.spec.parallelism
        is_usp = parallelism.cp_implementation is CpImplementation.USP
        levels = parallelism.hierarchical_cp_sizes if is_usp else None
        return Groups(parallelism.grid, self.kv_replicas, parallelism.ep, levels)

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
        body = plan_tree(self)
        return {**body, "plan_hash": digest(body)}

    @property
    def plan_hash(self) -> str:
        """The plan's own identity."""
        return digest(plan_tree(self))

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
            plan = cls(
                spec_from_tree(tree), tree["spec_hash"], tuple(Refusal(**one) for one in tree["runtime"]["refusals"])
            )
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
            file = locate(file, "plan.json")
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
    # The model and the machine may stand in files beside the spec, so they are part of the spec's identity.
    identity: dict[str, object] = {"spec": tree, "model": dict(spec.model.hf_config)}
    if spec.cluster.preset is not None:
        identity["preset"] = preset_tree(spec.cluster.preset)
    return Plan(spec, digest(identity), refusals)
