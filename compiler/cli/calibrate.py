"""`parcompile calibrate RUNS.csv`: fits the coefficients of the estimates to one's own runs."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from parcompile.atomic import write_file
from parcompile.cost.calibration import Judgement, fit_memory, fit_time, judge
from parcompile.cost.coefficients import KEEPING, MEMORY, TIME, Coefficient, CoefficientSet, Fit, time_bounds
from parcompile.cost.measurements import Measurement, MeasurementError, read_plain
from parcompile.cost.table import columns
from parcompile.user_files import parse_json, read_text
from parcompile.version import how_to_install

from .saying import say

FEWEST = 5
"""Runs below which a part is not fitted."""


@click.command("calibrate")
@click.argument("runs", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--fit-model", "fitted", multiple=True, metavar="NAME", help="Fit only runs of this model.")
@click.option("--judge", "others", type=click.Path(dir_okay=False, path_type=Path), help="Judge on these runs.")
@click.option("--judge-model", "judged", multiple=True, metavar="NAME", help="Judge only on runs of this model.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the coefficients here.")
def command(
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
    try:
        rows = _chosen(runs, fitted)
        rest = _chosen((others,) if others else runs, judged) if others or judged else []
    except MeasurementError as error:
        raise click.ClickException(str(error)) from None
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
    text = _text(found, time_bounds(rows[0].work), judge(rest, found) if rest else None)
    say(text, nl=False)
    if output is not None:
        tree = {"sets": {"own": found.to_json()}}
        try:
            write_file(output, json.dumps(tree, indent=1) + "\n")
        except OSError as error:
            raise click.ClickException(f"{output} cannot be written: {error.strerror}") from None
        say(f"wrote {output}")


def _chosen(paths: Sequence[Path], models: Sequence[str]) -> list[Measurement]:
    rows = [one for path in paths for one in read_plain(path)]
    known = {one.model for one in rows}
    missing = [name for name in models if name not in known]
    if missing or not rows:
        there = f"there are: {', '.join(sorted(known))}" if known else "it has no usable rows"
        raise MeasurementError(f"{_names(paths)} has no runs of {', '.join(missing) or 'any model'}; {there}")
    return [one for one in rows if not models or one.model in models]


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def _text(found: CoefficientSet, bounds: Mapping[str, Coefficient], judged: Judgement | None) -> str:
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
        sets = parse_json(read_text(path))["sets"]
        (name, tree), *more = sets.items()
        found = CoefficientSet.from_json(name, tree)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise click.ClickException(f"{path} was not written by parcompile calibrate") from None
    if more or not all(
        _complete(fit, table) for fit, table in ((found.memory, {**MEMORY, **KEEPING}), (found.time, TIME))
    ):
        raise click.ClickException(f"{path} does not hold one complete set of coefficients")
    return found


def _complete(fit: Fit | None, table: Mapping[str, object]) -> bool:
    return fit is None or set(fit.values) == set(table)
