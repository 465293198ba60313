"""The targets by name, and everything that a plan is written as for some of them.

plan.json, process_groups.json, target_report.json and parcompile.lock.json are written for every plan. ds_config.json
holds DeepSpeed's keys and nothing else, so that a DeepSpeed that refuses unknown keys takes it too: its identity stands
in the lock file, by its hash.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parcompile import entry_points
from parcompile.atomic import is_plain
from parcompile.plan import Plan, plan_tree
from parcompile.plan.sections import process_groups
from parcompile.spec import Origin

from . import deepspeed, launch, torchtitan
from .accelerate import write as accelerate
from .artefacts import Loss, losses_of, to_text
from .deepspeed import write as deepspeed_write
from .kinds import BUILT_IN, chosen
from .megatron import write as megatron
from .trainers import write as trainers

LOCK = "parcompile.lock.json"
LOCK_VERSION = 1


@dataclass(frozen=True, slots=True)
class Target:
    """A consumer of plans. `files` are JSON trees or texts by name; `version` is that of the backend they are for."""

    name: str
    files: Callable[[Plan], Mapping[str, Any]]
    losses: Callable[[Plan], Iterable[Loss]] = lambda _plan: ()
    backend: str = ""
    version: str = ""


def _stored(name: str, files: Callable[[Plan], Mapping[str, Any]], backend: str, version: str) -> Target:
    """One whose losses stand in `losses.json`."""
    return Target(name, files, lambda plan: losses_of(name, plan.spec, trainers.FACTS), backend, version)


def _deepspeed_files(plan: Plan) -> dict[str, Any]:
    return {"ds_config.json": deepspeed_write.ds_config(plan), **launch.deepspeed_script(plan)}


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _stored("deepspeed", _deepspeed_files, "deepspeed", deepspeed.VERSION),
        Target("torchrun", launch.torchrun_script),
        Target("slurm", launch.slurm_script),
        Target("kubernetes", launch.kubernetes_files),
        Target("skypilot", launch.skypilot_files, launch.skypilot_losses),
        Target("megatron", megatron.files, megatron.losses, "megatron-lm", megatron.MEGATRON_VERSION),
        Target("torchtitan", torchtitan.files, torchtitan.losses, "torchtitan", torchtitan.VERSION),
        _stored("accelerate", accelerate.files, "accelerate", accelerate.VERSION),
        _stored("accelerate-deepspeed", accelerate.files_with_deepspeed, "accelerate", accelerate.VERSION),
        _stored("transformers", accelerate.distributed_files, "transformers", accelerate.TRANSFORMERS_VERSION),
        _stored("trl", trainers.trl_files, "trl", trainers.TRL_VERSION),
        _stored("axolotl", trainers.axolotl_files, "axolotl", trainers.AXOLOTL_VERSION),
        _stored("llamafactory", trainers.llama_factory_files, "llamafactory", trainers.LLAMA_FACTORY_VERSION),
    )
}
"""The targets of this package."""
assert tuple(TARGETS) == BUILT_IN


def target(name: str) -> Target:
    """A target by its name, of this package or of a plug-in.

    Raises:
        PluginError: that of a plug-in cannot be used.
    """
    return TARGETS[name] if name in TARGETS else _added(name)


@functools.cache
def _added(name: str) -> Target:
    def judged(given: object) -> Target:
        if not isinstance(given, Target):
            raise TypeError(f"it has to be a parcompile.plugins.Target, and is of type {type(given).__name__}")
        if given.name != name:
            raise ValueError(f"its entry point is called {name!r} and the target {given.name!r}")
        if not all(type(one) is str for one in (given.name, given.backend, given.version)):
            raise TypeError("name, backend and version are texts")
        return given

    return entry_points.load(entry_points.TARGETS, name, judged)


def _losses(name: str, plan: Plan) -> list[Loss]:
    """What a target cannot express; of a plug-in, what is none is refused."""
    found = target(name).losses

    def judged() -> list[Loss]:
        losses = list(found(plan))
        for one in losses:
            if type(one) is not Loss or {type(one.what), type(one.why), type(one.instead)} != {str}:
                raise TypeError(f"its losses hold {type(one).__name__}, not a Loss of three texts")
        return losses

    return list(found(plan)) if name in TARGETS else entry_points.called(entry_points.TARGETS, name, judged)


def _files(name: str, plan: Plan) -> dict[str, Any]:
    """The files of a target; those of a plug-in stand in a folder of its name, and cannot take another's place."""
    found = target(name).files

    def judged() -> dict[str, Any]:
        files = {}
        for file, content in dict(found(plan)).items():
            if type(file) is not str or not file.startswith(f"{name}/") or not is_plain(file):
                raise ValueError(f"it wants to write {file!r}: its files have to stand in {name}/")
            # Trees come out as they will be read.
            files[file] = content if type(content) is str else json.loads(json.dumps(content, allow_nan=False))
        return files

    return dict(found(plan)) if name in TARGETS else entry_points.called(entry_points.TARGETS, name, judged)


def losses(plan: Plan, names: Sequence[str]) -> dict[str, list[Loss]]:
    """What each of the chosen targets cannot express.

    Raises:
        ValueError: there is no target of one of the names, or that of a plug-in cannot be used.
    """
    return {name: _losses(name, plan) for name in chosen(names)}


def render(plan: Plan, names: Sequence[str] = ()) -> dict[str, str]:
    """File names and texts of everything the plan is written as for these targets.

    Raises:
        ValueError: there is no target of one of the names, or that of a plug-in cannot be used.
    """
    wanted = chosen(names)
    trees: dict[str, Any] = {"plan.json": plan_tree(plan), "process_groups.json": process_groups(plan)}
    report: dict[str, Any] = {}
    for name in wanted:
        found = _losses(name, plan)
        expressible = not any(loss.fatal for loss in found)
        files = _files(name, plan) if expressible else {}
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
        "backends": {target(name).backend: target(name).version for name in names if target(name).backend},
        "defaults": {
            path: found.value for path, found in plan.spec.provenance.items() if found.origin is Origin.DEFAULT
        },
        "files": {name: "sha256:" + hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(texts.items())},
    }
