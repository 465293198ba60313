"""`parcompile import FILE`: a spec out of a DeepSpeed configuration, Megatron-LM arguments or a gpt-neox YAML."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from parcompile.backends.importers import kinds
from parcompile.backends.reading import Outcome, RefusedError, SpecPath
from parcompile.diagnostics.reporters import Style, hanging
from parcompile.importing import ImportConflictError, Imported, foreign, import_document
from parcompile.schema import example
from parcompile.text import SourceError
from parcompile.units import first_of

from . import SPEC_HAS_ERRORS, save, say, told
from .init import chosen_model
from .options import accelerator_option, json_or_word, output_file, sequence_length_option

_OPTIONS: tuple[SpecPath, ...] = (
    *(("model",), ("model", "vocab_size"), ("cluster", "nodes"), ("cluster", "gpus_per_node")),
    *(("cluster", "accelerator"), ("training", "sequence_length"), ("training", "precision")),
)
"""Values of the spec that an option of their name answers for; all others are answered with --set."""


@click.command("import")
@click.argument("file")
@click.option("-o", "--output", type=output_file(), metavar="FILE", help="File to write the spec to.")
@click.option("--kind", metavar="KIND", help="What FILE is. By default its keys tell.")
@click.option("--function", metavar="NAME", help="The configuration that is meant in a Python FILE with several.")
@click.option("--model", help="A preset, or the path of a Hugging Face config.json, when FILE does not describe it.")
@click.option("--vocab-size", type=click.IntRange(min=1), help="Rows of the embedding, when FILE does not say them.")
@click.option("--nodes", type=click.IntRange(min=1), help="Machines.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="Ranks on each machine.")
@accelerator_option()
@sequence_length_option("Tokens of a sequence, as 4096, 128k or 1M.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Type of the weights.")
@click.option("--set", "settings", multiple=True, metavar="PATH=VALUE", help="Any other value of the spec, as JSON.")
@click.option("--variable", "variables", multiple=True, metavar="NAME=VALUE", help="A variable that a script is given.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="Form of the report.")
@click.option("--strict", is_flag=True, help="Exit with 1 also where something changes your training.")
@click.option("-v", "--verbose", is_flag=True, help="Report every option of FILE.")
def command(
    file: str,
    output: Path | None,
    kind: str | None,
    function: str | None,
    model: str | None,
    settings: tuple[str, ...],
    variables: tuple[str, ...],
    form: str,
    *,
    strict: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Convert another tool's configuration into a spec.

    FILE is a configuration of DeepSpeed, Megatron-LM (a shell script, YAML or JSON), gpt-neox, accelerate, axolotl,
    LLaMA-Factory, ms-swift (a shell script, YAML or JSON), NeMo Automodel, torchtitan (Python or TOML), Megatron-Bridge
    (Python) or transformers (arguments of its Trainer, ParallelismConfig, DistributedConfig). Python is read and not
    run: --function says which of its functions is meant. The command asks for values that FILE does not contain and
    never guesses them: give them with the options or with --set, as in --set training.seed=7. The spec goes to standard
    output or to -o, a report to standard error: it ends with what changes your training. The exit code is 1 when
    values are still to be given.
    """
    if kind is not None and kind not in kinds():
        raise click.UsageError(f"there is no importer {kind!r}; there are {', '.join(kinds())}")
    if function is not None and Path(file).suffix != ".py":
        raise click.UsageError(f"--function names a function of a Python file, and {file} is none")
    with told(SourceError, RefusedError):
        known, found = foreign(file, kind, function, dict(map(_variable, variables)))
    folder = output.parent if output else Path()
    given["model"] = chosen_model(model, None, folder).section if model else None
    answers = {path: value for path in _OPTIONS if (value := given[path[-1]]) is not None}
    answers |= map(_setting, settings)
    with told(ImportConflictError, RefusedError):
        result = import_document(known, found, answers, folder)
    _write_spec(result, output, file)
    width = Style.of(sys.stderr).width
    said = _as_json(result) if form == "json" else _account(result, file, width, verbose=verbose, output=output)
    say(said, err=True)
    if not result.complete or (strict and any(one.changes for one in result.of(Outcome.LOST))):
        raise click.exceptions.Exit(SPEC_HAS_ERRORS)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise click.BadParameter(f"{text!r} is not NAME=VALUE, as in NNODES=4", param_hint="--variable")
    return name, value


