"""The spec of a plan whose file is not at hand: the values that it gave stand in the provenance."""

from __future__ import annotations

from typing import Any

from parcompile.spec import Origin

from .plan import Plan


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
