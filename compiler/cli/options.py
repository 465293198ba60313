"""Options and arguments that several commands have, and the table of the values that a spec resolves to."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from parcompile.backends.kinds import ALL, MODEL, Certainty, chosen, names, recognise
from parcompile.diagnostics import Diagnostic, Severity
from parcompile.diagnostics.reporters import report
from parcompile.machines import named_accelerator
from parcompile.pipeline import Checked, compile_file, is_plan
from parcompile.rules import INEXPRESSIBLE
from parcompile.spec.resolve import Unavailable
from parcompile.text import SourceError
from parcompile.user_files import parse_json

from . import SPEC_HAS_ERRORS, told

if TYPE_CHECKING:
    from parcompile.plan import Plan

# Values of the command line, as types of its options.


class FiniteRange(click.FloatRange):
    """A range of numbers above 0, without NaN and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number", param, ctx)
        if not math.isfinite(number) or number <= 0:
            self.fail(f"{value} is not a finite number above 0", param, ctx)
        return super().convert(value, param, ctx)


SECONDS = FiniteRange(0, 1_000_000, min_open=True)
"""To wait: up to 11 days, since the calls of operating systems take no more than some weeks."""


def output_file(ending: str = "") -> Callable[[str], Path]:
    """A type of options: a file that can be written, which is looked at before work that may take long.

    With an ending its name says what it is, so that no input is replaced by mistake.
    """

    def read(text: str) -> Path:
        path = Path(text)
        if path.is_dir():
            raise click.BadParameter(f"{text} is a folder: name a file in it{ending and f' that ends in {ending}'}")
        if ending and path.suffix.lower() != ending:
            raise click.BadParameter(f"{text} does not end in {ending}: write {path.with_suffix(ending)}")
        refuse_unwritable(path)
        return path

    return read


def json_or_word(text: str) -> Any:
    """A value as JSON writes it; what is no JSON is a word."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def seen_from(folder: Path, file: Path) -> str:
    """The path of a file as a spec in a folder names it."""
    # `..` of a folder that is a link is beside what it links to.
    real = Path(os.path.realpath(file.parent)) / file.name
    return Path(os.path.relpath(real, os.path.realpath(folder))).as_posix()


def refuse_unwritable(file: Path) -> None:
    """Looks at the folder of a file to write, and at what has its name.

    Raises:
        ClickException: the file cannot be written.
    """
    why, folder = "", Path(os.path.realpath(file)).parent
    shown = folder if file.is_symlink() else file.parent
    if not folder.is_dir():
        why = f"there is no folder {shown}; create it first"
    elif not os.access(folder, os.W_OK):
        why = f"{shown} is not a writable folder"
    elif file.exists() and not file.is_file():
        why = "it is no regular file but a folder, a pipe or a device"
    elif file.exists() and not (file.stat().st_mode & 0o222 and os.access(file, os.W_OK)):
        why = "the file is read-only"
    if why:
        raise click.ClickException(f"{file} cannot be written: {why}")


@told(ValueError, by=click.BadParameter)
def accelerator_name(text: str) -> str:
    """An accelerator as a person writes it, by the name of its preset; or the path of its file.

    Raises:
        BadParameter: there is none of this name.
    """
    return named_accelerator(text)


_TOKENS = re.compile(r"(?P<count>\d+(?:\.\d+)?)(?P<unit>[km]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 1024, "m": 1024**2}


def token_count(text: str) -> int:
    """Tokens: `128k` is 131072, `1M` is 1048576.

    Raises:
        BadParameter: it is written otherwise.
    """
    found = _TOKENS.fullmatch(text)
    tokens = float(found["count"]) * _UNITS[found["unit"].lower()] if found is not None else 0
    if not tokens or tokens != int(tokens):
        raise click.BadParameter(f"{text!r} is no number of tokens: write 4096, 128k or 1M")
    return int(tokens)


def sequence_length_option(said: str) -> Callable[[Any], Any]:
    """`--sequence-length` of a command; `said` is its help."""
    return click.option("--sequence-length", type=token_count, metavar="TOKENS", help=said)


def document_length_option() -> Callable[[Any], Any]:
    """`--document-length` of a command."""
    said = "Mean tokens of the documents packed into a sequence; left out, a sequence counts as one document."
    return click.option("--document-length", type=click.IntRange(min=1), help=said)


def accelerator_option(**more: Any) -> Callable[[Any], Any]:
    """`--accelerator` of a command."""
    return click.option("--accelerator", type=accelerator_name, metavar="NAME", help="What a rank runs on.", **more)


def form_option(*forms: str) -> Callable[[Any], Any]:
    """`--format` of a command, as `form`: text or json where no forms are given, else the first without the option."""
    known = forms or ("text", "json")
    return click.option("--format", "form", type=click.Choice(known), default=known[0], show_default=True)


def coefficients_option() -> Callable[[Any], Any]:
    """`--coefficients` of a command."""
    file = click.Path(dir_okay=False, path_type=Path)
    return click.option("--coefficients", type=file, help="Written by calibrate.")


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that writes a first spec: where the model stands, the cluster, and its sequences."""
    options = (
        click.option("--hf-config", type=click.Path(path_type=Path), help="A Hugging Face config.json, or its folder."),
        click.option("--nodes", type=click.IntRange(1, 65536), default=1, show_default=True, help="Machines."),
        click.option(
            "--gpus-per-node", type=click.IntRange(1, 256), default=8, show_default=True, help="Ranks on each."
        ),
        accelerator_option(default="h100-sxm", show_default=True),
        sequence_length_option("Tokens of a sequence, as 4096, 128k or 1M. Default: up to 8192."),
    )
    for option in reversed(options):
        command = option(command)
    return command


