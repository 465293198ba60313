"""`parcompile import FILE`: a spec out of a DeepSpeed configuration, Megatron-LM arguments or a gpt-neox YAML."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from parcompile.atomic import write_file
from parcompile.backends.importer import RefusedError
from parcompile.backends.importers import added_kind, kinds
from parcompile.backends.kinds import SPEC
from parcompile.backends.reading import Outcome, SpecPath
from parcompile.foreign import recognised
from parcompile.importing import ImportConflictError, Imported, import_document
from parcompile.text import SourceError, read_file

from .main import SPEC_HAS_ERRORS
from .saying import say

TOOLS = "DeepSpeed, Megatron-LM, gpt-neox, accelerate, transformers, axolotl or LLaMA-Factory"

_OPTIONS: dict[SpecPath, str] = {
    ("model",): "--model",
    ("model", "vocab_size"): "--vocab-size",
    ("cluster", "nodes"): "--nodes",
    ("cluster", "gpus_per_node"): "--gpus-per-node",
    ("cluster", "accelerator"): "--accelerator",
    ("training", "sequence_length"): "--sequence-length",
    ("training", "precision"): "--precision",
}
"""Options that answer for a value of the spec; all others are answered with --set."""


@click.command("import")
@click.argument("file")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write the spec to.")
@click.option("--kind", metavar="KIND", help="What FILE is. By default its keys tell.")
@click.option("--model", help="A preset, or the path of a Hugging Face config.json, when FILE does not describe it.")
@click.option("--vocab-size", type=click.IntRange(min=1), help="Rows of the embedding, when FILE does not say them.")
@click.option("--nodes", type=click.IntRange(min=1), help="Machines.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="Ranks on each machine.")
@click.option("--accelerator", help="What a rank runs on.")
@click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens of a sequence.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Type of the weights.")
@click.option("--set", "settings", multiple=True, metavar="PATH=VALUE", help="Any other value of the spec, as JSON.")
@click.option("--variable", "variables", multiple=True, metavar="NAME=VALUE", help="A variable that a script is given.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="Form of the account.")
def command(
    file: str,
    output: Path | None,
    kind: str | None,
    model: str | None,
    vocab_size: int | None,
    nodes: int | None,
    gpus_per_node: int | None,
    accelerator: str | None,
    sequence_length: int | None,
    precision: str | None,
    settings: tuple[str, ...],
    variables: tuple[str, ...],
    form: str,
) -> None:
    """Convert another tool's configuration into a spec.

    FILE is a configuration of DeepSpeed, Megatron-LM (a shell script, YAML or JSON), gpt-neox, accelerate, axolotl,
    LLaMA-Factory or transformers (arguments of its Trainer, ParallelismConfig, DistributedConfig). The command asks
    for values that FILE does not contain and never guesses them: give them with the options or with --set, as in --set
    training.seed=7. The spec goes to standard output or to -o. A report of every option of FILE goes to standard error.
    """
    if kind is not None and kind not in kinds():
        raise click.UsageError(f"there is no importer {kind!r}; there are {', '.join(kinds())}")
    try:
        found, recognition = recognised(read_file(file), kind, variables=dict(map(_variable, variables)))
    except SourceError as error:
        raise click.ClickException(str(error)) from None
    if recognition.kind == SPEC:
        raise click.ClickException(f"{file} is a spec already")
    if found.document is None or not isinstance(found.document.tree, dict):
        why = found.why_unread or "a configuration is an object of keys and values"
        raise click.ClickException(f"{file} cannot be read: {why}")
    known = recognition.kind if recognition.kind in kinds() else added_kind(found.document.tree)
    if known is None:
        raise click.ClickException(
            f"{file} is not recognised as a configuration of {TOOLS}; --kind says what it is: {', '.join(kinds())}"
        )
    folder = output.parent if output else Path()
    given: dict[SpecPath, Any] = {
        ("model",): _model(model, folder) if model else None,
        ("model", "vocab_size"): vocab_size,
        ("cluster", "nodes"): nodes,
        ("cluster", "gpus_per_node"): gpus_per_node,
        ("cluster", "accelerator"): accelerator,
        ("training", "sequence_length"): sequence_length,
        ("training", "precision"): precision,
    }
    answers = {path: value for path, value in given.items() if value is not None} | dict(map(_setting, settings))
    try:
        result = import_document(known, found.document, answers, folder)
    except (ImportConflictError, RefusedError) as error:
        raise click.ClickException(f"{file}: {error}") from None
    _write_spec(result, output)
    say(_as_json(result) if form == "json" else _account(result, file), err=True)
    if not result.complete:
        raise click.exceptions.Exit(SPEC_HAS_ERRORS)


def _model(name: str, folder: Path) -> dict[str, str]:
    """A preset, or a file: named from the folder of the spec."""
    if name.endswith(".json") or Path(name).exists():
        file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        return {"hf_config": os.path.relpath(file, folder)}
    return {"preset": name}


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise click.BadParameter(f"{text!r} is not NAME=VALUE, as in NNODES=4", param_hint="--variable")
    return name, value


def _setting(text: str) -> tuple[SpecPath, Any]:
    name, equals, value = text.partition("=")
    if not equals or not all(name.split(".")):
        raise click.BadParameter(f"{text!r} is not PATH=VALUE, as in training.seed=7", param_hint="--set")
    try:
        return tuple(name.split(".")), json.loads(value)
    except ValueError:
        return tuple(name.split(".")), value


def _write_spec(result: Imported, output: Path | None) -> None:
    text = json.dumps(result.spec, indent=2, ensure_ascii=False) + "\n"
    if output is None:
        say(text, nl=False)
        return
    try:
        write_file(output, text)
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written: {error.strerror}") from None


def _account(result: Imported, file: str) -> str:
    counts = ", ".join(f"{len(result.of(one))} {one.value}" for one in Outcome)
    lines = [f"{file} ({result.tool}, {len(result.accounts)} options): {counts}"]
    for outcome in (Outcome.LOST, Outcome.NO_EFFECT, Outcome.OPEN, Outcome.CARRIED):
        found = result.of(outcome)
        if found:
            lines += [f"{outcome.value}:", *(f"  {one.option}: {one.detail}" for one in found)]
    for one in result.questions:
        name = ".".join(one.path)
        lines.append(f"missing: {name} ({one.why}): add {_OPTIONS.get(one.path, f'--set {name}=…')}")
    lines += [
        f"in the way: [{one.code}] {one.message}" + (f"; {one.help}" if one.help else "")
        for one in result.diagnostics
        if one.is_error
    ]
    return "\n".join(lines)


def _as_json(result: Imported) -> str:
    tree = {
        "tool": result.tool,
        "complete": result.complete,
        "options": [
            {"name": one.option, "outcome": one.outcome.value, "detail": one.detail} for one in result.accounts
        ],
        "missing": [{"path": ".".join(one.path), "why": one.why} for one in result.questions],
        "diagnostics": [{"code": one.code, "message": one.message} for one in result.diagnostics if one.is_error],
    }
    return json.dumps(tree, indent=2, ensure_ascii=False)
