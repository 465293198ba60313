"""`parcompile check SPEC...`: everything that is wrong with many files, for people and for machines.

The files that `parcompile check` is given, each checked and mended.
"""

from __future__ import annotations

import contextlib
import glob
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from parcompile.backends.kinds import CHECKED, FILLERS, MODEL, UNKNOWN, Certainty, named_files
from parcompile.diagnostics import Diagnostic, has_errors
from parcompile.diagnostics.reporters import FORMATS, Style, hanging, report
from parcompile.pipeline import Checked, check_any, check_read
from parcompile.rules import MEMORY_RULES, rule_targets
from parcompile.spec.resolve import Unavailable
from parcompile.text import SourceError, SourceText, parse

from . import SPEC_HAS_ERRORS, USAGE, say, told
from .options import (
    Selection,
    chosen_targets,
    codes_of,
    no_estimate_option,
    table_of,
    target_option,
    values_of,
    with_inexpressible,
)

if TYPE_CHECKING:
    from parcompile.lint.deepspeed import UsageOptions

_ROUNDS = 100


@dataclass
class Run:
    """What the files of one call gave."""

    files: list[str] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    fixed: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    """Files of kinds that have no checker."""
    why_unread: dict[str, str] = field(default_factory=dict)
    """Those of them whose text makes no sense: where, and why."""
    untouched: dict[str, str] = field(default_factory=dict)
    """Files that --fix leaves alone, because it is not certain what they are."""

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each file that was checked."""
        return {one.text.file: one.kind for one in self.checked}

    @property
    def texts(self) -> list[SourceText]:
        """The texts of the files that were checked."""
        return [one.text for one in self.checked]


class Mending(NamedTuple):
    """Which findings are mended: those that are selected, by safe fixes or by any."""

    chosen: Selection
    unsafe: bool


def expanded(specs: Sequence[str]) -> list[str]:
    """Files in the order given, patterns replaced by what they match, each file once."""
    files: dict[str, None] = {}
    for spec in specs:
        if spec == "-" or not glob.has_magic(spec) or Path(spec).exists():
            files[spec] = None
            continue
        matches = sorted(match for match in glob.glob(spec, recursive=True) if Path(match).is_file())  # noqa: PTH207
        if not matches:
            raise click.UsageError(f"no file matches {spec}")
        files.update(dict.fromkeys(matches))
    return list(files)


def checked_files(
    files: list[str], targets: tuple[str, ...], kind: str | None, mending: Mending | None, usage: UsageOptions | None
) -> Run:
    """Files and those that they name, each checked, and mended where that is asked for."""
    run, waiting = Run(), list(files)
    for file in waiting:
        checked = _check_one(run, file, targets, kind, None if file == "-" or Path(file).is_dir() else mending, usage)
        if checked is not None and checked.document is not None and file != "-" and not Path(file).is_dir():
            followed = named_files(checked.kind, checked.document.tree, Path(file))
            waiting += [name for name in followed if name not in waiting]
    return run


def _check_one(
    run: Run, file: str, targets: tuple[str, ...], kind: str | None, mending: Mending | None, usage: UsageOptions | None
) -> Checked | None:
    try:
        checked = check_any(file, targets, kind=kind, usage=usage)
        if checked.is_skipped:
            run.skipped[file] = checked.kind
            if checked.why_unread:
                run.why_unread[file] = checked.why_unread
            return checked
        if mending and checked.certainty is not Certainty.CERTAIN:
            run.untouched[file] = checked.kind
        elif mending:
            checked, count = _fixed(checked, targets, mending, usage)
            run.fixed += count
    except SourceError as error:
        run.unreadable.append(str(error))
    except OSError as error:
        run.unreadable.append(f"{file} cannot be written: {error.strerror}")
    else:
        run.files.append(checked.text.file)
        run.checked.append(checked)
        return checked
    return None


def _fixed(
    checked: Checked, targets: tuple[str, ...], mending: Mending, usage: UsageOptions | None
) -> tuple[Checked, int]:
    """The file after its fixes, one at a time, each tried on what the one before has left."""
    from parcompile.text.fixes import apply_fixes, chosen_fix, save

    count, unsafe, before = 0, mending.unsafe, checked.document
    for _ in range(_ROUNDS):
        document = checked.document
        if document is None:
            break
        done = None
        for one in mending.chosen.of(checked.diagnostics):
            if chosen_fix(one, unsafe=unsafe):
                done = apply_fixes(document, [one], unsafe=unsafe)
                if done.applied:
                    break
        if done is None or not done.applied:
            break
        count += 1
        # Read again as a whole: what is wrong with the text itself is still wrong.
        again = done.document
        read = parse(again.text, again.file, again.format, bom=again.source.bom)
        checked = check_read(read, Path(again.file).resolve().parent, targets, kind=checked.kind, usage=usage)
    if count and checked.document and before:
        save(checked.document, before)
    return checked, count


@click.command("check")
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
@click.option("--format", "format_", type=click.Choice(FORMATS), default="text", show_default=True, help="Output.")
@click.option(
    "--kind", type=click.Choice(CHECKED), help="Kind of the files. By default it is recognised by their keys."
)
@click.option("--skip-unrecognised", is_flag=True, help="Exit with 0 where no file is recognised or makes sense.")
@click.option("--select", multiple=True, metavar="CODE", help="Report only these codes, or all of a letter (W).")
@click.option("--ignore", multiple=True, metavar="CODE", help="Do not report these codes, or all of a letter.")
@target_option("Check the rules of these targets too")
@click.option("--deepspeed-version", metavar="X.Y.Z", help="Check DeepSpeed files for this version.")
@click.option(
    "--used-with", type=click.Choice(FILLERS), help='The tool that reads DeepSpeed files and replaces "auto" in them.'
)
@click.option("--warnings-as-errors", is_flag=True, help="Fail on warnings.")
@click.option("--fix", is_flag=True, help="Apply the fixes that are safe, keeping the file's formatting.")
@click.option("--unsafe-fixes", is_flag=True, help="Apply also those that change numerics or cost.")
@no_estimate_option("Do not check whether the estimated peak of memory fits.")
@click.option("-v", "--verbose", is_flag=True, help="Print remarks in full, with their places.")
@click.option("--show-values", is_flag=True, help="Show each resolved value and where it comes from (text, json).")
def command(
    specs: tuple[str, ...],
    format_: str,
    kind: str | None,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    targets: tuple[str, ...],
    deepspeed_version: str | None,
    used_with: str | None,
    *,
    skip_unrecognised: bool,
    warnings_as_errors: bool,
    fix: bool,
    unsafe_fixes: bool,
    no_estimate: bool,
    verbose: bool,
    show_values: bool,
) -> None:
    """Check specs and DeepSpeed or Megatron-LM configurations.

    SPEC is a file, a pattern such as 'specs/**/*.json', the folder of a plan, or - for standard input. Nothing is
    written. The exit code is 0 when there are no errors, 1 when there are, and 2 when the command line is wrong or a
    file cannot be read.
    """
    if show_values and format_ not in ("text", "json"):
        raise click.UsageError("--show-values needs --format text or json")
    chosen = Selection(codes_of(select), codes_of(ignore), warnings_as_errors)
    mending = Mending(chosen, unsafe=unsafe_fixes) if fix or unsafe_fixes else None
    usage = _usage(deepspeed_version, used_with)
    wanted = rule_targets(chosen_targets(targets), estimate=not no_estimate)
    run = checked_files(expanded(specs), wanted, kind, mending, usage)
    if not skip_unrecognised:  # a text that makes no sense may be a spec
        run.unreadable += [f"{file} cannot be read: {why}" for file, why in run.why_unread.items()]
        run.skipped = {file: kind for file, kind in run.skipped.items() if file not in run.why_unread}
        run.why_unread = {}
    if targets:
        run.checked = [with_inexpressible(one, chosen_targets(targets)) for one in run.checked]
    found = [one for checked in run.checked for one in chosen.of(checked.diagnostics)]
    alone = not run.checked and not skip_unrecognised
    unread = [_why_skipped(file, kind, run.why_unread.get(file)) for file, kind in run.skipped.items() if alone]
    unread = [*run.unreadable, *unread]
    _print(run, found, format_, unread, show_values=show_values, folded=not verbose, estimates=not no_estimate)
    for line in _remarks(run, alone=alone):
        say(line, err=True)
    if unread:
        raise click.exceptions.Exit(USAGE)
    if has_errors(found):
        raise click.exceptions.Exit(SPEC_HAS_ERRORS)


def _usage(version: str | None, used_with: str | None) -> UsageOptions | None:
    """For which DeepSpeed the files are meant, if that is said; a version that there is not is a mistake of usage."""
    if version is None and used_with is None:
        return None
    from parcompile.backends.deepspeed.table import UnknownVersionError, nearest
    from parcompile.lint.deepspeed import UsageOptions

    if version is not None:
        with told(UnknownVersionError, by=click.UsageError):
            nearest(version)
    return UsageOptions(version, used_with)


def _remarks(run: Run, *, alone: bool) -> Iterator[str]:
    """What there is to say beside the findings: files that were not read, not recognised, or not changed."""
    yield from (f"Error: {message}" for message in run.unreadable)
    if len(run.skipped) == 1:
        file, kind = next(iter(run.skipped.items()))
        why = _why_skipped(file, kind, run.why_unread.get(file))
        yield f"Error: {why}" if alone else hanging("skipped: ", why, Style.of(sys.stderr).width)
    elif run.skipped:
        kinds = Counter("not recognised" if kind == UNKNOWN else f"of kind {kind}" for kind in run.skipped.values())
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        first, more = next(iter(run.skipped)), len(run.skipped) - 1
        hint = "; --kind says what a file is" if UNKNOWN in run.skipped.values() else ""
        yield f"{'Error: ' if alone else ''}skipped {first} and {more} more: {counts}{hint}"
        yield from (f"{file} cannot be read: {why}" for file, why in run.why_unread.items())
    for file, kind in run.untouched.items():
        yield f"{file} is probably of kind {kind}, but that is not certain: not changed; --kind {kind} says so"


def _why_skipped(file: str, kind: str, why_unread: str | None) -> str:
    """Why the only file was not checked."""
    if why_unread is not None:
        return f"{file} cannot be read: {why_unread}"
    if kind == UNKNOWN:
        kind = _kind_of_recipe(file)
    if kind == UNKNOWN:
        return f"{file} is not recognised as a spec, nor as a configuration of another tool; --kind says what it is"
    if kind == MODEL:
        return f"{file} is the configuration of a model, not a spec: `parcompile init {file}` writes a spec for it"
    from parcompile.backends.importers import kinds

    if kind in kinds():
        called = f"`parcompile import {file}` makes a spec of it"
        return f"{file} is of kind {kind}, which `check` does not take: {called}"
    return f"{file} is of kind {kind}, which is neither a spec nor a configuration that parcompile reads"


def _kind_of_recipe(file: str) -> str:
    """The kind of a Python or TOML file that an importer takes."""
    from parcompile.backends.recipes import recipe

    with contextlib.suppress(SourceError):
        found = recipe(file)
        return UNKNOWN if found is None else found[1]
    return UNKNOWN


def _verdict(checked: Checked) -> str | None:
    """Whether a spec fits, and how fast it is; nothing where an error hides its layout."""
    wrong = any(one.is_error and one.code not in MEMORY_RULES for one in checked.diagnostics)
    if wrong or checked.resolution is None:
        return None
    from parcompile.cost.step import timing
    from parcompile.cost.table import verdict
    from parcompile.rules.h_memory import estimated

    with contextlib.suppress(ValueError, Unavailable):
        work = checked.resolution.work
        return verdict(work, estimated(work), timing(work))
    return None


def _print(
    run: Run,
    found: list[Diagnostic],
    format_: str,
    unread: list[str],
    *,
    show_values: bool,
    folded: bool,
    estimates: bool,
) -> None:
    titles = {}
    if format_ == "sarif" and found:
        from parcompile.lint.registry import titles as all_titles

        titles = dict(all_titles())
    if format_ == "text" and estimates:
        for checked in run.checked:
            if (said := _verdict(checked)) is not None:
                say((f"{checked.text.file}: " if len(run.checked) > 1 else "") + said)
    values = {file: values_of(one) for file, one in zip(run.files, run.checked, strict=True)} if show_values else {}
    with_values = io.StringIO() if show_values and format_ == "json" else None
    report(
        found,
        run.texts,
        format_,
        with_values or sys.stdout,
        files=run.files,
        titles=titles,
        fix_hint="--fix" if not run.fixed else None,
        kinds=run.kinds,
        folded=folded,
        unreadable=unread,
    )
    if with_values is not None:
        say(json.dumps({**json.loads(with_values.getvalue()), "values": values}, indent=2, default=str))
    if format_ != "text":
        return
    for file, one in values.items():
        say(table_of(file, one))
    if run.fixed:
        say(f"{run.fixed} fixed")
    if run.checked and not found:
        count = len(run.checked)
        files = run.files[0] if run.skipped and count == 1 else f"{count} file{'s' if count > 1 else ''}"
        say(f"{files} checked: no errors, no remarks")
