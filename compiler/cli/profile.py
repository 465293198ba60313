"""`parcompile profile` measures this machine, for specs; `parcompile calibrate` fits the estimates to measured runs."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from parcompile import schema
from parcompile.backends.artefacts import to_text
from parcompile.cli import needing, save, say, told
from parcompile.cli.options import FiniteRange, output_file, refuse_unwritable
from parcompile.cost.calibration import Judgement, fit_memory, fit_time, judge
from parcompile.cost.coefficients import KEEPING, MEMORY, TIME, Coefficient, CoefficientSet, time_bounds
from parcompile.cost.measurements import Measurement, MeasurementError, read_plain
from parcompile.cost.table import columns
from parcompile.machines import SCHEMA, accelerators, is_preset_file
from parcompile.units import MIB, format_bandwidth, format_bytes, format_compute, format_seconds
from parcompile.user_files import parse_json, read_text
from parcompile.version import how_to_install

_LIKE = click.Choice(list(accelerators()))


@click.command("profile")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the preset here (NAME.json).")
@click.option("--ranks", type=click.IntRange(2, 16), help="Start as many CPU ranks on this machine and measure links.")
@click.option("--seconds", type=FiniteRange(1, 3600), default=30.0, show_default=True, help="Time to spend.")
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
    if output is not None and speaks:
        refuse_unwritable(output)
    tree = _measured(ranks, seconds, like, name or (output.stem if output else None), launched=launched)
    if tree is None:
        return
    wrong = schema.validate(tree, SCHEMA).diagnostics
    if wrong:
        raise click.ClickException(f"nothing is written: {wrong[0].message}")
    say(_text(tree), nl=False)
    if output is not None:
        save(output, to_text(tree))
        say(f'wrote {output}: "accelerator": "{output.name}" in the section cluster of a spec beside it')


def _measured(
    ranks: int | None, seconds: float, like: str | None, name: str | None, *, launched: bool
) -> dict[str, Any] | None:
    with needing("runtime"):
        from parcompile.runtime import RunError, report_errors
        from parcompile.runtime.local import RankError, run_local
        from parcompile.runtime.profiling import measure, measure_rank
    if launched:
        # What every rank finds is said once.
        with report_errors():
            return measure(seconds, like=like, name=name)
    with told(RunError), told(RankError, by=lambda said: click.ClickException(said.strip().splitlines()[-1])):
        if ranks:
            found = run_local(ranks, measure_rank, seconds, like, name, timeout=10 * seconds + 120)[0]
            assert isinstance(found, dict)
            return found
        return measure(seconds, like=like, name=name)


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
            rate, time = format_bandwidth(one["bytes_per_s"]), format_seconds(one["seconds"])
            rows.append((one["link"], one["collective"], str(one["ranks"]), format_bytes(one["size"]), time, rate))
        lines += ["", *columns(rows)]
    lines.append("")
    for key in ("node_link", "network_link"):
        link = tree[key]
        latency = f", {format_seconds(link['latency_seconds'])}" if link["latency_seconds"] else ""  # 0: not known
        lines.append(f"{key.replace('_', ' '):<13} {format_bandwidth(link['bytes_per_s'])}{latency}")
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


# `parcompile calibrate RUNS.csv`: fits the coefficients of the estimates to one's own runs.

FEWEST = 5
"""Runs below which a part is not fitted."""


@click.command("calibrate")
@click.argument("runs", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--fit-model", "fitted", multiple=True, metavar="NAME", help="Fit only runs of this model.")
@click.option("--judge", "others", type=click.Path(dir_okay=False, path_type=Path), help="Judge on these runs.")
@click.option("--judge-model", "judged", multiple=True, metavar="NAME", help="Judge only on runs of this model.")
@click.option("-o", "--output", type=output_file(), metavar="FILE", help="Write the coefficients here.")
def calibrate_command(
    runs: tuple[Path, ...],
    fitted: tuple[str, ...],
    others: Path | None,
    judged: tuple[str, ...],
    output: Path | None,
) -> None:
    """Fit the coefficients of the estimates to measured runs.

    RUNS are CSV files of measured layouts. Coefficients stay within their physical bounds.

    What is judged must not have been fitted: give --judge another file, or --fit-model and --judge-model of one file.
    docs/estimates.md lists the columns. The result is used by `estimate` and `search` through --coefficients.
    """
    with told(MeasurementError):
        rows = _chosen(runs, fitted)
        rest = _chosen((others,) if others else runs, judged) if others or judged else []
    both = {one.model for one in rows} & {one.model for one in rest} if others is None or others in runs else set()
    if both:
        raise click.UsageError(f"{', '.join(sorted(both))} cannot be both fitted and judged")
    if importlib.util.find_spec("scipy") is None:
        raise click.ClickException(f"fitting needs scipy: {how_to_install('calibrate')}")
    names = ", ".join(path.name for path in runs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, before scipy says the same
            memory = fit_memory(rows) if sum(one.peak_bytes is not None for one in rows) >= FEWEST else None
            time = fit_time(rows) if sum(one.step_seconds is not None for one in rows) >= FEWEST else None
    except ValueError as error:  # of scipy: sizes beyond floats
        raise click.ClickException(f"{names} cannot be fitted: {error}") from None
    if memory is None and time is None:
        raise click.ClickException(f"{names}: fewer than {FEWEST} runs have a measured peak or step")
    models_fitted = ", ".join(sorted({one.model for one in rows}))
    found = CoefficientSet("own", f"{names}, {models_fitted}", rows[0].work.accelerator, memory, time)
    text = _coefficients_text(found, time_bounds(rows[0].work), judge(rest, found) if rest else None)
    say(text, nl=False)
    if output is not None:
        save(output, json.dumps({"sets": {"own": found.to_json()}}, indent=1) + "\n", *runs, others)
        say(f"wrote {output}")


def _chosen(paths: Sequence[Path], models: Sequence[str]) -> list[Measurement]:
    rows = [one for path in paths for one in read_plain(path)]
    known = {one.model for one in rows}
    missing = [name for name in models if name not in known]
    if missing or not rows:
        there = f"there are: {', '.join(sorted(known))}" if known else "it has no usable rows"
        files = ", ".join(map(str, paths))
        raise MeasurementError(f"{files} has no runs of {', '.join(missing) or 'any model'}; {there}")
    return [one for one in rows if not models or one.model in models]


def _coefficients_text(found: CoefficientSet, bounds: Mapping[str, Coefficient], judged: Judgement | None) -> str:
    lines = []
    for part, fit, table in (("memory", found.memory, {**MEMORY, **KEEPING}), ("time", found.time, bounds)):
        if fit is None:
            lines.append(f"{part}: too few measured runs, not fitted")
            continue
        lines.append(f"{part}: {fit.rows} runs, mean error {fit.mean_absolute_error:.1%} on the rows that were fitted")
        rows = [("", "coefficient", "value", "bounds", "meaning")]
        for name, one in table.items():
            rows.append(("", name, f"{fit.values[name]:.4g}", f"{one.low:.4g} to {one.high:.4g}", one.meaning))
        lines += columns(rows)
    if judged is None:
        lines.append("not judged: give runs of other models with --judge or --judge-model")
        return "\n".join(lines) + "\n"
    lines.append("on rows that were not fitted")
    if judged.memory_rows:
        lines.append(
            f"  memory: mean error {judged.memory_error:.1%}, median {judged.memory_median:.1%} of "
            f"{judged.memory_rows} runs; the 90 % interval covers {judged.memory_coverage:.1%}"
        )
    if judged.fits_rows:
        lines.append(f"  fits or not: right for {judged.fits_share:.1%} of {judged.fits_rows} runs")
    if judged.time_rows:
        lines.append(
            f"  step time: mean error {judged.time_error:.1%}, median {judged.time_median:.1%} of "
            f"{judged.time_rows} runs; the 90 % interval covers {judged.time_coverage:.1%}"
        )
    for (model, nodes), value in judged.regret.items():
        lines.append(f"  choice for {model} on {nodes} node(s): {value:.1%} of the best measured throughput lost")
    return "\n".join(lines) + "\n"


def read_set(path: Path) -> CoefficientSet:
    """The coefficients that this command wrote.

    Raises:
        ClickException: the file is none of its.
    """
    try:
        (name, tree), *more = parse_json(read_text(path))["sets"].items()
        found = CoefficientSet.from_json(name, tree)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise click.ClickException(f"{path} was not written by parcompile calibrate") from None
    parts = (found.memory, {**MEMORY, **KEEPING}), (found.time, TIME)
    if more or not all(fit is None or set(fit.values) == set(table) for fit, table in parts):
        raise click.ClickException(f"{path} does not hold one complete set of coefficients")
    return found
