"""Whether a checkpoint of one plan gets into a run of another, and how.

The runtime of this project cuts a checkpoint anew while it loads it. The rules for DeepSpeed alone are those of its
release 0.19.8, as measured: files are read at the same tp and the same dp · cp; a universal checkpoint goes to any
other tp, cp and dp.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parcompile.layout.grid import Axis
from parcompile.model.architecture import architecture

from .plan import Plan

ADAPTABLE = (
    "make_vocab_size_divisible_by",
    "tp",
    "pp",
    "layers of the stages",
    "order of tp and pp",
    "ep",
    "expert_tp",
    "order of ep and dp",
    "optimizer shards (dp · cp)",
    "precision",
    "gradient accumulation",
    "zero stage",
)
"""Parts of the layout of files that may differ: the runtime then cuts weights and optimizer states anew."""


class Resume(str, enum.Enum):
    """How a checkpoint of the first plan gets into a run of the second."""

    SAME_FILES = "same files"
    CUT_ANEW = "resharded while it is loaded"
    UNIVERSAL = "universal conversion"
    NO = "not possible"


@dataclass(frozen=True, slots=True)
class Resumption:
    """How, and what makes it so."""

    resume: Resume
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"resume": self.resume.value, "reasons": list(self.reasons)}


def file_layout(plan: Plan) -> dict[str, Any]:
    """What two plans have to share for DeepSpeed to load the one's checkpoint as it is into the other's run."""
    parallelism, training = plan.spec.parallelism, plan.spec.training
    return {
        "model": plan.spec.model.architecture,
        "make_vocab_size_divisible_by": parallelism.make_vocab_size_divisible_by,
        "tp": parallelism.tp,
        "pp": parallelism.pp,
        "layers of the stages": _layers(plan) if parallelism.pp > 1 else None,
        "order of tp and pp": "-".join(axis for axis in parallelism.order if axis in (Axis.TP, Axis.PP))
        if parallelism.pp > 1 and parallelism.tp > 1
        else None,
        "ep": parallelism.ep if parallelism.ep > 1 else None,
        "expert_tp": parallelism.expert_tp if parallelism.folds_experts else None,
        "order of ep and dp": "-".join(axis for axis in parallelism.order if axis in (Axis.EP, Axis.DP))
        if parallelism.ep > 1 and plan.groups.expert_grid.size((Axis.DP,)) > 1
        else None,
        "optimizer shards (dp · cp)": plan.spec.optimizer_shards,
        "zero stage": plan.spec.zero_stage,
        "precision": training.precision.value,
        "gradient accumulation": training.gradient_accumulation_dtype.value,
        "optimizer": training.optimizer.type,
    }


def layout_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """What differs between two layouts of files, each as one phrase."""
    found = {}
    for name, value in new.items():
        was = old.get(name)
        if name == "model":
            # A checkpoint of an earlier version keeps the whole configuration.
            before, after = architecture(was or {}), architecture(value)
            keys = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
            if keys:
                changes = "; ".join(f"{key} {before.get(key)} → {after.get(key)}" for key in keys)
                found[name] = f"the models differ: {changes}"
        elif was != value:
            found[name] = f"{name} {was} → {value}"
    return found


def _layers(plan: Plan) -> str:
    """Of each pp rank the layers of its (virtual) stages."""
    return ", ".join(
        " + ".join(f"{stage.layers.start}..{stage.layers.stop}" for stage in held) for held in plan.spec.virtual_stages
    )


def by_runtime(before: Plan, after: Plan) -> Resumption:
    """By the runtime of this project, which resumes without a conversion."""
    refused = tuple(f"the runtime refuses the new plan [{one.code}]" for one in after.refusals)
    refused += tuple(f"the runtime refuses the old plan [{one.code}]" for one in before.refusals)
    if refused:
        return Resumption(Resume.NO, refused)
    different = layout_differences(file_layout(before), file_layout(after))
    fixed = tuple(text for name, text in different.items() if name not in ADAPTABLE)
    if fixed:
        return Resumption(Resume.NO, fixed)
    return Resumption(Resume.CUT_ANEW if different else Resume.SAME_FILES, tuple(different.values()))


def by_deepspeed(before: Plan, after: Plan) -> Resumption:
    """By DeepSpeed alone, with its universal checkpoints."""
    obstacles = tuple(_obstacles(before, after))
    if obstacles:
        return Resumption(Resume.NO, obstacles)
    old, new = before.spec.parallelism, after.spec.parallelism
    reasons = []
    if old.tp != new.tp:
        reasons.append(f"tp {old.tp} → {new.tp}: DeepSpeed's files are one per tp rank")
    if old.zero_shards != new.zero_shards and after.spec.zero_stage:
        reasons.append(
            f"dp · cp {old.zero_shards} → {new.zero_shards}: the optimizer state is sharded into as many files, and "
            "DeepSpeed refuses another number"
        )
    if padded_vocabulary(before) != padded_vocabulary(after):
        reasons.append(f"padded vocabulary {padded_vocabulary(before)} → {padded_vocabulary(after)}")
    return Resumption(Resume.UNIVERSAL if reasons else Resume.SAME_FILES, tuple(reasons))


def padded_vocabulary(plan: Plan) -> int:
    """Rows of the embedding over all tp ranks."""
    return next(iter(plan.tensors().values()))[1].full_shape[0]


def _obstacles(before: Plan, after: Plan) -> Iterator[str]:
    """Why a checkpoint does not go over at all."""
    if before.spec.model.shape != after.spec.model.shape:
        yield "the models have other shapes"
    old, new = before.spec.parallelism, after.spec.parallelism
    if old.pp != new.pp:
        yield f"pp {old.pp} → {new.pp}: DeepSpeed's files are one for each stage, and its converter joins tp ranks only"
    elif before.spec.virtual_stages != after.spec.virtual_stages:
        yield "the pipeline stages hold other layers: DeepSpeed's files are one for each stage"
    if not after.spec.zero_stage and old.tp != new.tp:
        yield f"tp {old.tp} → {new.tp} at zero.stage 0: DeepSpeed's converter reads files of ZeRO's optimizers"
    if max(old.ep, new.ep) > 1:
        yield f"ep {old.ep} → {new.ep}: DeepSpeed keeps experts in files of its own MoE layers, which these are not"
    first, second = before.spec.training, after.spec.training
    stages = before.spec.zero_stage, after.spec.zero_stage
    one_class = set(stages) == {1, 2} and first.gradient_accumulation_dtype is first.precision
    if stages[0] != stages[1] and not one_class:
        yield f"zero.stage {stages[0]} → {stages[1]}: DeepSpeed keeps the state in another optimizer"
    if first.precision != second.precision or first.gradient_accumulation_dtype != second.gradient_accumulation_dtype:
        yield "precision or gradient_accumulation_dtype differ: DeepSpeed keeps the state in another optimizer"
    if first.optimizer.type != second.optimizer.type:
        yield f"optimizer {first.optimizer.type} → {second.optimizer.type}"
    if old.tp != new.tp and max(before.kv_replicas, after.kv_replicas) > 1:
        yield "kv heads are replicated: DeepSpeed's converter joins the slices of all tp ranks, replicas too"
    if old.tp != new.tp and any(
        parameter.split is not None and len(parameter.split.parts) > 1 for parameter in before.parameters
    ):
        yield "a fused projection is sharded part by part: DeepSpeed's converter would join its slices as one"
