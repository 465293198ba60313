"""The targets by name, and everything that a plan is written as for some of them.

plan.json, process_groups.json, target_report.json and parcompile.lock.json are written for every plan. ds_config.json
holds DeepSpeed's keys and nothing else, so that a DeepSpeed that refuses unknown keys takes it too: its identity stands
in the lock file, by its hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parcompile.plan import Plan, plan_tree
from parcompile.plan.process_groups import process_groups
from parcompile.spec import Origin

from .accelerate import write as accelerate
from .deepspeed import facts as deepspeed
from .deepspeed.write import ds_config
from .json_text import to_text
from .launch import kubernetes, scripts
from .losses import Loss
from .megatron import write as megatron
from .target_names import NAMES, chosen
from .torchtitan import write as torchtitan

LOCK = "parcompile.lock.json"
LOCK_VERSION = 1


@dataclass(frozen=True, slots=True)
class Target:
    """A consumer of plans. `files` are JSON trees or texts by name; `version` is that of the backend they are for."""

    name: str
    files: Callable[[Plan], Mapping[str, Any]]
    losses: Callable[[Plan], list[Loss]] = lambda _plan: []
    backend: str = ""
    version: str = ""


def _deepspeed(plan: Plan) -> dict[str, Any]:
    return {"ds_config.json": ds_config(plan), **scripts.deepspeed_script(plan)}


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("deepspeed", _deepspeed, backend="deepspeed", version=deepspeed.VERSION),
        Target("torchrun", scripts.torchrun_script),
        Target("slurm", scripts.slurm_script),
        Target("kubernetes", kubernetes.files),
        Target("megatron", megatron.files, megatron.losses, "megatron-lm", megatron.MEGATRON_VERSION),
        Target("torchtitan", torchtitan.files, torchtitan.losses, "torchtitan", torchtitan.VERSION),
        Target("accelerate", accelerate.files, accelerate.losses, "accelerate", accelerate.ACCELERATE_VERSION),
    )
}
assert tuple(TARGETS) == NAMES


def losses(plan: Plan, names: Sequence[str]) -> dict[str, list[Loss]]:
    """What each of the chosen targets cannot express."""
    return {name: TARGETS[name].losses(plan) for name in chosen(names)}


def render(plan: Plan, names: Sequence[str] = ()) -> dict[str, str]:
    """File names and texts of everything the plan is written as for these targets.

    Raises:
        ValueError: there is no target of one of the names.
    """
    wanted = chosen(names)
    trees: dict[str, Any] = {"plan.json": plan_tree(plan), "process_groups.json": process_groups(plan)}
    report: dict[str, Any] = {}
    for name in wanted:
        found = TARGETS[name].losses(plan)
        expressible = not any(loss.fatal for loss in found)
        files = dict(TARGETS[name].files(plan)) if expressible else {}
        trees |= files
        report[name] = {
            "expressible": expressible,
            "files": list(files),
            "losses": [{"what": loss.what, "why": loss.why, "instead": loss.instead} for loss in found],
        }
    trees["target_report.json"] = {
        "compiler_version": plan.compiler_version,
        "spec_hash": plan.spec_hash,
        "targets": report,
    }
    texts = {name: tree if isinstance(tree, str) else to_text(tree) for name, tree in trees.items()}
    return {**texts, LOCK: to_text(_lock(plan, wanted, texts))}


def _lock(plan: Plan, names: Sequence[str], texts: Mapping[str, str]) -> dict[str, Any]:
    return {
        "lock_version": LOCK_VERSION,
        "compiler_version": plan.compiler_version,
        "spec_hash": plan.spec_hash,
        "plan_hash": plan.plan_hash,
        "targets": list(names),
        "backends": {TARGETS[name].backend: TARGETS[name].version for name in names if TARGETS[name].backend},
        "defaults": {
            path: found.value for path, found in plan.spec.provenance.items() if found.origin is Origin.DEFAULT
        },
        "files": {name: "sha256:" + hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(texts.items())},
    }
