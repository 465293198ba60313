"""`parcompile import FILE`: a spec out of a DeepSpeed configuration, Megatron-LM arguments or a gpt-neox YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from parcompile.backends.conversion import Imported, import_tree
from parcompile.pipeline import recognised
from parcompile.text import SourceError, read_file

from .main import SPEC_HAS_ERRORS


@click.command("import")
@click.argument("file")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write the spec to.")
@click.option("--model", help="Preset of the model, when the file does not describe it.")
@click.option("--nodes", type=click.IntRange(min=1), help="Machines.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="Ranks on each machine.")
@click.option("--accelerator", help="What a rank runs on.")
@click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens of a sequence.")
def command(
    file: str,
    output: Path | None,
    model: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    accelerator: str | None,
    sequence_length: int | None,
) -> None:
    """Turn FILE into a spec, and say for every key of it where it went or why it is lost.

    FILE is a DeepSpeed configuration, Megatron-LM arguments (a shell script, YAML or JSON), or a gpt-neox YAML. What
    such a file does not say, the options add. The spec goes to standard output, the account to standard error.
    """
    try:
        read, kind = recognised(read_file(file))
    except SourceError as error:
        raise click.ClickException(str(error)) from None
    if read.document is None or not isinstance(read.document.tree, dict):
        raise click.ClickException(f"{file} is no configuration that can be read; `parcompile check {file}` says why")
    given: dict[tuple[str, ...], Any] = {
        ("model",): {"preset": model} if model else None,
        ("cluster", "nodes"): nodes,
        ("cluster", "gpus_per_node"): gpus_per_node,
        ("cluster", "accelerator"): accelerator,
        ("training", "sequence_length"): sequence_length,
    }
    result = import_tree(read.document.tree, kind, {path: value for path, value in given.items() if value is not None})
    text = json.dumps(result.spec, indent=2, ensure_ascii=False) + "\n"
    if output:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"{output} cannot be written: {error.strerror}") from None
    else:
        click.echo(text, nl=False)
    click.echo(_account(result), err=True)
    if result.missing:
        raise click.exceptions.Exit(SPEC_HAS_ERRORS)


def _account(result: Imported) -> str:
    lines = [f"carried: {len(result.carried)} of {len(result.carried) + len(result.lost)} keys"]
    lines += [f"  {name} -> {target}" for name, target in sorted(result.carried.items())]
    if result.lost:
        lines.append(f"lost: {len(result.lost)}")
        lines += [f"  {name}: {reason}" for name, reason in sorted(result.lost.items())]
    options = {"gpus_per_node": "--gpus-per-node", "sequence_length": "--sequence-length"}
    lines += [f"missing: {'.'.join(path)}: add {options.get(path[-1], '--model')}" for path in result.missing]
    return "\n".join(lines)