def _setting(text: str) -> tuple[SpecPath, Any]:
    name, equals, value = text.partition("=")
    if not equals or not all(name.split(".")):
        raise click.BadParameter(f"{text!r} is not PATH=VALUE, as in training.seed=7", param_hint="--set")
    return tuple(name.split(".")), json_or_word(value)


def _write_spec(result: Imported, output: Path | None, file: str) -> None:
    text = json.dumps(result.spec, indent=2, ensure_ascii=False) + "\n"
    if output is None:
        say(text, nl=False)
        return
    save(output, text, file)


_MOST_LINES = 5
"""Of what changes training."""
_NAMES_SHOWN = 3


def _account(result: Imported, file: str, width: int, *, verbose: bool, output: Path | None) -> str:
    """What became of the options: on one screen, unless every one of them is asked for."""
    counts = ", ".join(f"{len(result.of(one))} {one.value}" for one in Outcome)
    lines = [hanging("", f"{file} ({result.tool}, {len(result.accounts)} options): {counts}", width)]
    if verbose:
        for outcome in (Outcome.LOST, Outcome.NO_EFFECT, Outcome.OPEN, Outcome.CARRIED):
            found = result.of(outcome)
            if found:
                lines += [f"{outcome.value}:", *(hanging("  ", f"{one.option}: {one.detail}", width) for one in found)]
    else:
        lines += [
            hanging("", f"{one.option}: {one.detail}", width) for one in result.of(Outcome.CARRIED) if one.changes
        ]
        lines += _reasons(result, width)
        lines.append("every option: -v")
    kept = sorted(result.spec.get("backends", {}).get("megatron", {}))
    if kept:
        said = f"{first_of(kept, _NAMES_SHOWN)}; not supported by a spec"
        lines.append(hanging("only the target megatron keeps: ", said, width))
    if result.questions:
        lines.append("missing:")
        for one in result.questions:
            lines.append(hanging("  ", f"{'.'.join(one.path)} ({one.why}): add {_answer(one.path)}", width))
    for found_wrong in (one for one in result.diagnostics if one.is_error):
        said = f"[{found_wrong.code}] {found_wrong.message}" + (f"; {found_wrong.help}" if found_wrong.help else "")
        lines.append(hanging("fix before compiling: ", said, width))
    lines += _changes(result, width)
    if result.complete and output is not None:
        lines.append(f"next: parcompile check {output}")
    return "\n".join(lines)


def _reasons(result: Imported, width: int) -> list[str]:
    """What is lost, a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for one in result.of(Outcome.LOST):
        if not one.changes:
            by_reason.setdefault(one.detail, []).append(one.option)
    return [
        hanging("lost: ", f"{first_of(names, _NAMES_SHOWN)}: {reason}", width) for reason, names in by_reason.items()
    ]


def _changes(result: Imported, width: int) -> list[str]:
    """What makes training another one, in a few lines."""
    found = [one for one in result.accounts if one.changes and one.outcome is Outcome.LOST]
    if not found:
        return []
    count = "1 thing that changes" if len(found) == 1 else f"{len(found)} things that change"
    shown = found if len(found) <= _MOST_LINES else found[: _MOST_LINES - 1]
    lines = [f"{count} your training:", *(hanging("  ", f"{one.option}: {one.detail}", width) for one in shown)]
    rest = [one.option for one in found[len(shown) :]]
    return [*lines, *([hanging("  ", f"and {first_of(rest, _NAMES_SHOWN)}", width)] if rest else [])]


def _answer(path: SpecPath) -> str:
    """What to add to the command line, with a value as an example."""
    value = example("spec", path)
    if path in _OPTIONS:
        return f"--{path[-1].replace('_', '-')} {'llama-3-8b' if path == ('model',) else value}"
    text = value if isinstance(value, str) else json.dumps(value)
    return shlex.join(["--set", f"{'.'.join(path)}={text}"])


def _as_json(result: Imported) -> str:
    tree = {
        "tool": result.tool,
        "complete": result.complete,
        "options": [
            {
                "name": one.option,
                "outcome": one.outcome.value,
                "detail": one.detail,
                "changes_training": one.changes and one.outcome is Outcome.LOST,
            }
            for one in result.accounts
        ],
        "missing": [{"path": ".".join(one.path), "why": one.why} for one in result.questions],
        "diagnostics": [{"code": one.code, "message": one.message} for one in result.diagnostics if one.is_error],
    }
    return json.dumps(tree, indent=2, ensure_ascii=False)
