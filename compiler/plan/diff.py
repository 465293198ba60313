"""What changes from one plan to another: numbers, layout, cost, and whether and how a checkpoint goes over.

The runtime of this project cuts a checkpoint anew while it loads it. The rules for DeepSpeed alone are those of its
release 0.19.8, as measured: files are read at the same tp and the same dp · cp; a universal checkpoint goes to any
other tp, cp and dp.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from itertools import groupby
from typing import Any

from parcompile.cost.estimate import estimate
from parcompile.cost.memory import static_memory
from parcompile.cost.offload import host_activations, host_memory
from parcompile.layout.groups import DENSE_AXES, Axis
from parcompile.model.key_types import architecture
from parcompile.spec.values import MICRO_BATCH, router_scope, workload_of
from parcompile.units import format_bytes, format_seconds

from .plan import Plan
from .sections import static_parts
from .sections import topology as topology_of

ADAPTABLE = (
    *("make_vocab_size_divisible_by", "tp", "pp", "layers of the stages", "order of tp and pp"),
    *("ep", "expert_tp", "order of ep and dp", "optimizer shards (dp · cp)"),
    *("precision", "zero stage", "without weight decay"),
)
"""Parts of the layout of files that may differ: the runtime then cuts weights and optimizer states anew."""

_OF_SEVERAL = ("layers of the stages", "order of tp and pp", "order of ep and dp")
"""What a layout has only with several ranks of an axis: that axis differs where one of two has none."""
_LEFT_OUT = {"ep": "1", "expert_tp": "as tp"}
"""What a layout means by none of its own."""


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
    expert_dp = plan.groups.expert_grid.size((Axis.DP,)) if parallelism.ep > 1 else 1
    return {
        "model": plan.spec.model.architecture,
        "make_vocab_size_divisible_by": parallelism.make_vocab_size_divisible_by,
        "tp": parallelism.tp,
        "pp": parallelism.pp,
        "layers of the stages": _layers(plan) if parallelism.pp > 1 else None,
        "order of tp and pp": _order(plan, Axis.TP, Axis.PP) if parallelism.pp > 1 and parallelism.tp > 1 else None,
        "ep": parallelism.ep if parallelism.ep > 1 else None,
        "expert_tp": parallelism.expert_tp if parallelism.folds_experts else None,
        "order of ep and dp": _order(plan, Axis.EP, Axis.DP) if expert_dp > 1 else None,
        "optimizer shards (dp · cp)": plan.spec.optimizer_shards,
        "zero stage": plan.spec.zero_stage,
        "precision": training.precision.value,
        "optimizer": training.optimizer.type,
        "without weight decay": training.optimizer.no_weight_decay,
    }


def _order(plan: Plan, *axes: Axis) -> str:
    """These axes as they follow on one another, innermost first."""
    return "-".join(axis for axis in plan.spec.parallelism.order if axis in axes)


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
                changes = "; ".join(f"{key} {_of(before, key)} → {_of(after, key)}" for key in keys)
                found[name] = f"the models differ: {changes}"
        elif was != value and not (None in (was, value) and name in _OF_SEVERAL):
            found[name] = f"{name} {_word(was, name)} → {_word(value, name)}"
    return found


def _of(config: Mapping[str, Any], key: str) -> str:
    """The value of a key as a configuration writes it."""
    return json.dumps(config[key], ensure_ascii=False) if key in config else "left out"


def _word(value: Any, name: str = "") -> str:
    """A value of a layout in a sentence; text stays without quotes."""
    value = _LEFT_OUT.get(name, "none") if value is None else value
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _layers(plan: Plan) -> str:
    """Of each pp rank the layers of its (virtual) stages."""
    return ", ".join(
        " + ".join(f"{stage.layers.start}..{stage.layers.stop}" for stage in held) for held in plan.spec.virtual_stages
    )


def by_runtime(before: Plan, after: Plan) -> Resumption:
    """By the runtime of this project, which resumes without a conversion."""
    plans = (("new", after), ("old", before))
    refused = tuple(
        f"the runtime refuses the {word} plan [{one.code}]" for word, plan in plans for one in plan.refusals
    )
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
    if before.spec.shards_weights or after.spec.shards_weights:
        yield "zero.stage 3: the runtime writes its shards with names and shapes, which DeepSpeed does not read"
    if not after.spec.zero_stage and old.tp != new.tp:
        yield f"tp {old.tp} → {new.tp} at zero.stage 0: DeepSpeed's converter reads files of ZeRO's optimizers"
    if max(old.ep, new.ep) > 1:
        yield f"ep {old.ep} → {new.ep}: DeepSpeed keeps experts in files of its own MoE layers, which these are not"
    first, second = before.spec.training, after.spec.training
    stages = before.spec.zero_stage, after.spec.zero_stage
    if stages[0] != stages[1] and set(stages) != {1, 2}:
        yield f"zero.stage {stages[0]} → {stages[1]}: DeepSpeed keeps the state in another optimizer"
    if first.precision != second.precision:
        yield f"precision {first.precision.value} → {second.precision.value}: DeepSpeed keeps the state in other files"
    if first.optimizer.type != second.optimizer.type:
        yield f"optimizer {first.optimizer.type} → {second.optimizer.type}"
    left_out = [_word(one.optimizer.no_weight_decay) for one in (first, second)]
    if left_out[0] != left_out[1]:
        yield f"no_weight_decay {' → '.join(left_out)}: DeepSpeed keeps the state by groups of parameters"
    if old.tp != new.tp and max(before.kv_replicas, after.kv_replicas) > 1:
        yield "kv heads are replicated: DeepSpeed's converter joins the slices of all tp ranks, replicas too"
    if old.tp != new.tp and any(
        parameter.split is not None and len(parameter.split.parts) > 1 for parameter in before.parameters
    ):
        yield "a fused projection is sharded part by part: DeepSpeed's converter would join its slices as one"


COUNTED_RANKS = 1 << 16
"""Up to this world size moved ranks are counted one by one."""

_AXES = (*DENSE_AXES, Axis.EP)


class ChangeKind(str, enum.Enum):
    """What a change does to the numbers of a training step."""

    NUMERICS = "numerics"
    """Other numbers: another training."""
    ROUNDING = "rounding"
    """The same mathematics in another order of sums."""
    LAYOUT = "layout"
    COST = "cost"


TITLES = {
    ChangeKind.NUMERICS: "Numerics: another training",
    ChangeKind.ROUNDING: "Rounding: the same sums in another order",
    ChangeKind.LAYOUT: "Layout",
    ChangeKind.COST: "Cost",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs. `note` says what follows from it; `unit` is "bytes" or "seconds" where it has one."""

    kind: ChangeKind
    what: str
    before: Any
    after: Any
    note: str = ""
    unit: str = ""

    @property
    def texts(self) -> tuple[str, str]:
        """Both values for people."""
        before, after = (shown(one, self.unit) for one in (self.before, self.after))
        return before, after

    @property
    def values(self) -> str:
        """The step from one to the other; of a cost with the share by which it changes."""
        return f"{' → '.join(self.texts)}{self.share and f' ({self.share})'}"

    @property
    def share(self) -> str:
        """By how much a cost changes, as in +4.2%; nothing for other changes."""
        numbers = all(isinstance(one, (int, float)) for one in (self.before, self.after))
        if self.kind is not ChangeKind.COST or not numbers or not self.before:
            return ""
        return f"{(self.after - self.before) / self.before:+.1%}"


