"""Measures the machine that it runs on, for `parcompile profile`: compute, memory, links.

What all ranks measured becomes one accelerator preset.
"""

from __future__ import annotations

import math
import platform
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parcompile.machines import Accelerator, Link, Measured, find_accelerator, preset_tree
from parcompile.runtime.errors import RunError, everywhere, first_line
from parcompile.runtime.groups.rendezvous import Environment, backend_of, device_of
from parcompile.runtime.transport.backend import gather_objects
from parcompile.units import MIB
from parcompile.user_files import shipped

from .links import NETWORK, NODE, LinkRate, Rate, compute_rates, link_rates

LIMIT = timedelta(seconds=120)
"""A rank that is silent for so long has failed."""

DEVICES: Sequence[tuple[str, str]] = shipped("parcompile.runtime.profiling", "devices.json")
"""Parts of device names, and the preset that each is like; the first that fits counts."""


@dataclass(frozen=True, slots=True)
class RankProfile:
    """What one rank knows of itself. `failure` says why it measured nothing."""

    node: str
    title: str
    memory_bytes: int | None
    rates: tuple[Rate, ...]
    failure: str = ""


def measure(seconds: float, *, like: str | None = None, name: str | None = None) -> dict[str, Any] | None:
    """The preset's tree on rank 0, None on the others. All ranks of the job call it together.

    Raises:
        RunError: a rank failed, or a figure could not be measured; every rank raises.
    """
    environment = Environment.read()
    device = device_of(environment)
    started_here = environment.world_size > 1 and not dist.is_initialized()
    if started_here:
        dist.init_process_group(backend_of(device), timeout=LIMIT)
    try:
        return _measure(environment, device, seconds, like, name)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RunError):
            raise
        raise everywhere(f"measuring failed: {first_line(error)}") from error
    finally:
        if started_here:
            dist.destroy_process_group()


def measure_rank(rank: int, seconds: float, like: str | None, name: str | None) -> dict[str, Any] | None:  # noqa: ARG001
    """`measure` as a function of a rank, for `run_local`."""
    return measure(seconds, like=like, name=name)


def _measure(
    environment: Environment, device: torch.device, seconds: float, like: str | None, name: str | None
) -> dict[str, Any] | None:
    several = environment.world_size > 1
    like = like or alike(device)
    own = _own(device, seconds / 2 if several else seconds)
    everyone = gather_objects(own) if several else [own]
    if failed := [(rank, one.failure) for rank, one in enumerate(everyone) if one.failure]:
        rank, reason = failed[0]
        raise everywhere(f"rank {rank} could not be measured: {reason}")
    links = link_rates(device, [one.node for one in everyone], seconds / 2) if several else []
    if environment.rank:
        return None
    machine = preset(everyone, links, like, name, threads=torch.get_num_threads() if device.type == "cpu" else None)
    figures = {
        "ranks": environment.world_size,
        "nodes": len({one.node for one in everyone}),
        "torch": torch.__version__,
        "rates": [asdict(rate) for rate in slowest(everyone)],
        "links": [{**asdict(one), "bytes_per_s": one.bytes_per_s} for one in links],
    }
    return {**preset_tree(machine), "measurements": figures}


def _own(device: torch.device, seconds: float) -> RankProfile:
    title, memory = _title(device), None
    if device.type != "cpu":
        memory = int(torch.cuda.get_device_properties(device).total_memory)
    try:
        rates = tuple(compute_rates(device, seconds))
    except RuntimeError as error:
        return RankProfile(socket.gethostname(), title, memory, (), first_line(error))
    wrong = [rate for rate in rates if not (math.isfinite(rate.per_second) and rate.per_second > 0)]
    failure = f"{wrong[0].what} gave {wrong[0].per_second}" if wrong else ""
    return RankProfile(socket.gethostname(), title, memory, rates, failure)


def slowest(everyone: Sequence[RankProfile]) -> list[Rate]:
    """Each measurement that all ranks made, of the rank that was slowest: a step waits for it."""
    tables = [{(rate.what, rate.dtype, rate.size): rate for rate in one.rates} for one in everyone]
    keys = [key for key in tables[0] if all(key in table for table in tables)]
    return [min((table[key] for table in tables), key=lambda rate: rate.per_second) for key in keys]


def preset(
    everyone: Sequence[RankProfile], links: Sequence[LinkRate], like: str, name: str | None, *, threads: int | None
) -> Accelerator:
    """The accelerator that the figures describe. A link that nobody could measure is that of the preset `like`."""
    rates, nodes = slowest(everyone), len({one.node for one in everyone})
    built_in = find_accelerator(like)
    source = f"parcompile profile: {len(everyone)} rank(s) on {nodes} node(s), torch {torch.__version__}"
    memories = [one.memory_bytes for one in everyone if one.memory_bytes is not None]

    def best(what: str, dtype: str | None = None) -> float:
        return _rounded(max(one.per_second for one in rates if one.what == what and dtype in (None, one.dtype)))

    title = everyone[0].title + (f", {threads} thread(s)" if threads else "")
    return Accelerator(
        name=name or f"{like}-measured",
        title=title,
        vendor=built_in.vendor,
        compute_capability=built_in.compute_capability,
        memory_bytes=min(memories) // MIB * MIB if memories else None,
        flops_per_s=best("matmul", "bf16"),
        fp32_flops_per_s=best("matmul", "fp32"),
        memory_bytes_per_s=best("memory"),
        node_link=_link(NODE, links, built_in.node_link, source),
        network_link=_link(NETWORK, links, built_in.network_link, source),
        host_link=built_in.host_link,
        sources=dict.fromkeys(("memory_mib", "bf16_flops_per_s", "memory_bytes_per_s"), source),
        like=like,
        measured=Measured(best("attention"), _rounded(1 / best("layer launch"))),
    )


def _link(name: str, links: Sequence[LinkRate], built_in: Link, source: str) -> Link:
    """Rate of the all-reduce at its best size, latency at its smallest."""
    sums = [one for one in links if one.link == name and one.collective == "all-reduce"]
    if not sums:
        how = "--ranks 2 measures" if name == NODE else "ranks on two nodes measure"
        assumed = f"not measured but assumed; {how} it: {built_in.source}"
        return Link(name, built_in.title, built_in.bytes_per_s, assumed)
    title = f"{'in a node' if name == NODE else 'between nodes'}, {sums[0].ranks} ranks"
    smallest = min(sums, key=lambda one: one.size)
    rate = max(one.bytes_per_s for one in sums)
    return Link(name, title, _rounded(rate), source, _rounded(smallest.seconds))


def alike(device: torch.device) -> str:
    """The preset that this device is like.

    Raises:
        RunError: its name is that of none.
    """
    if device.type == "cpu":
        return "cpu"
    found = torch.cuda.get_device_name(device)
    for part, name in DEVICES:
        if part in found:
            return name
    raise everywhere(f"{found!r} resembles no preset: name the nearest one with --like")


def _title(device: torch.device) -> str:
    if device.type != "cpu":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine()


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
