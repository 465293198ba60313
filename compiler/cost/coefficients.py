"""Fitted coefficients: where they come from, how far they err, and those that hold for a machine.

They live in `coefficients.json`; `parcompile calibrate` writes files of the same form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from parcompile.user_files import shipped

from .workload import Workload

# Fitted coefficients: where they come from, how far they err, and the physical bounds within which they were fitted.


class Coefficient(NamedTuple):
    """One coefficient: its physical bounds, where a fit starts, and what it means."""

    start: float
    low: float
    high: float
    meaning: str


MEMORY: Mapping[str, Coefficient] = {
    "base_gib": Coefficient(0.3, 0.0, 1.5, "GiB that the framework holds before the first layer"),
    "attention": Coefficient(2.5, 1.0, 3.2, "copies of queries, keys, values and output: 1 fused, 3 eager with rotary"),
    "mlp": Coefficient(1.1, 1.0, 1.34, "copies of the MLP's width: 1 compiled, 4/3 with the activation's output kept"),
    "logits": Coefficient(7.0, 4.0, 12.0, "bytes of a logit: 2 + 4 (fp32 copy) + 4 (its gradient) + 2"),
    "logits_kept": Coefficient(2.0, 0.0, 4.0, "bytes of a logit of the previous micro-batch that is still held"),
    "weights_extra": Coefficient(1.0, 0.0, 4.0, "bytes of a parameter beyond weights and gradients (ZeRO 1)"),
    "unsharded_extra": Coefficient(1.0, 0.0, 3.0, "bytes of a parameter beyond weights, gradients, optimizer (ZeRO 0)"),
}
"""Of the memory of a rank."""

KEEPING: Mapping[str, Coefficient] = {
    "keeps": Coefficient(0.5, 0.0, 1.0, "share of runs that keep gathered block inputs: without pipeline"),
    "keeps_wide": Coefficient(0.5, 0.0, 1.0, "the same on 64 nodes and more, with tp up to 16"),
    "keeps_pair": Coefficient(0.5, 0.0, 1.0, "the same with two stages"),
    "keeps_pipeline": Coefficient(0.5, 0.0, 1.0, "the same with more stages"),
    "keeps_wide_pipeline": Coefficient(0.5, 0.0, 1.0, "the same with stages, on 64 nodes and more or with tp above 16"),
}
"""How often runs keep what tensor-parallel ranks gathered, by class of layout: counted, since no run says it."""

TIME: Mapping[str, Coefficient] = {
    "matmul": Coefficient(0.65, 0.4, 0.85, "share of the peak rate that matrix products reach"),
    "narrow": Coefficient(100.0, 0.0, 400.0, "h / t at which matrix products take twice as long: narrow tiles"),
    "few_rows": Coefficient(
        0.0, 0.0, 200.0, "tokens of a micro-batch at which matrix products take twice as long: weights have to be read"
    ),
    "attention": Coefficient(0.4, 0.2, 0.75, "share of the peak rate that fused attention reaches"),
    "elementwise": Coefficient(
        2.5, 0.5, 4.0, "passes over the kept activations: at least once each way, and not once more for each kernel"
    ),
    "launch_seconds": Coefficient(4e-3, 0.0, 8e-3, "shortest time of a layer, forward and backward: launching kernels"),
    "launch_tp_pp_seconds": Coefficient(
        2e-3, 0.0, 5e-3, "more of it for each further tp rank in a pipeline over nodes (nanotron)"
    ),
    "launch_tp_far_seconds": Coefficient(4e-4, 0.0, 5e-3, "more of it for each tp rank when tp leaves the node"),
    "node_link": Coefficient(0.7, 0.3, 0.9, "share of the node link's rate that collectives reach"),
    "network_link": Coefficient(0.6, 0.2, 0.9, "share of the network port's rate that collectives reach"),
    "network_ports": Coefficient(0.6, 0.0, 1.0, "exponent with which more ports of a node speed up one group"),
    "network_scale": Coefficient(0.2, 0.0, 0.6, "exponent with which more nodes slow a group down"),
    "overlap": Coefficient(
        0.7, 0.0, 1.0, "share of the last backward pass behind which gradients are reduced (ZeRO 0)"
    ),
    "send_seconds": Coefficient(3e-4, 0.0, 2e-2, "latency of one exchange between stages"),
}
"""Of the time of a step."""


STEP_OF_SIZE = 3.0
"""Errors on models that are so many times larger or smaller than those that were fitted are known: about that far apart
are the models of each split that is judged."""


class Fit(NamedTuple):
    """Coefficients with the error that they left on the rows that they were fitted to.

    `spread` holds the 5 %, 50 % and 95 % quantiles of measured / predicted, by class of layout.
    """

    values: Mapping[str, float]
    spread: Mapping[str, tuple[float, float, float]]
    rows: int
    mean_absolute_error: float
    limit_gib: float | None = None
    """Memory up to which runs of that machine did not crash, fitted to measured crashes."""
    sizes: tuple[int, int] | None = None
    """Parameters of the smallest and of the largest model that was fitted to; None where nobody noted it."""

    def to_json(self) -> dict[str, Any]:
        """As it is stored."""
        return {
            "values": {name: _short(value) for name, value in self.values.items()},
            "spread": {name: [_short(one) for one in triple] for name, triple in self.spread.items()},
            "rows": self.rows,
            "mean_absolute_error": _short(self.mean_absolute_error),
            "limit_gib": self.limit_gib,
            "sizes": None if self.sizes is None else list(self.sizes),
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Fit:
        """What `to_json` wrote."""
        spread = {name: (one[0], one[1], one[2]) for name, one in tree["spread"].items()}
        sizes = None if tree.get("sizes") is None else (int(tree["sizes"][0]), int(tree["sizes"][1]))
        return cls(dict(tree["values"]), spread, tree["rows"], tree["mean_absolute_error"], tree["limit_gib"], sizes)

    def factors_beyond(self, parameters: int) -> float:
        """How many factors of `STEP_OF_SIZE` a model lies beyond those that were fitted to; 0 between them."""
        if self.sizes is None:
            return 0.0
        smallest, largest = self.sizes
        return max(0.0, math.log(parameters / largest), math.log(smallest / parameters)) / math.log(STEP_OF_SIZE)


class CoefficientSet(NamedTuple):
    """What was fitted to one collection of measurements; a part that it does not measure is None."""

    name: str
    provenance: str
    accelerator: str
    memory: Fit | None
    time: Fit | None

    def to_json(self) -> dict[str, Any]:
        """As it is stored."""
        return {
            "provenance": self.provenance,
            "accelerator": self.accelerator,
            "memory": self.memory.to_json() if self.memory else None,
            "time": self.time.to_json() if self.time else None,
        }

    @classmethod
    def from_json(cls, name: str, tree: Mapping[str, Any]) -> CoefficientSet:
        """What `to_json` wrote."""
        memory, time = (Fit.from_json(tree[part]) if tree[part] else None for part in ("memory", "time"))
        return cls(name, tree["provenance"], tree["accelerator"], memory, time)


FUSED = {
    "base_gib": 1.0,
    "attention": 1.0,
    "mlp": 1.0,
    "logits": 10.0,
    "logits_kept": 0.0,
    "weights_extra": 0.0,
    "unsharded_extra": 0.0,
    **dict.fromkeys(KEEPING, 0.0),
}
"""Memory by the formulas alone, for frameworks with fused kernels: nothing of it is fitted."""


@functools.cache
def coefficient_sets() -> Mapping[str, CoefficientSet]:
    """All sets of the package by name."""
    sets = shipped("parcompile.cost", "coefficients.json")["sets"]
    return {name: CoefficientSet.from_json(name, tree) for name, tree in sets.items()}


def default_memory() -> Fit:
    """The memory coefficients of all measurements together."""
    found = coefficient_sets()["nanotron-h100"].memory
    assert found is not None
    return found


def default_time(accelerator: str) -> Fit:
    """The time coefficients of the nearest measured machine: shares of the peak carry over, seconds do roughly."""
    name = "megatron-a100" if accelerator.startswith("a100") else "nanotron-h100"
    found = coefficient_sets()[name].time
    assert found is not None
    return found


def _short(value: float) -> float:
    return float(f"{value:.5g}")


# The coefficients of time that hold for a layout's machine.

SLOWER, FASTER = 0.25, 1.5
"""A run reaches at least and at most this share of a rate that was measured: kernels of other sizes reach another
one."""


def time_values(work: Workload) -> Mapping[str, float]:
    """Those of the package: as they are for peaks, and `reached` for a machine that was measured."""
    values = default_time(work.accelerator).values
    return values if work.machine.measured is None else reached(work, values)


def reached(work: Workload, values: Mapping[str, float]) -> dict[str, float]:
    """The coefficients for a measured machine: what was measured is not discounted a second time."""
    machine = work.machine
    assert machine.measured is not None
    return {
        **values,
        "matmul": 1.0,
        "attention": machine.measured.attention_flops_per_s / machine.matmul_flops_per_s(work.element_bytes),
        "launch_seconds": machine.measured.layer_seconds,
        "node_link": 1.0,
        "network_link": 1.0,
    }


def time_bounds(work: Workload) -> Mapping[str, Coefficient]:
    """Where a fit of time starts, and its bounds: shares of peaks, or near the rates of a machine that was measured."""
    if work.machine.measured is None:
        return TIME
    values = reached(work, default_time(work.accelerator).values)
    found = {name: one._replace(start=values[name]) for name, one in TIME.items()}
    for name in ("matmul", "attention", "node_link", "network_link"):
        found[name] = found[name]._replace(low=SLOWER * values[name], high=FASTER * values[name])
    longest = max(TIME["launch_seconds"].high, values["launch_seconds"] / SLOWER)
    found["launch_seconds"] = found["launch_seconds"]._replace(high=longest)
    return found
