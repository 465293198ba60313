"""A first spec: the smallest layout of a model on a cluster that fits and passes every rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parcompile import schema
from parcompile.cost.memory import static_memory
from parcompile.diagnostics import Diagnostic
from parcompile.rules import check
from parcompile.rules.arithmetic import divisors
from parcompile.spec.resolve import Resolution
from parcompile.spec.workload import workload_of
from parcompile.units import format_bytes

LONGEST = 8192
"""Tokens of a first spec's sequences, where the model does not have fewer positions."""
_MICRO_BATCHES = 8
_DEEPEST = 128
"""Stages that are tried at most."""


@dataclass(frozen=True, slots=True)
class FirstSpec:
    """A spec, and why its layout was chosen; without a spec, the first errors of the last layout that was tried."""

    spec: dict[str, Any] | None
    reason: str = ""
    errors: tuple[Diagnostic, ...] = ()


def sequence_length_of(config: Mapping[str, Any]) -> int:
    """Tokens of a sequence that a model's configuration leads to."""
    known = config.get("max_position_embeddings", config.get("n_positions", 1024))
    return min(int(known), LONGEST)


def first_spec(
    name: str, model: Mapping[str, Any], cluster: Mapping[str, Any], length: int, folder: Path, precision: str = "bf16"
) -> FirstSpec:
    """The smallest pp, then the smallest tp, whose weights and optimizer state fit and which every rule allows.

    Args:
        name: of the run.
        model: the section of the spec.
        cluster: the section of the spec.
        length: tokens of a sequence.
        folder: the folder that paths in the spec are relative to.
        precision: the type of the weights.

    Raises:
        ValueError: the schema refuses a value; the message is its.
    """
    world = cluster["nodes"] * cluster["gpus_per_node"]
    errors: tuple[Diagnostic, ...] = ()
    for pp in (size for size in divisors(world) if size <= _DEEPEST):
        for tp in divisors(cluster["gpus_per_node"]):
            if world % (tp * pp):
                continue
            spec = _spec(name, model, cluster, length, tp, pp, precision)
            validation = schema.validate(spec, "spec")
            if not validation.valid:
                raise ValueError(validation.diagnostics[0].message)
            resolution = Resolution(spec, (), folder)
            errors = tuple(one for one in check(resolution) if one.is_error)
            if not errors:
                return FirstSpec(spec, _reason(resolution, tp, pp))
    return FirstSpec(None, errors=errors)


def _reason(resolution: Resolution, tp: int, pp: int) -> str:
    found = resolution.spec()
    memory = static_memory(workload_of(found)).total_bytes
    device = found.cluster.preset.memory_bytes if found.cluster.preset else None
    if device is None:
        from parcompile.machines.accelerator import accelerators

        known = accelerators().get(found.cluster.accelerator)
        device = known.memory_bytes if known else None
    room = "" if device is None else f" of {format_bytes(device)}"
    size = f"weights, gradients and optimizer state take {format_bytes(memory)}{room} on each rank"
    if tp * pp == 1:
        return f"tp 1 and pp 1: {size}"
    return f"tp {tp} and pp {pp} are the smallest sizes that fit and pass every rule: {size}"


def _spec(
    name: str, model: Mapping[str, Any], cluster: Mapping[str, Any], length: int, tp: int, pp: int, precision: str
) -> dict[str, Any]:
    dp = cluster["nodes"] * cluster["gpus_per_node"] // (tp * pp)
    training = {
        "sequence_length": length,
        "global_batch_size": dp * max(_MICRO_BATCHES, pp),
        "micro_batch_size": 1,
        "precision": precision,
        **({"gradient_accumulation_dtype": "fp32"} if pp > 1 and precision != "fp32" else {}),
    }
    return {
        "version": 1,
        "name": name,
        "model": dict(model),
        "cluster": dict(cluster),
        "parallelism": {"tp": tp, "cp": 1, "pp": pp, "dp": "auto", "sequence_parallel": tp > 1},
        "training": training,
        "zero": {"stage": 1},
    }
