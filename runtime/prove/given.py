"""What cells take of somebody's own DeepSpeed configuration or plan, and what they do not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from parcompile.plan import Plan
from parcompile.runtime.model.shrinking import shrunk
from parcompile.user_files import shipped

from .ranks.cells import FAMILIES

Path = tuple[str, ...]

_NOT_CARRIED: Mapping[str, Mapping[str, str]] = shipped("parcompile.runtime.prove", "left_out.json")
_LEFT_OUT = _NOT_CARRIED["deepspeed"]
_MAPPINGS = ("zero_optimization", "bf16", "bfloat16", "fp16", "amp", "tensor_parallel")
_PARALLEL = (("tp", ("tensor_parallel", "autotp_size")), ("cp", ("sequence_parallel_size",)))


class GivenError(ValueError):
    """Cells cannot be run with a configuration; `path` is the key that is why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{'.'.join(path)}: {why}" if path else why)
        self.path = path


@dataclass(frozen=True, slots=True)
class Given:
    """A configuration as cells take it.

    Attributes:
        cell: the features that it decides, `config` or `plan` among them: the keys that are carried, as JSON.
        left_out: what is not carried as it stands, by its key, with the reason.
    """

    cell: Mapping[str, Any]
    left_out: Mapping[Path, str]


def given(tree: Any) -> Given:
    """What cells take of a DeepSpeed configuration.

    Raises:
        GivenError: it is none, or asks for what no cell has.
    """
    if not isinstance(tree, dict):
        raise GivenError((), "a DeepSpeed configuration is a mapping of keys")
    for name in _MAPPINGS:
        if not isinstance(tree.get(name, {}), dict):
            raise GivenError((name,), f"{json.dumps(tree[name])} is no mapping: write {{}} with its keys")
    for name in ("fp16", "amp"):
        if tree.get(name, {}).get("enabled") is True:
            raise GivenError((name, "enabled"), f"no cell runs in {name}: prove it with bf16, or without the key")
    left_out: dict[Path, str] = {(name,): why for name, why in _LEFT_OUT.items() if name in tree}
    left_out |= {(name,): "it is not enabled" for name in ("fp16", "amp") if name in tree}
    left_out |= {path: "nobody fills in auto here" for path in _autos(tree, ()) if path[:1] not in left_out}
    config = _without(tree, (), left_out)
    cell: dict[str, Any] = {"stage": config.get("zero_optimization", {}).pop("stage", 0)}
    for axis, path in _PARALLEL:
        size = config.get(path[0], 1)
        size = size.get(path[1], 1) if len(path) == 2 and isinstance(size, dict) else size
        if type(size) is not int or size < 1:
            raise GivenError(path, f"{json.dumps(size)} is no number of ranks")
        cell[axis] = min(size, 2)
        if size > 2:
            left_out[path] = f"cells spread over 2 ranks, not {size}"
    config.pop("sequence_parallel_size", None)
    if clipping := config.pop("gradient_clipping", 0):
        left_out[("gradient_clipping",)] = "cells clip at 0.5, which a tiny model exceeds"
    cell["clipping"] = 0.5 if clipping else 0.0
    low = config.get("bf16", config.get("bfloat16", {}))
    if not {("bf16", "enabled"), ("bfloat16", "enabled")} & set(left_out):
        cell["dtype"] = "bf16" if low.get("enabled") else "fp32"
    return Given({**cell, "config": json.dumps(config)}, left_out)


def _autos(tree: Mapping[str, Any], at: Path) -> Iterator[Path]:
    for name, value in tree.items():
        if value == "auto":
            yield (*at, name)
        elif isinstance(value, dict):
            yield from _autos(value, (*at, name))


def _without(tree: Mapping[str, Any], at: Path, left_out: Mapping[Path, str]) -> dict[str, Any]:
    return {
        name: _without(value, (*at, name), left_out) if isinstance(value, dict) else value
        for name, value in tree.items()
        if (*at, name) not in left_out
    }


_AT_RANDOM = ("dropout", "pdrop", "jitter")


def of_plan(plan: Plan, most_ranks: int) -> Given:
    """What cells take of a plan: its layout, over fewer data-parallel ranks, for a small model of the same kind.

    Raises:
        GivenError: its other axes take more ranks, or its model is not one that transformers builds by its name.
    """
    if plan.spec.model.shape.user_module is not None:
        raise GivenError(("model",), "it is a module of your own: one process has no second implementation of it")
    axes, small = plan.spec.parallelism, shrunk(plan).spec
    inner = axes.tp * axes.cp * axes.pp
    if inner > most_ranks:
        sizes = f"tp {axes.tp} × cp {axes.cp} × pp {axes.pp}"
        raise GivenError(("parallelism",), f"{sizes} takes {inner} ranks, and at most {most_ranks} are started")
    dp = next(size for size in (4, 2, 1) if size <= axes.dp and inner * size <= most_ranks)
    ep = next(size for size in range(axes.ep, 0, -1) if axes.ep % size == 0 and dp * axes.cp % size == 0)
    left_out: dict[Path, str] = {tuple(key.split(".")): why for key, why in _NOT_CARRIED["plan"].items()}
    for name, size, ours in (("dp", axes.dp, dp), ("ep", axes.ep, ep)):
        if size != ours:
            left_out["parallelism", name] = f"cells spread over {ours} rank{'s' * (ours > 1)}, not {size}"
    where_set = _NOT_CARRIED["training where it is set"]
    left_out |= {("training", name): why for name, why in where_set.items() if getattr(plan.spec.training, name)}
    model = {
        key: 0.0 if isinstance(value, float) and any(word in key for word in _AT_RANDOM) else value
        for key, value in small.model.hf_config.items()
    }
    own = {name: value for name, value in asdict(small.parallelism).items() if name not in ("order", "ep") and value}
    ways = small.training.activation_checkpointing
    carried = {
        "name": plan.spec.name,
        "model": model,
        "experts": small.model.shape.moe is not None,
        "length": small.training.sequence_length,
        "parallelism": {**own, "order": "-".join(one.value for one in axes.order)},
        "activation_checkpointing": ways if isinstance(ways, str) else list(ways),
        "deepspeed": dict(small.deepspeed),
    }
    cell = {
        **{axis: getattr(axes, axis) for axis in ("tp", "cp", "pp")},
        "dp": dp,
        "ep": ep,
        "stage": small.zero_stage,
        "dtype": "fp32",
        "sequence_parallel": axes.sequence_parallel,
        "tied": small.model.shape.tie_word_embeddings,
        "clipping": 0.5 if plan.spec.training.gradient_clipping else 0.0,
        "checkpointing": "none",
        "aux_loss": bool(model.get("output_router_logits")),
    }
    return Given({"family": next(iter(FAMILIES)), **cell, "plan": json.dumps(carried)}, left_out)
