"""An accelerator in a file: what `parcompile profile` measured, which a spec names at cluster.accelerator."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parcompile import schema
from parcompile.text import SourceError, read_file
from parcompile.units import MIB

from .accelerator import Accelerator, Link, Measured

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
    return preset_from_tree(read.document.tree)


def preset_from_tree(tree: Mapping[str, Any]) -> Accelerator:
    """The machine that a valid tree describes."""
    memory = tree["memory_mib"]
    note = tree["source"]
    return Accelerator(
        name=tree["name"],
        title=tree["title"],
        memory_bytes=None if memory is None else memory * MIB,
        flops_per_s=tree["bf16_flops_per_s"],
        memory_bytes_per_s=tree["memory_bytes_per_s"],
        node_link=_link("node_link", tree["node_link"]),
        network_link=_link("network_link", tree["network_link"]),
        sources=dict.fromkeys(("memory_mib", "bf16_flops_per_s", "memory_bytes_per_s"), note),
        measured=Measured(tree["like"], tree["fp32_flops_per_s"], tree["attention_flops_per_s"], tree["layer_seconds"]),
    )


def preset_tree(machine: Accelerator) -> dict[str, Any]:
    """The figures of a measured machine, as `preset_from_tree` reads them."""
    measured, memory = machine.measured, machine.memory_bytes
    assert measured is not None
    return {
        "version": VERSION,
        "name": machine.name,
        "title": machine.title,
        "source": machine.sources["bf16_flops_per_s"],
        "like": measured.like,
        "memory_mib": None if memory is None else memory // MIB,
        "bf16_flops_per_s": machine.flops_per_s,
        "fp32_flops_per_s": measured.fp32_flops_per_s,
        "attention_flops_per_s": measured.attention_flops_per_s,
        "memory_bytes_per_s": machine.memory_bytes_per_s,
        "layer_seconds": measured.layer_seconds,
        "node_link": _link_tree(machine.node_link),
        "network_link": _link_tree(machine.network_link),
    }


def _link(name: str, tree: Mapping[str, Any]) -> Link:
    return Link(name, tree["title"], tree["bytes_per_s"], tree["source"], tree["latency_seconds"])


def _link_tree(link: Link) -> dict[str, Any]:
    return {
        "title": link.title,
        "bytes_per_s": link.bytes_per_s,
        "latency_seconds": link.latency_seconds,
        "source": link.source,
    }
