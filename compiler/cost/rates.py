"""The coefficients of time that hold for a layout's machine."""

from __future__ import annotations

from collections.abc import Mapping

from .coefficients import default_time
from .workload import Workload


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
