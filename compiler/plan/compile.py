"""Makes the plan of a resolved spec."""

from __future__ import annotations

from collections.abc import Iterable

from parcompile.diagnostics import Diagnostic
from parcompile.machines.accelerator import preset_tree
from parcompile.spec import Spec

from .plan import Plan, Refusal
from .tree import digest, identified

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
