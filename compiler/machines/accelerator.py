"""Accelerators and links: peaks with their sources, in `accelerators.json`; or as measured (`preset`)."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parcompile.units import MIB


@dataclass(frozen=True, slots=True)
class Link:
    """A connection of one rank; `bytes_per_s` in one direction."""

    name: str
    title: str
    bytes_per_s: float
    source: str
    latency_seconds: float = 0.0
    """Of one collective; 0 where the fitted coefficients hold it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates that a machine was seen to reach."""

    attention_flops_per_s: float
    layer_seconds: float
    """Shortest time of a layer, forward and backward: launching its kernels."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What a rank runs on: at its peak, or, with `measured`, as it was seen to run.

    `memory_bytes` is None where the machine decides it. `like` names the built-in preset whose software and launch
    settings hold for it: itself, unless the figures come from a file. `assumed` lists the figures of that preset.
    """

    name: str
    title: str
    vendor: str
    compute_capability: str | None
    memory_bytes: int | None
    flops_per_s: float
    fp32_flops_per_s: float
    """Of matrix products in fp32 as torch computes them unless it is told otherwise: without TF32."""
    memory_bytes_per_s: float
    node_link: Link
    network_link: Link
    sources: Mapping[str, str]
    like: str
    measured: Measured | None = None
    assumed: tuple[str, ...] = ()

    @property
    def starts_kernels_in_turn(self) -> bool:
        """Whether communication overlaps only when kernels start in the order of their issue.

        So Megatron-LM for CUDA devices before compute capability 10.
        """
        return self.compute_capability is not None and int(self.compute_capability.split(".")[0]) < 10

    def matmul_flops_per_s(self, element_bytes: int) -> float:
        """The rate of matrix products of elements of that size."""
        return self.fp32_flops_per_s if element_bytes == 4 else self.flops_per_s


def find_accelerator(name: str) -> Accelerator:
    """The preset of this name.

    Raises:
        ValueError: there is none.
    """
    found = accelerators().get(name)
    if found is None:
        raise ValueError(f"there is no accelerator {name!r}; there are: {', '.join(accelerators())}")
    return found


@functools.cache
def accelerators() -> Mapping[str, Accelerator]:
    """All presets by name."""
    text = (importlib.resources.files("parcompile.machines") / "accelerators.json").read_text(encoding="utf-8")
    return read_accelerators(json.loads(text))


def read_accelerators(tree: Mapping[str, Any]) -> dict[str, Accelerator]:
    """Presets out of the JSON tree of a preset file.

    Raises:
        KeyError: a figure or a link is missing.
    """
    links = {name: Link(name, one["title"], one["bytes_per_s"], one["source"]) for name, one in tree["links"].items()}
    return {
        name: Accelerator(
            name=name,
            title=one["title"],
            vendor=one["vendor"],
            compute_capability=one["compute_capability"],
            memory_bytes=None if one["memory_mib"] is None else one["memory_mib"] * MIB,
            flops_per_s=one["bf16_flops_per_s"],
            fp32_flops_per_s=one["fp32_flops_per_s"],
            memory_bytes_per_s=one["memory_bytes_per_s"],
            node_link=links[one["node_link"]],
            network_link=links[one["network_link"]],
            sources=one["sources"],
            like=name,
        )
        for name, one in tree["accelerators"].items()
    }
