"""What changes from one plan to another: numbers, layout and cost, and whether a checkpoint goes over.

The checkpoint rules are those of DeepSpeed 0.19.8, as measured: files are read at the same tp and the same dp · cp; a
universal checkpoint goes to any other tp, cp and dp.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from .cost.memory import static_memory
from .layout.sequence import balance
from .plan import Plan

COUNTED_RANKS = 1 << 16
"""Up to this world size moved ranks are counted one by one."""

_AXES = ("tp", "cp", "dp", "pp", "ep")


class Kind(str, enum.Enum):
    """What a change does to the numbers of a training step."""

    NUMERICS = "numerics"
    """Other numbers: another training."""
    ROUNDING = "rounding"
    """The same mathematics in another order of sums."""
    LAYOUT = "layout"
    COST = "cost"


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs. `note` says what follows from it."""

    kind: Kind
    what: str
    before: Any
    after: Any
    note: str = ""


class Resume(str, enum.Enum):
    """How a checkpoint of the first plan gets into a run of the second."""

    SAME_FILES = "same files"
    UNIVERSAL = "universal conversion"
    NO = "not possible"


@dataclass(frozen=True, slots=True)
class Difference:
    """Everything that differs. `moved_ranks` is None when the worlds differ or are too large to count."""

    changes: tuple[Change, ...]
    moved_ranks: int | None
    resume: Resume
    reasons: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.changes

    def of(self, *kinds: Kind) -> tuple[Change, ...]:
        """The changes of these kinds."""
        return tuple(change for change in self.changes if change.kind in kinds)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "same": self.same,
            "moved_ranks": self.moved_ranks,
            "checkpoint": {"resume": self.resume.value, "reasons": list(self.reasons)},
            "changes": [{**asdict(change), "kind": change.kind.value} for change in self.changes],
        }


def difference(before: Plan, after: Plan) -> Difference:
    """What changes from one plan to another."""
    changes = (*_numerics(before, after), *_rounding(before, after), *_layout(before, after), *_cost(before, after))
    resume, reasons = _resume(before, after)
    return Difference(changes, _moved(before, after), resume, reasons)


def _changed(kind: Kind, before: dict[str, Any], after: dict[str, Any], note: str = "") -> Iterator[Change]:
    for what in dict.fromkeys((*before, *after)):
        if before.get(what) != after.get(what):
            yield Change(kind, what, before.get(what), after.get(what), note)


def _numerics(before: Plan, after: Plan) -> Iterator[Change]:
    def values(plan: Plan) -> dict[str, Any]:
        training = plan.spec.training
        model = {f"model.{key}": value for key, value in plan.spec.model.hf_config.items()}
        optimizer = {f"optimizer.{key}": value for key, value in asdict(training.optimizer).items()}
        schedule = {f"lr_scheduler.{key}": value for key, value in _fields(training.lr_scheduler).items()}
        return {
            **model,
            "sequence_length": training.sequence_length,
            "global_batch_size": training.global_batch_size,
            "precision": training.precision.value,
            "gradient_accumulation_dtype": training.gradient_accumulation_dtype.value,
            **optimizer,
            **schedule,
            "gradient_clipping": training.gradient_clipping,
            "loss_scale": training.loss_scale,
            "train_steps": training.train_steps,
            "seed": training.seed,
            **{f"deepspeed.{key}": value for key, value in plan.spec.deepspeed.items()},
        }

    yield from _changed(Kind.NUMERICS, values(before), values(after))


def _fields(value: Any) -> dict[str, Any]:
    return {} if value is None else asdict(value)


def _rounding(before: Plan, after: Plan) -> Iterator[Change]:
    def values(plan: Plan) -> dict[str, Any]:
        parallelism, training = plan.spec.parallelism, plan.spec.training
        return {
            "partial sums of a linear (tp)": parallelism.tp,
            "parts of a softmax (cp)": f"{parallelism.cp} {parallelism.cp_layout.value}",
            "gradients that are summed (dp · cp)": parallelism.zero_shards,
            "micro_batch_size": training.micro_batch_size,
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "sequence_parallel": parallelism.sequence_parallel,
            "activation_checkpointing": training.activation_checkpointing,
        }

    yield from _changed(Kind.ROUNDING, values(before), values(after), "the same sums in another order")