def shown(value: Any, unit: str = "") -> str:
    """A value for people."""
    if value is None:
        return "-"
    if unit:
        return format_bytes(value) if unit == "bytes" else format_seconds(value)
    if isinstance(value, bool | dict | list):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True, slots=True)
class Difference:
    """Everything that differs. `moved_ranks` is None when the worlds differ or are too large to count.

    `runtime` and `deepspeed` say how a checkpoint of the first plan gets into a run of the second.
    """

    changes: tuple[Change, ...]
    moved_ranks: int | None
    runtime: Resumption
    deepspeed: Resumption

    def __repr__(self) -> str:
        return f"Difference({len(self.changes)} changes, moved_ranks={self.moved_ranks})"

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.changes

    def of(self, *kinds: ChangeKind) -> tuple[Change, ...]:
        """The changes of these kinds."""
        return tuple(change for change in self.changes if change.kind in kinds)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "same": self.same,
            "moved_ranks": self.moved_ranks,
            "checkpoint": {"runtime": self.runtime.to_json(), "deepspeed": self.deepspeed.to_json()},
            "changes": [{**asdict(change), "kind": change.kind.value} for change in self.changes],
        }


def difference(before: Plan, after: Plan) -> Difference:
    """What changes from one plan to another."""
    changes = tuple(_changed(before, after))
    return Difference(changes, _moved(before, after), by_runtime(before, after), by_deepspeed(before, after))


def _changed(before: Plan, after: Plan) -> Iterator[Change]:
    values = (_numerics, _rounding, _layout, _cost)
    for kind, of in zip(ChangeKind, values, strict=True):
        old, new = of(before), of(after)
        note = "the same sums in another order" if kind is ChangeKind.ROUNDING else ""
        for what in dict.fromkeys((*old, *new)):
            if old.get(what) != new.get(what):
                unit = _UNITS.get(what, "bytes") if kind is ChangeKind.COST else ""
                yield Change(kind, what, old.get(what), new.get(what), note, unit)


def _under(section: str, values: Any) -> dict[str, Any]:
    """What a section, or a value of several parts, holds; nothing for None."""
    parts = asdict(values) if is_dataclass(values) and not isinstance(values, type) else values or {}
    return {f"{section}.{key}": value for key, value in parts.items()}


