"""`parcompile accelerators`: the presets that a spec can name at cluster.accelerator."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import click

from parcompile.cost.table import columns
from parcompile.diagnostics.reporters.dispatch import Style, hanging
from parcompile.machines.accelerator import Accelerator, accelerators
from parcompile.units import format_bandwidth, format_bytes, format_compute

from .saying import say


@click.command("accelerators")
@click.argument("name", required=False)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(name: str | None, form: str) -> None:
    """List the accelerators that a spec can name.

    With NAME: all figures of one and their sources. Rates are peaks of dense bf16 products; links are those of one
    rank in one direction.
    """
    known = accelerators()
    if name is not None and name not in known:
        raise click.UsageError(f"there is no accelerator {name!r}; there are: {', '.join(known)}")
    chosen = list(known.values()) if name is None else [known[name]]
    if form == "json":
        trees = [_tree(one) for one in chosen]
        say(json.dumps(trees if name is None else trees[0], indent=2))
    elif name is None:
        say(_table(chosen))
    else:
        say(_figures(chosen[0]))


def _memory(one: Accelerator) -> str:
    return "of its host" if one.memory_bytes is None else format_bytes(one.memory_bytes)


def _table(chosen: list[Accelerator]) -> str:
    rows = [("name", "memory", "bf16", "bandwidth", "in a node", "between nodes")]
    rows += [
        (
            one.name,
            _memory(one),
            format_compute(one.flops_per_s),
            format_bandwidth(one.memory_bytes_per_s),
            format_bandwidth(one.node_link.bytes_per_s),
            format_bandwidth(one.network_link.bytes_per_s),
        )
        for one in chosen
    ]
    return "\n".join(columns(rows))


def _figures(one: Accelerator) -> str:
    rows = [
        ("name", one.name, one.title),
        ("memory", _memory(one), one.sources.get("memory_mib", "")),
        ("bf16", format_compute(one.flops_per_s), one.sources["bf16_flops_per_s"]),
        ("fp32", format_compute(one.fp32_flops_per_s), one.sources.get("fp32_flops_per_s", "")),
        ("bandwidth", format_bandwidth(one.memory_bytes_per_s), one.sources["memory_bytes_per_s"]),
    ]
    rows += [
        (what, format_bandwidth(link.bytes_per_s), f"{link.title}; {link.source}")
        for what, link in (("in a node", one.node_link), ("between nodes", one.network_link))
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    width = Style.of(sys.stdout).width
    labels = [f"{what.ljust(widths[0])}  {value.ljust(widths[1])}  " for what, value, _ in rows]
    return "\n".join(hanging(label, row[2], width).rstrip() for label, row in zip(labels, rows, strict=True))


def _tree(one: Accelerator) -> dict[str, Any]:
    tree = dataclasses.asdict(one)
    for key in ("like", "measured", "assumed"):
        del tree[key]
    return tree
