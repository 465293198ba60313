"""What the rules say of a plan whose spec is not at hand: the values that the spec gave stand in the provenance."""

from __future__ import annotations

from typing import Any

from parcompile.diagnostics import Diagnostic
from parcompile.plan import Plan
from parcompile.rules import check
from parcompile.spec import Origin
from parcompile.spec.resolve import Resolution


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
    if spec.cluster.preset is not None:
        tree.setdefault("cluster", {})["accelerator"] = spec.cluster.accelerator
    return tree


def remarks(plan: Plan) -> tuple[Diagnostic, ...]:
    """Warnings and hints about a plan, without places in a file. A plan has no errors: it was compiled."""
    return tuple(one for one in check(Resolution(written(plan))) if not one.is_error)
