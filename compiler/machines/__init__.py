"""The machines that a plan is for: peaks and links with sources (`accelerators.json`), or as measured (`preset`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from parcompile import schema
from parcompile.text import SourceError, read_file
from parcompile.units import GIB, MIB, format_bytes
from parcompile.user_files import shipped


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
    host_link: Link
    """To the memory of its host."""
    sources: Mapping[str, str]
    like: str
    measured: Measured | None = None
    assumed: tuple[str, ...] = ()
    host_memory_bytes: int | None = None
    """A rank's share of the memory of the server that its vendor sells with it; None where there is no such one."""

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


_USUAL = {"h100": "h100-sxm", "a100": "a100-80gb", "a6000": "rtx-a6000"}
"""What people mean who do not say which."""


def named_accelerator(text: str) -> str:
    """The name of the preset that a person means: `H100` is "h100-sxm". The name of a file stays as it is.

    Raises:
        ValueError: there is no such accelerator; the message lists near ones.
    """
    if is_preset_file(text):
        return text
    name, known = _USUAL.get(text.lower(), text.lower()), list(accelerators())
    if name not in known:
        near = [one for one in known if one.startswith(name)] if name else []
        raise ValueError(f"there is no accelerator {text!r}; there are: {', '.join(near or known)}")
    return name


@functools.cache
def accelerators() -> Mapping[str, Accelerator]:
    """All presets by name."""
    tree = shipped("parcompile.machines", "accelerators.json")
    links: dict[str, Any] = {name: Link(name, **one) for name, one in tree["links"].items()}
    same = ("title", "vendor", "compute_capability", "fp32_flops_per_s", "memory_bytes_per_s", "sources")
    return {
        name: Accelerator(
            name=name,
            like=name,
            memory_bytes=None if one["memory_mib"] is None else one["memory_mib"] * MIB,
            flops_per_s=one["bf16_flops_per_s"],
            host_memory_bytes=one["host_memory_gib"] * GIB if "host_memory_gib" in one else None,
            **{key: one[key] for key in same},
            **{key: links[one[key]] for key in ("node_link", "network_link", "host_link")},
        )
        for name, one in tree["accelerators"].items()
    }


# An accelerator in a file, which a spec names at cluster.accelerator: measured by `parcompile profile`, or described.

SCHEMA = "accelerator"
VERSION = 1


class PresetError(ValueError):
    """A preset that cannot be used; the message names file, line and column."""


def is_preset_file(name: str) -> bool:
    """Whether an accelerator is given as a file."""
    return name.endswith(".json")


def read_preset(path: Path) -> Accelerator:
    """The machine that a file describes.

    Raises:
        PresetError: the file cannot be read, or is not what schema `accelerator` describes.
    """
    try:
        stamp = path.stat().st_mtime_ns
    except (OSError, ValueError) as error:
        # A name with a NUL byte is a ValueError.
        reason = error.strerror if isinstance(error, OSError) else error
        raise PresetError(f"{path} cannot be read: {reason}") from None
    return _read(path, stamp)


@functools.lru_cache(maxsize=16)
def _read(path: Path, stamp: int) -> Accelerator:  # noqa: ARG001 -- a search reads the file of its spec only once
    try:
        read = read_file(path)
    except SourceError as error:
        raise PresetError(str(error)) from None
    found = list(read.diagnostics)
    if read.document is not None:
        found += schema.validate(read.document, SCHEMA).diagnostics
    if found or read.document is None:
        first, position = found[0], found[0].position
        place = f"{path}:{position.line}:{position.column}" if position else str(path)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise PresetError(f"{place}: [{first.code}] {first.message}{more}")
    assert isinstance(read.document.tree, dict)
    return preset_from_tree(read.document.tree, name=path.stem)


