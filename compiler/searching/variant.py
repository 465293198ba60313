"""A spec with some of its values replaced, and what the rules say of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parcompile.cost.workload import Workload
from parcompile.diagnostics import Severity
from parcompile.layout.groups import AXES, Axis
from parcompile.plan.tree import REFUSAL_PREFIX
from parcompile.rules import DEFAULT_TARGETS, MEMORY_RULES, Rule, all_rules
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.spec.values import workload_of

CUT_KEYS = (
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""What says how the layers are cut into stages."""
_CP = ("cp_implementation", "hierarchical_cp_sizes")

SECTIONS: Mapping[str, str] = {
    **dict.fromkeys((*AXES, "expert_tp", "sequence_parallel", "order", "cp_layout", *_CP, *CUT_KEYS), "parallelism"),
    "micro_batch_size": "training",
    "global_batch_size": "training",
    "sequence_length": "training",
    "activation_checkpointing": "training",
    "linear_cross_entropy": "training",
    "tiled_mlp": "training",
    "gradient_accumulation_dtype": "training",
    "gradient_accumulation_steps": "training",
    "nodes": "cluster",
    "gpus_per_node": "cluster",
    "accelerator": "cluster",
    "stage": "zero",
}
"""What may be replaced, and the section of the spec in which it stands."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A changed spec. `code` and `message` are those of the first error, or of what the runtime refuses."""

    tree: Mapping[str, Any]
    work: Workload | None
    code: str | None = None
    message: str = ""


def changed(tree: Mapping[str, Any], changes: Mapping[str, object]) -> dict[str, Any]:
    """The spec with these values. dp and the accumulation steps follow from the others unless they are among them.

    Raises:
        ValueError: a name that is not in `SECTIONS`.
    """
    # Values are never changed in place: sections are enough.
    found: dict[str, Any] = {
        name: dict(section) if isinstance(section, dict) else section for name, section in tree.items()
    }
    for name, value in changes.items():
        if name not in SECTIONS:
            raise ValueError(f"{name!r} cannot be varied; these can: {', '.join(SECTIONS)}")
        found.setdefault(SECTIONS[name], {})[name] = value
    parallelism, training = found.setdefault("parallelism", {}), found.setdefault("training", {})
    if Axis.DP not in changes:
        parallelism.pop(Axis.DP, None)
    if training.get("global_batch_size") is not None and "gradient_accumulation_steps" not in changes:
        training.pop("gradient_accumulation_steps", None)
    return found


def variant(tree: Mapping[str, Any], changes: Mapping[str, object], folder: Path, *, executable: bool) -> Variant:
    """The changed spec, checked by every rule; with `executable`, what the runtime refuses counts as an error."""
    found = changed(tree, changes)
    resolution = Resolution(found, (), folder)
    for rule in _deciding(executable):
        try:
            for one in rule.check(resolution):
                return Variant(found, None, rule.code, one.message)
        except Unavailable:  # noqa: PERF203 -- another rule speaks of the value that is missing
            continue
    try:
        return Variant(found, workload_of(resolution.spec()))
    except (Unavailable, ValueError) as error:
        return Variant(found, None, "undecided", str(error))


@functools.cache
def _deciding(executable: bool) -> tuple[Rule, ...]:
    """The rules that can refuse a layout."""
    return tuple(
        rule
        for rule in all_rules()
        if rule.concerns(DEFAULT_TARGETS)
        and rule.code not in MEMORY_RULES
        and (rule.severity is Severity.ERROR or (executable and rule.code.startswith(REFUSAL_PREFIX)))
    )
