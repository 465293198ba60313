"""Everything that a layout is estimated to cost, in one value, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from parcompile.layout.groups import CP_LEVELS, EMBEDDING, EXPERT_DP, KV_REPLICA, Axis
from parcompile.model.derived_rows import parameter_table
from parcompile.units import format_bytes, format_seconds

from .coefficients import CoefficientSet
from .flops import CONVENTION
from .footprint import Footprint, footprint
from .offload import host_activations, host_memory, host_seconds, node_bytes
from .step import Timing, timing
from .traffic import GroupTraffic, traffic
from .workload import Workload

SECONDS_PER_DAY = 86400
GRADIENTS, SEQUENCE = ("dp-cp", EXPERT_DP), (Axis.CP, *CP_LEVELS)
"""Groups whose traffic is timed together."""
UNTIMED = (KV_REPLICA, EMBEDDING)
"""Small, or sent once in a step."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters, exact: of the model, of a rank of each stage, and of a rank in each layer (padding included)."""

    total: int
    by_stage: tuple[int, ...]
    by_layer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """What a number of tokens takes. `cost` is None without a price."""

    tokens: float
    steps: int
    days: float
    cost: float | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """One layout: its parameters, memory, traffic and time."""

    work: Workload
    parameters: Parameters
    memory: Footprint
    traffic: tuple[GroupTraffic, ...]
    time: Timing
    budget: Budget | None = None

    def __repr__(self) -> str:
        peak, seconds = format_bytes(self.memory.peak.total_bytes), format_seconds(self.time.step.seconds)
        return f"Estimate(peak={peak!r}, step={seconds!r}, fits={self.memory.fits})"

    def to_json(self) -> dict[str, Any]:
        """For machines: bytes and seconds, whole numbers where they are exact."""
        peak, time = self.memory.peak, self.time
        return {
            "parameters": {
                "total": self.parameters.total,
                "rank_by_stage": list(self.parameters.by_stage),
                "rank_by_layer": list(self.parameters.by_layer),
            },
            "memory": {
                "peak_bytes": round(peak.total_bytes),
                "rank": peak.rank,
                "stage": peak.stage,
                "largest_component": peak.largest,
                "interval_90_bytes": [round(one) for one in self.memory.interval_bytes],
                "usable_bytes": None if self.memory.limit_bytes is None else round(self.memory.limit_bytes),
                "fits": self.memory.fits,
                "probability_to_fit": _share(self.memory.probability),
                "stages": [
                    {
                        "stage": one.stage,
                        "rank": one.rank,
                        "total_bytes": round(one.total_bytes),
                        "components_bytes": {name: round(size) for name, size in one.components.items()},
                    }
                    for one in self.memory.stages
                ],
            },
            **self._host(),
            "communication": [
                {
                    "group": one.group,
                    "operation": one.operation,
                    "messages": one.messages,
                    "bytes": round(one.wire_bytes),
                    "link": one.link.name,
                    "leaves_node": one.leaves_node,
                    "exposed_seconds": self.exposed_seconds(one.group),
                }
                for one in self.traffic
            ],
            "time": {
                "step_seconds": time.step.seconds,
                "interval_90_seconds": list(time.interval_seconds),
                "parts_seconds": time.step.parts,
                "stage_seconds": list(time.step.stages),
                "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
                "model_flops_utilisation": time.utilisation,
                "utilisation_convention": CONVENTION,
            },
            "expert_imbalance": None
            if self.work.ep == 1
            else {
                "factor": self.work.imbalance,
                "assumed": self.work.expert_imbalance is None and self.work.capacity_rows is None,
            },
            "documents": {
                "tokens": self.work.attended_length,
                "assumed": self.work.document_length is None,
            },
            "budget": None
            if self.budget is None
            else {
                "tokens": self.budget.tokens,
                "steps": self.budget.steps,
                "days": self.budget.days,
                "cost": self.budget.cost,
            },
        }

    def _host(self) -> dict[str, Any]:
        held, kept, found = host_memory(self.work), host_activations(self.work), {}
        both = {"node_bytes": node_bytes(self.work), "link": self.work.machine.host_link.name}
        if held is not None and (seconds := host_seconds(self.work)) is not None:
            low, likely, high = seconds
            sizes = {**held._asdict(), "total_bytes": held.total_bytes}
            found["host"] = {**sizes, **both, "seconds": likely, "interval": [low, high]}
        if kept is not None:
            step = self.time.step
            exposed = {"exposed_seconds": step.activations, "interval": list(step.activation_interval)}
            found["host_activations"] = {**kept._asdict(), **both, **exposed}
        return found

    def exposed_seconds(self, group: str) -> float:
        """Seconds of a step in which nothing hides the traffic of a group; 0 where it is not timed."""
        step = self.time.step
        if group in GRADIENTS:
            return step.gradients * self._part(group, GRADIENTS)
        found = {Axis.TP: step.tensor, Axis.EP: step.expert, Axis.PP: step.exchange, **dict.fromkeys(UNTIMED, 0.0)}
        return found[group] if group in found else step.context * self._part(group, SEQUENCE)

    def hidden_seconds(self, group: str) -> float:
        """Seconds of a step in which the traffic of a group runs behind computation."""
        if group in GRADIENTS:
            return self.time.step.hidden_gradients * self._part(group, GRADIENTS)
        return self.time.step.hidden_context * self._part(group, SEQUENCE) if group in SEQUENCE else 0.0

    def _part(self, group: str, together: Collection[str]) -> float:
        """Groups that are timed together share what they take by the time on their links."""
        seconds = {one.group: one.wire_bytes / one.link.bytes_per_s for one in self.traffic if one.group in together}
        return seconds[group] / (sum(seconds.values()) or 1.0)


def _share(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def estimate(
    work: Workload,
    *,
    tokens: float | None = None,
    gpu_hour_price: float | None = None,
    fitted: CoefficientSet | None = None,
) -> Estimate:
    """The estimate of a layout; `tokens` is a budget to train on, `gpu_hour_price` in any currency.

    `fitted` are coefficients to use instead of those of the package.

    Raises:
        ValueError: the layout cannot be cut, or the accelerator is unknown.
    """
    timed = timing(work, fitted.time if fitted else None)
    budget = None
    if tokens is not None:
        steps = math.ceil(tokens / work.tokens_per_step)
        days = steps * timed.step.seconds / SECONDS_PER_DAY
        price = None if gpu_hour_price is None else days * 24 * work.world_size * gpu_hour_price
        budget = Budget(tokens, steps, days, price)
    memory = footprint(work, fitted.memory if fitted else None)
    return Estimate(work, parameters(work), memory, traffic(work), timed, budget)


def parameters(work: Workload) -> Parameters:
    """Exact counts.

    Raises:
        SplitError: a tensor cannot be cut over tp.
    """
    table = parameter_table(work.shape)
    layers = [0] * work.shape.num_hidden_layers
    for one in table.layer:
        cut = work.layout(one).local_numel
        for layer in one.layers or ():
            layers[layer] += cut
    return Parameters(table.numel, tuple(work.stage_parameters(stage) for stage in work.stages), tuple(layers))