def _group(plan: Plan) -> str:
    """The tokens of which an expert with a capacity takes so many rows."""
    axes, training = plan.spec.parallelism, plan.spec.training
    return f"{training.micro_batch_size} · {training.sequence_length} tokens / cp {axes.cp} / tp {axes.tp}"


def _numerics(plan: Plan) -> dict[str, Any]:
    training, router = plan.spec.training, plan.spec.training.router
    return {
        **_under("model", plan.spec.model.architecture),
        "sequence_length": training.sequence_length,
        "global_batch_size": training.global_batch_size,
        "precision": training.precision.value,
        "gradient_accumulation_dtype": training.gradient_accumulation_dtype.value,
        **_under("optimizer", training.optimizer),
        **_under("lr_scheduler", training.lr_scheduler),
        "gradient_clipping": training.gradient_clipping,
        "loss_scale": training.loss_scale,
        **_under("router", router),
        **(
            {"micro_batch_size": training.micro_batch_size}
            if (router_scope(plan.spec) or "").startswith(MICRO_BATCH)
            else {}
        ),
        **({"router.expert_capacity of": _group(plan)} if router and router.expert_capacity else {}),
        **_under("rampup_batch_size", training.rampup_batch_size),
        "train_steps": training.train_steps,
        "seed": training.seed,
        **_under("deepspeed", plan.spec.deepspeed),
        **_under("backends.megatron", plan.spec.megatron),
    }


def _rounding(plan: Plan) -> dict[str, Any]:
    parallelism, training = plan.spec.parallelism, plan.spec.training
    recomputed = training.activation_checkpointing
    return {
        "partial sums of a linear (tp)": parallelism.tp,
        "parts of a softmax (cp)": f"{parallelism.context.ring_ranks} {parallelism.cp_layout.value}",
        "gradients that are summed (dp · cp)": parallelism.zero_shards,
        "micro_batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "sequence_parallel": parallelism.sequence_parallel,
        "activation_checkpointing": recomputed if isinstance(recomputed, str) else ", ".join(recomputed),
    }


def _layout(plan: Plan) -> dict[str, Any]:
    parallelism, cluster = plan.spec.parallelism, plan.spec.cluster
    return {
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "accelerator": cluster.preset.name if cluster.preset else cluster.accelerator,
        **{axis.value: parallelism.size(axis) for axis in _AXES},
        "order": "-".join(parallelism.order),
        "cp_layout": parallelism.cp_layout.value,
        "cp_implementation": parallelism.context.name,
        "layers of each stage": ", ".join(
            f"{count} × {len(list(same))}" for count, same in groupby(len(one.layers) for one in plan.spec.stages)
        ),
        "virtual stages of a rank": parallelism.num_virtual_stages_per_pipeline_rank,
        "zero.stage": plan.spec.zero_stage,
        "optimizer on the host": plan.spec.offload_optimizer is not None,
        "weights on the host": plan.spec.offload_param is not None,
        "activations on the host": plan.spec.training.activation_offloading,
        "padded vocabulary": padded_vocabulary(plan),
        "ranks that share a kv head": plan.kv_replicas,
    }


_UNITS = {"time of a step, estimated": "seconds", "tokens/s per GPU, estimated": "", "balance of the ring": ""}
"""Of costs that are no bytes."""


def _cost(plan: Plan) -> dict[str, Any]:
    work, topology, parallelism = workload_of(plan.spec), topology_of(plan), plan.spec.parallelism
    found, memory = estimate(work), static_memory(work)
    host = [one for one in (host_memory(work), host_activations(work)) if one is not None]
    return {
        "time of a step, estimated": round(found.time.step.seconds, 4),
        "tokens/s per GPU, estimated": round(found.time.tokens_per_second_per_gpu, 1),
        "peak memory per rank, estimated": round(found.memory.peak.total_bytes),
        "static memory per rank": memory.total_bytes,
        **{f"{name} per rank": size for name, size in static_parts(memory).items()},
        "host memory per rank": sum(one.total_bytes for one in host),
        # Only a plan with ep sends anything in groups of experts.
        **{f"sent in {name} per rank and step": size for name, size in topology["bytes_per_rank_and_step"].items()},
        "sent between nodes per rank and step": topology["bytes_leaving_node"],
        "balance of the ring": float(parallelism.context.balance(parallelism.cp_layout)),
    }


def _moved(before: Plan, after: Plan) -> int | None:
    """How many ranks have other coordinates than before."""
    first, second = before.groups.grid, after.groups.grid
    if first.world_size != second.world_size:
        return None
    if all(first.steps((axis,)) == second.steps((axis,)) for axis in DENSE_AXES):
        return 0
    if first.world_size > COUNTED_RANKS:
        return None
    here, there = (
        [tuple(grid.coordinates(rank)[axis] for axis in DENSE_AXES) for rank in range(grid.world_size)]
        for grid in (first, second)
    )
    return sum(old != new for old, new in zip(here, there, strict=True))