def _layout(before: Plan, after: Plan) -> Iterator[Change]:
    def values(plan: Plan) -> dict[str, Any]:
        parallelism, cluster = plan.spec.parallelism, plan.spec.cluster
        return {
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "accelerator": cluster.preset.name if cluster.preset else cluster.accelerator,
            **{axis: getattr(parallelism, axis) for axis in _AXES},
            "order": "-".join(parallelism.order),
            "layers of each stage": ", ".join(
                f"{count} × {len(list(same))}" for count, same in groupby(len(one.layers) for one in plan.spec.stages)
            ),
            "virtual stages of a rank": parallelism.num_virtual_stages_per_pipeline_rank,
            "zero.stage": plan.spec.zero_stage,
            "padded vocabulary": _padded_vocabulary(plan),
            "ranks that share a kv head": plan.kv_replicas,
        }

    yield from _changed(Kind.LAYOUT, values(before), values(after))


def _cost(before: Plan, after: Plan) -> Iterator[Change]:
    def values(plan: Plan) -> dict[str, Any]:
        spec, topology = plan.spec, plan.to_json()["topology"]
        memory = {f"{name} per rank": value for name, value in asdict(static_memory(spec)).items() if "bytes" in name}
        traffic = {
            f"{name} bytes per rank and step": size for name, size in topology["bytes_per_rank_and_step"].items()
        }
        return {
            "static bytes per rank": static_memory(spec).total_bytes,
            **memory,
            **traffic,
            "bytes leaving the node": topology["bytes_leaving_node"],
            "balance of the ring": float(balance(spec.parallelism.cp_layout, spec.parallelism.cp)),
        }

    yield from _changed(Kind.COST, values(before), values(after))


def _padded_vocabulary(plan: Plan) -> int:
    return next(iter(plan.tensors().values()))[1].full_shape[0]


def _moved(before: Plan, after: Plan) -> int | None:
    """How many ranks have other coordinates than before."""
    first, second = before.groups.grid, after.groups.grid
    if first.world_size != second.world_size:
        return None
    axes = ("tp", "cp", "dp", "pp")
    if all(first.steps((axis,)) == second.steps((axis,)) for axis in axes):
        return 0
    if first.world_size > COUNTED_RANKS:
        return None
    here, there = (
        [tuple(grid.coordinates(rank)[axis] for axis in axes) for rank in range(grid.world_size)]
        for grid in (first, second)
    )
    return sum(old != new for old, new in zip(here, there, strict=True))


def _resume(before: Plan, after: Plan) -> tuple[Resume, tuple[str, ...]]:
    obstacles = tuple(_obstacles(before, after))
    if obstacles:
        return Resume.NO, obstacles
    old, new = before.spec.parallelism, after.spec.parallelism
    reasons = []
    if old.tp != new.tp:
        reasons.append(f"tp {old.tp} → {new.tp}: DeepSpeed's files are one per tp rank")
    if old.zero_shards != new.zero_shards:
        reasons.append(
            f"dp · cp {old.zero_shards} → {new.zero_shards}: the optimizer state is cut into as many files, and "
            "DeepSpeed refuses another number"
        )
    if _padded_vocabulary(before) != _padded_vocabulary(after):
        reasons.append(f"padded vocabulary {_padded_vocabulary(before)} → {_padded_vocabulary(after)}")
    return (Resume.UNIVERSAL if reasons else Resume.SAME_FILES), tuple(reasons)


def _obstacles(before: Plan, after: Plan) -> Iterator[str]:
    """Why a checkpoint does not go over at all."""
    if before.spec.model.shape != after.spec.model.shape:
        yield "the models have other shapes"
    old, new = before.spec.parallelism, after.spec.parallelism
    if old.pp != new.pp:
        yield f"pp {old.pp} → {new.pp}: parameters are named by their stage's layers"
    elif before.spec.virtual_stages != after.spec.virtual_stages:
        yield "the pipeline stages hold other layers, and parameters are named by their stage's layers"
    if before.spec.zero_stage != after.spec.zero_stage:
        stages = f"{before.spec.zero_stage} → {after.spec.zero_stage}"
        yield f"zero.stage {stages}: the optimizer state is laid out otherwise"
    first, second = before.spec.training, after.spec.training
    if first.precision != second.precision or first.gradient_accumulation_dtype != second.gradient_accumulation_dtype:
        yield "precision or gradient_accumulation_dtype differ: DeepSpeed keeps the state in another optimizer"
    if first.optimizer.type != second.optimizer.type:
        yield f"optimizer {first.optimizer.type} → {second.optimizer.type}"
    if old.tp != new.tp and max(before.kv_replicas, after.kv_replicas) > 1:
        yield "kv heads are replicated: DeepSpeed's converter joins the slices of all tp ranks, replicas too"
    if old.tp != new.tp and any(
        parameter.split is not None and len(parameter.split.parts) > 1 for parameter in before.parameters
    ):
        yield "a fused projection is cut part by part: DeepSpeed's converter would join its slices as one"
