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