# Which findings count: those of chosen codes, and how much.


class Selection(NamedTuple):
    """Which findings count, and how much."""

    select: tuple[str, ...]
    ignore: tuple[str, ...]
    warnings_as_errors: bool

    def of(self, diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
        """Those of the findings that count."""
        kept = [
            one
            for one in diagnostics
            if (not self.select or _is_among(one.code, self.select)) and not _is_among(one.code, self.ignore)
        ]
        if not self.warnings_as_errors:
            return kept
        return [replace(one, severity=Severity.ERROR) if one.severity is Severity.WARNING else one for one in kept]


def _is_among(code: str, given: Iterable[str]) -> bool:
    """Whether a code is given, or its beginning: letters stand for all of their codes, and for no longer letters."""
    return any(code.startswith(one) and (one[-1].isdigit() or code[len(one) : len(one) + 1].isdigit()) for one in given)


def codes_of(given: tuple[str, ...]) -> tuple[str, ...]:
    """The codes or beginnings of codes, separated by commas or given several times."""
    codes = tuple(code.strip().upper() for one in given for code in one.split(",") if code.strip())
    if codes:
        from parcompile.lint.registry import pages

        for code in codes:
            if not any(_is_among(known, (code,)) for known in pages()):
                near = near_code(code, pages()) or "`parcompile explain` lists all"
                raise click.UsageError(f"there is no code {code}; {near}")
    return codes


def near_code(code: str, known: Collection[str]) -> str:
    """A question for the code that was meant: with all of its digits, or spelt otherwise; empty where none is near."""
    from parcompile.diagnostics import closest

    short = re.fullmatch(r"([A-Z]+)(\d{1,6})", code)
    padded = f"{short[1]}{int(short[2]):03}" if short is not None else ""
    near = padded if padded in known else closest(code, list(known))
    return f"did you mean {near}?" if near else ""


# The option that names targets: the same in every command that has it.


def target_option(said: str) -> Callable[[Any], Any]:
    """`--target`, several times; `said` is its help, before the names."""
    known = f"{', '.join(names())}, or {ALL}"
    return click.option(
        "-t", "--target", "targets", multiple=True, help=f"{said}: {known}. Can be given several times."
    )


def no_estimate_option(said: str) -> Callable[[Any], Any]:
    """The option that leaves estimates out; `said` is its help."""
    return click.option("--no-estimate", is_flag=True, help=said)


def with_inexpressible(checked: Checked, names: Sequence[str]) -> Checked:
    """A spec that is right, with an error for everything that one of these targets cannot express."""
    if not checked.valid or checked.resolution is None or checked.document is None:
        return checked
    from parcompile.backends.registry import losses
    from parcompile.plan import compile_plan

    document = checked.document
    plan = compile_plan(checked.resolution.spec(), checked.resolution.tree, [])
    found = [
        document.locate(
            Diagnostic(
                INEXPRESSIBLE, Severity.ERROR, f"{name} cannot express {one.what}: {one.why}", path, help=one.instead
            )
        )
        for name, lost in losses(plan, names).items()
        for one in lost
        if one.fatal
        for path in [_place(one.what)]
    ]
    return replace(checked, diagnostics=(*found, *checked.diagnostics))


def _place(what: str) -> tuple[str, ...]:
    """The value that the first word of a loss names; empty where it is none."""
    from parcompile.searching.variant import SECTIONS

    key = what.split()[0]
    return (SECTIONS[key], key) if key in SECTIONS else ()


@told(ValueError, by=click.UsageError)
def chosen_targets(given: Sequence[str]) -> tuple[str, ...]:
    """The targets that are meant.

    Raises:
        UsageError: there is no target of a name.
    """
    return chosen(given)


# Reads what a command is given as a plan: a spec, a plan.json, or the folder that holds one.


def read_plan(path: str) -> tuple[Plan, tuple[Diagnostic, ...] | None]:
    """The plan of a file or folder, or the compiled one of a spec with its diagnostics (None of a plan).

    Raises:
        ClickException: it cannot be read.
        Exit: the spec has errors, which are printed.
    """
    from parcompile.plan import load_plan

    with told(SourceError):
        if is_plan(path):
            return load_plan(path), None
        plan, checked = compile_file(path, must_fit=False)
    if plan is None:
        refuse_foreign(checked)
        errors = [one for one in checked.diagnostics if one.is_error]
        report(errors, [checked.text], "text", sys.stderr)
        raise click.exceptions.Exit(SPEC_HAS_ERRORS)
    return plan, checked.diagnostics


def refuse_foreign(checked: Checked) -> None:
    """Answers the file of another tool, in which every key of a spec is missing, in one sentence.

    Raises:
        ClickException: it is one.
    """
    from parcompile.backends.importers import kinds

    found = recognise(checked.document.tree if checked.document else None)
    if found.certainty is not Certainty.CERTAIN or found.kind not in (MODEL, *kinds()):
        return
    file, name = checked.text.file, {MODEL: "the configuration of a model"}.get(found.kind, f"of kind {found.kind}")
    way = "init" if found.kind == MODEL else "import"
    raise click.ClickException(f"{file} is {name}, not a spec: `parcompile {way} {file}` makes a spec of it")


def values_of(checked: Checked) -> dict[str, dict[str, object]]:
    """Each resolved value by its dotted path: the value, its origin, how it came about, and its line."""
    resolution, document = checked.resolution, checked.document
    if resolution is None or document is None:
        return {}
    try:
        provenance = resolution.spec().provenance
    except Unavailable:
        provenance = dict(sorted(resolution.provenance.items()))
    values: dict[str, dict[str, object]] = {}
    for path, one in provenance.items():
        steps = tuple(path.split("."))
        line = document.position(steps).line if document.place(steps) is not None else None
        values[path] = {"value": one.value, "origin": one.origin.value, "detail": one.detail, "line": line}
    return values


def table_of(file: str, values: dict[str, dict[str, object]]) -> str:
    """The same as rows: path, value, where it comes from."""
    rows = []
    for path, one in values.items():
        text = json.dumps(one["value"], ensure_ascii=False, default=str)
        if len(text) > 40 or isinstance(one["value"], dict):
            continue
        how = str(one["origin"])
        if one["origin"] == "spec":
            how = f"line {one['line']}" if one["line"] else "the spec"
        elif one["detail"]:
            how += f": {one['detail']}"
        rows.append((path, text, how))
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"{path:<{widths[0]}}  {text:<{widths[1]}}  {how}".rstrip() for path, text, how in rows]
    return "\n".join([f"{file}:", *("  " + line for line in lines), ""])
