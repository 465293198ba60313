"""The coefficients of time that hold for a layout's machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .coefficients import TIME, Coefficient, default_time
from .workload import Workload

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
    found = {name: replace(one, start=values[name]) for name, one in TIME.items()}
    for name in ("matmul", "attention", "node_link", "network_link"):
        found[name] = replace(found[name], low=SLOWER * values[name], high=FASTER * values[name])
    longest = max(TIME["launch_seconds"].high, values["launch_seconds"] / SLOWER)
    found["launch_seconds"] = replace(found["launch_seconds"], high=longest)
    return found
