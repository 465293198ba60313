"""`parcompile profile`: measures this machine, and writes an accelerator preset that a spec can name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from parcompile import schema
from parcompile.backends.artefacts import to_text
from parcompile.backends.writing import write
from parcompile.cost.table import columns
from parcompile.machines.accelerator import SCHEMA, accelerators, is_preset_file
from parcompile.units import MIB, format_bandwidth, format_bytes, format_compute, format_seconds
from parcompile.version import how_to_install

from .saying import say

_LIKE = click.Choice(list(accelerators()))


@click.command("profile")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the preset here (NAME.json).")
@click.option("--ranks", type=click.IntRange(2, 16), help="Start as many CPU ranks on this machine and measure links.")
@click.option("--seconds", type=click.FloatRange(1, 3600), default=30.0, show_default=True, help="Time to spend.")
@click.option(
    "--like",
    type=_LIKE,
    metavar="PRESET",
    help="Built-in preset that the machine resembles (default: by its name); `parcompile accelerators` lists them.",
)
@click.option("--name", help="Name of the preset, for tables (default: that of the file).")
def command(output: Path | None, ranks: int | None, seconds: float, like: str | None, name: str | None) -> None:
    """Measure the speed of this machine for the estimates.

    Measures matrix products, attention and memory, and with several ranks the links. Alone it measures one rank. Under
    a launcher (deepspeed --module parcompile profile, torchrun -m parcompile profile) every rank takes part. It then
    measures the links in a node and between nodes, and reports the figures of the slowest rank. A spec names the file
    at cluster.accelerator. Nothing is written unless everything was measured.
    """
    speaks, launched = os.environ.get("RANK", "0") == "0", "RANK" in os.environ
    if ranks and launched:
        raise click.UsageError("--ranks cannot be used under a launcher, because it starts its own ranks")
    if output is not None and not is_preset_file(output.name):
        raise click.UsageError(f"{output}: a spec names a preset's file by its ending, write {output.name}.json")
    folder = Path(os.path.realpath(output)).parent if output is not None else Path()
    if output is not None and speaks and not os.access(folder, os.W_OK):
        raise click.ClickException(f"{folder} is not a writable folder")
    tree = _measured(ranks, seconds, like, name or (output.stem if output else None), launched=launched)
    if tree is None:
        return
    wrong = schema.validate(tree, SCHEMA).diagnostics
    if wrong:
        raise click.ClickException(f"nothing is written: {wrong[0].message}")
    say(_text(tree), nl=False)
    if output is not None:
        try:
            write({output.name: to_text(tree)}, folder)
        except OSError as error:
            raise click.ClickException(f"{output} cannot be written: {error.strerror}") from None
        say(f'wrote {output}: "accelerator": "{output.name}" in the section cluster of a spec beside it')


def _measured(
    ranks: int | None, seconds: float, like: str | None, name: str | None, *, launched: bool
) -> dict[str, Any] | None:
    try:
        from parcompile.runtime import RunError, report_errors
        from parcompile.runtime.local import RankError, run_local
        from parcompile.runtime.profiling import measure, measure_rank
    except ImportError as error:
        raise click.ClickException(f"this needs the runtime ({error}): {how_to_install('runtime')}") from None
    if launched:
        # What every rank finds is said once.
        with report_errors():
            return measure(seconds, like=like, name=name)
    try:
        if ranks:
            found = run_local(ranks, measure_rank, seconds, like, name, timeout=10 * seconds + 120)[0]
            assert isinstance(found, dict)
            return found
        return measure(seconds, like=like, name=name)
    except RunError as error:
        raise click.ClickException(str(error)) from None
    except RankError as error:
        raise click.ClickException(str(error).strip().splitlines()[-1]) from None


def _text(tree: dict[str, Any]) -> str:
    memory = tree["memory_mib"]
    figures = tree["measurements"]
    lines = [
        f"machine   {tree['title']}; {figures['ranks']} rank(s) on {figures['nodes']} node(s), like {tree['like']}"
        f"{'' if memory is None else f', {format_bytes(memory * MIB)}'}",
        "",
        *columns(
            [
                ("what", "type", "size", "time", "reached"),
                *(
                    (one["what"], one["dtype"], _size(one), format_seconds(one["seconds"]), _rate(one))
                    for one in figures["rates"]
                ),
            ]
        ),
    ]
    if figures["links"]:
        rows = [("link", "collective", "ranks", "message", "time", "sent by a rank")]
        for one in figures["links"]:
            size, time, rate = (
                format_bytes(one["size"]),
                format_seconds(one["seconds"]),
                format_bandwidth(one["bytes_per_s"]),
            )
            rows.append((one["link"], one["collective"], str(one["ranks"]), size, time, rate))
        lines += ["", *columns(rows)]
    lines.append("")
    for key in ("node_link", "network_link"):
        link = tree[key]
        rate, latency = format_bandwidth(link["bytes_per_s"]), format_seconds(link["latency_seconds"])
        lines.append(f"{key.replace('_', ' '):<13} {rate}, {latency}")
        if link["source"] != tree["source"]:
            lines[-1] += f" ({link['source']})"
    return "\n".join(lines) + "\n"


def _size(one: dict[str, Any]) -> str:
    if one["what"] == "memory":
        return format_bytes(one["size"])
    return f"{one['size']} × {one['size']}" if one["what"] == "matmul" else f"{one['size']} tokens"


def _rate(one: dict[str, Any]) -> str:
    if one["what"] == "memory":
        return format_bandwidth(one["per_second"])
    return "" if one["what"] == "layer launch" else format_compute(one["per_second"])