def preset_from_tree(tree: Mapping[str, Any], *, name: str | None = None) -> Accelerator:
    """The machine that a valid tree describes; `name` is for one that has none, else its memory."""
    memory = _memory_bytes(tree)
    flops = float(tree["bf16_tflops"] * 1e12) if "bf16_tflops" in tree else tree.get("bf16_flops_per_s")
    base = find_accelerator(tree["like"]) if "like" in tree else nearest(memory, flops)
    assumed = list(tree.get("assumed", ()))
    assumed += [key for key in ("memory_bytes_per_s", "node_link", "network_link") if key not in tree]
    if flops is None:
        assumed.insert(0, "bf16_flops_per_s")
    size = "the memory of its host" if memory is None else format_bytes(memory)
    note = tree.get("source", "described in the file")
    return replace(
        base,
        name=tree.get("name", name or f"accelerator with {size}"),
        title=tree.get("title", f"{size}, otherwise like {base.title}"),
        memory_bytes=memory,
        flops_per_s=base.flops_per_s if flops is None else flops,
        fp32_flops_per_s=_fp32_flops(tree, flops, base),
        memory_bytes_per_s=tree.get("memory_bytes_per_s", base.memory_bytes_per_s),
        node_link=base.node_link if "node_link" in assumed else Link("node_link", **tree["node_link"]),
        network_link=base.network_link if "network_link" in assumed else Link("network_link", **tree["network_link"]),
        sources={
            key: f"assumed, as {base.name}" if key in assumed else note
            for key in ("memory_mib", "bf16_flops_per_s", "memory_bytes_per_s")
        },
        measured=Measured(tree["attention_flops_per_s"], tree["layer_seconds"])
        if tree.get("layer_seconds") is not None
        else None,
        assumed=tuple(assumed),
        host_memory_bytes=None,
    )


def nearest(memory_bytes: int | None, flops_per_s: float | None) -> Accelerator:
    """The built-in preset that a description resembles: by its memory and its rate, where they are given.

    Of several that are equally near the slowest is taken, so that no time is promised too short.
    """
    if memory_bytes is None:
        return find_accelerator("cpu")

    def distance(one: Accelerator) -> tuple[float, float]:
        assert one.memory_bytes is not None
        far = abs(math.log2(one.memory_bytes / memory_bytes))
        if flops_per_s is not None:
            far += abs(math.log2(one.flops_per_s / flops_per_s))
        # Sizes on the label and in the driver's list differ by some per cent.
        return round(far, 1), one.flops_per_s

    return min((one for one in accelerators().values() if one.memory_bytes is not None), key=distance)


def _memory_bytes(tree: Mapping[str, Any]) -> int | None:
    if "memory_gib" in tree:
        return int(tree["memory_gib"] * GIB)
    return None if tree["memory_mib"] is None else int(tree["memory_mib"]) * MIB


def _fp32_flops(tree: Mapping[str, Any], flops: float | None, base: Accelerator) -> float:
    """As measured; else in proportion to the rate in 16 bits, as on the preset that it is like."""
    if tree.get("fp32_flops_per_s") is not None:
        return float(tree["fp32_flops_per_s"])
    return base.fp32_flops_per_s * (1.0 if flops is None else flops / base.flops_per_s)


def preset_tree(machine: Accelerator) -> dict[str, Any]:
    """The figures of a machine that is not built in, as `preset_from_tree` reads them."""
    measured, memory = machine.measured, machine.memory_bytes
    rates = dict.fromkeys(one.name for one in fields(Measured)) if measured is None else asdict(measured)
    return {
        "version": VERSION,
        "name": machine.name,
        "title": machine.title,
        "source": machine.sources["memory_mib"],
        "like": machine.like,
        "assumed": list(machine.assumed),
        "memory_mib": None if memory is None else memory // MIB,
        "bf16_flops_per_s": machine.flops_per_s,
        "fp32_flops_per_s": None if measured is None else machine.fp32_flops_per_s,
        **rates,
        "memory_bytes_per_s": machine.memory_bytes_per_s,
        "node_link": _link_tree(machine.node_link),
        "network_link": _link_tree(machine.network_link),
    }


def _link_tree(link: Link) -> dict[str, Any]:
    return {
        "title": link.title,
        "bytes_per_s": link.bytes_per_s,
        "latency_seconds": link.latency_seconds,
        "source": link.source,
    }
