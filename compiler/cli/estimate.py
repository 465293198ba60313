"""`parcompile estimate SPEC`: parameters, memory, traffic and time of a layout, or of a grid of them."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from parcompile.cli.profile import read_set
from parcompile.cost.coefficients import CoefficientSet
from parcompile.cost.context_time import candidates, cheapest
from parcompile.cost.estimate import Estimate, estimate
from parcompile.cost.footprint import Footprint
from parcompile.cost.step import Timing
from parcompile.cost.table import columns, headed, table
from parcompile.cost.workload import Workload
from parcompile.diagnostics import Diagnostic
from parcompile.diagnostics.reporters import Style, report
from parcompile.layout.groups import Axis
from parcompile.pipeline import Checked, check_file, folder_of, is_plan, require_lossless_spec
from parcompile.plan import Plan, compile_plan, load_plan
from parcompile.rules import MEMORY_RULES
from parcompile.schema import validate
from parcompile.searching.variant import changed, variant
from parcompile.spec.resolve.training import AUTO
from parcompile.spec.values import workload_of
from parcompile.text import SourceError
from parcompile.units import format_bytes, format_seconds

from . import SPEC_HAS_ERRORS, save, say, told
from .options import (
    FiniteRange,
    coefficients_option,
    document_length_option,
    form_option,
    json_or_word,
    output_file,
    refuse_foreign,
)

MOST_CELLS = 4096


@click.command("estimate")
@click.argument("spec")
@click.argument("more", nargs=-1, metavar="[NAME=VALUES]...")
@form_option()
@click.option("--sweep", multiple=True, metavar="NAME=VALUES", help="A grid, as in --sweep tp=1,2,4,8 cp=1,2.")
@click.option("--tokens", type=FiniteRange(1, 1e18), help="Tokens to train on: adds days.")
@click.option(
    "--price", type=FiniteRange(0, 1e9, min_open=True), help="Price of a GPU hour: adds the cost of --tokens."
)
@click.option(
    "--expert-imbalance",
    "imbalance",
    type=FiniteRange(min=1.0),
    help="Rows of the busiest ep rank over the mean of all; left out, 1 is assumed.",
)
@document_length_option()
@coefficients_option()
@click.option("--plot", type=output_file(".svg"), metavar="PATH", help="Draw the stages into this SVG file.")
def command(
    spec: str,
    more: tuple[str, ...],
    form: str,
    sweep: tuple[str, ...],
    tokens: float | None,
    price: float | None,
    imbalance: float | None,
    document_length: int | None,
    coefficients: Path | None,
    plot: Path | None,
) -> None:
    """Estimate the memory, traffic and step time of a layout.

    SPEC is a spec, a plan.json, or the folder that holds one. Every estimate has a 90 % interval, and memory the
    probability that it fits. docs/accuracy.md lists the errors on models that were not fitted.
    """
    if more and not sweep:
        raise click.UsageError(f"{more[0]!r} needs --sweep before it")
    of_one = {"--expert-imbalance": imbalance, "--plot": plot, "--tokens": tokens, "--price": price}
    for option, value in of_one.items():
        if sweep and value is not None:
            raise click.UsageError(f"{option} and --sweep cannot be combined: {option} is for one layout")
    if price is not None and tokens is None:
        raise click.UsageError("--price needs the length of the run: add --tokens, as in --tokens 1e12")
    fitted = read_set(coefficients) if coefficients else None
    named = [_values(text) for text in (*sweep, *more)]
    axes = dict(named)
    if len(axes) < len(named):
        twice = next(name for name, _ in named if [one for one, _ in named].count(name) > 1)
        raise click.UsageError(f"--sweep has {twice} twice: write its values together, as in tp=1,2,4")
    checked = checked_spec(spec, ignore_open=bool(axes), whole=bool(axes))
    assert checked.document is not None
    folder = folder_of(spec)
    if axes:
        assert isinstance(checked.document.tree, dict)
        _print_sweep(checked.document.tree, axes, folder, form, fitted, document_length)
        return
    assert checked.resolution is not None
    # A plan holds more than the spec that can be made of it, such as a machine that stood in a file.
    decided = load_plan(spec).spec if is_plan(spec) else checked.resolution.spec()
    if imbalance is not None and decided.training.router is not None and decided.training.router.expert_capacity:
        given = f"training.router.expert_capacity {decided.training.router.expert_capacity}"
        raise click.UsageError(f"--expert-imbalance {imbalance}, but with {given} every expert has equally many rows")
    if imbalance is not None and not 1 <= imbalance <= decided.parallelism.ep:
        ep = decided.parallelism.ep
        why = f"it is 1 to {ep}: at most, one ep rank has all rows" if ep > 1 else "a rank has all rows: leave it out"
        raise click.UsageError(f"--expert-imbalance {imbalance:g}, but with ep {ep} {why}")
    with told(ValueError, by=click.UsageError):
        work = _packed(replace(workload_of(decided), expert_imbalance=imbalance), document_length)
    if not is_plan(spec) and checked.resolution.named_implementation == AUTO and not checked.resolution.given_sizes:
        _name_other_implementation(work)
    result = estimate(work, tokens=tokens, gpu_hour_price=price, fitted=fitted)
    if plot:
        _plot(plot, compile_plan(decided, checked.resolution.tree, []), result)
    if form == "json":
        say(json.dumps(result.to_json(), indent=2))
    else:
        text = table(result, Style.of(sys.stdout))
        say(text, nl=False)


def _name_other_implementation(work: Workload) -> None:
    """Says which implementation of context parallelism is better for such documents than the one of the plan."""
    if work.cp == 1 or work.document_length is None or not work.shape.attends:
        return
    better = cheapest(work, candidates(work)[0]).context
    if better != work.context:
        say(
            f"cp_implementation auto: a plan has {work.context.name}, chosen for whole sequences, and so has this "
            f"estimate. For documents of {work.document_length:,} tokens {better.name} is better: write it into the "
            "spec",
            err=True,
        )


def _packed(work: Workload, document_length: int | None) -> Workload:
    """The step with documents of this length.

    Raises:
        ValueError: a sequence is shorter.
    """
    refuse_longer(document_length, work.sequence_length)
    return replace(work, document_length=document_length)


def refuse_longer(document_length: int | None, sequence_length: int) -> None:
    """Refuses documents that are longer than the sequences they are packed into.

    Raises:
        ValueError: a sequence is shorter.
    """
    if document_length is not None and document_length > sequence_length:
        raise ValueError(
            f"--document-length {document_length} > sequence_length {sequence_length}: "
            f"documents are packed into sequences. Give at most {sequence_length}"
        )


def _plot(file: Path, plan: Plan, result: Estimate) -> None:
    """The memory and the step of an estimate as one drawing."""
    from parcompile.show.pictures import Subject
    from parcompile.show.pictures.front import picture
    from parcompile.show.pictures.svg import svg

    subject = Subject(plan, result)
    save(file, svg(picture("memory", subject), picture("timeline", subject)))


def checked_spec(spec: str, *, ignore_open: bool = False, whole: bool = False) -> Checked:
    """The spec, when nothing is wrong with it but what is ignored; otherwise the diagnostics are printed.

    Too little memory is what an estimate says; open layouts are what a search closes (`ignore_open`).
    With `whole`, a plan is taken only where its spec says all that the plan does.

    Raises:
        ClickException: it cannot be read.
        Exit: it has errors.
    """
    with told(SourceError):
        if whole:
            require_lossless_spec(spec)
        checked = check_file(spec)
    errors = [
        one
        for one in checked.diagnostics
        # Syntax and schema errors (J, K) stop everything.
        if one.is_error and one.code not in MEMORY_RULES and not (ignore_open and one.code[:1] not in ("J", "K"))
    ]
    if errors or checked.document is None:
        refuse(checked, errors)
    return checked


def refuse(checked: Checked, errors: Sequence[Diagnostic]) -> NoReturn:
    """Prints errors of a spec.

    Raises:
        Exit: always.
    """
    refuse_foreign(checked)
    report(errors, [checked.document] if checked.document else [], "text", sys.stderr)
    raise click.exceptions.Exit(SPEC_HAS_ERRORS)


def _values(text: str) -> tuple[str, list[object]]:
    name, found, rest = text.partition("=")
    if not found or not rest:
        raise click.UsageError(f"{text!r} is not NAME=VALUES, as in tp=1,2,4")
    return name, [json_or_word(one) for one in rest.split(",")]


def _print_sweep(
    tree: Mapping[str, Any],
    axes: Mapping[str, Sequence[object]],
    folder: Path,
    form: str,
    fitted: CoefficientSet | None,
    document_length: int | None,
) -> None:
    cells = [dict(zip(axes, cell, strict=True)) for cell in itertools.product(*axes.values())]
    if len(cells) > MOST_CELLS:
        raise click.UsageError(f"{len(cells)} layouts exceed the limit of {MOST_CELLS}")
    _refuse_wrong_values(tree, axes)

    def estimated(changes: Mapping[str, object]) -> Estimate | str:
        found = variant(tree, changes, folder, executable=False)
        if found.work is None:
            return f"refused [{found.code}]"
        return estimate(_packed(found.work, document_length), fitted=fitted)

    with told(ValueError, by=click.UsageError):
        found = [(cell, estimated(cell)) for cell in cells]
    if form == "json":
        rows = [{**cell, **(one.to_json() if isinstance(one, Estimate) else {"refused": one})} for cell, one in found]
        say(json.dumps(rows, indent=2))
        return
    lines = [(*axes, Axis.DP, "memory", "fits", "step", "tokens/s/GPU", "MFU")]
    for cell, one in found:
        shown = tuple(map(str, cell.values()))
        if isinstance(one, str):
            lines.append((*shown, "-", one, "", "", "", ""))
            continue
        lines.append((*shown, str(one.work.dp), *memory_cells(one.memory), *time_cells(one.time)))
    say("\n".join(headed(columns(lines), Style.of(sys.stdout))))


def memory_cells(memory: Footprint) -> tuple[str, str]:
    """The peak of the largest stage, and how likely it fits, in a table of layouts."""
    chance = memory.probability
    return format_bytes(memory.peak.total_bytes), "-" if chance is None else f"{chance:.0%}"


def time_cells(time: Timing) -> tuple[str, str, str]:
    """The step, tokens per second and GPU, and the share of peak FLOP/s, in a table of layouts."""
    return format_seconds(time.step.seconds), f"{time.tokens_per_second_per_gpu:,.0f}", f"{time.utilisation:.1%}"


def _refuse_wrong_values(tree: Mapping[str, Any], axes: Mapping[str, Sequence[object]]) -> None:
    """Each value of a sweep by itself, as the schema sees it in the spec."""
    for name, values in axes.items():
        for value in values:
            with told(ValueError, by=click.UsageError):
                found = validate(changed(tree, {name: value}), "spec").diagnostics
            wrong = [one.message for one in found if one.is_error]
            if wrong:
                raise click.UsageError(f"--sweep {name}={value}: {wrong[0]}")
