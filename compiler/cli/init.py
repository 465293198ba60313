"""`parcompile init`: a first spec from a model and a cluster."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from parcompile.diagnostics.reporters.style import Style, hanging
from parcompile.diagnostics.suggest import closest
from parcompile.model.presets import find_preset, presets
from parcompile.searching.first import first_spec, sequence_length_of
from parcompile.user_files import read_text

from .targets import no_estimate_option


@dataclass(frozen=True, slots=True)
class Chosen:
    """A model as a spec names it, its configuration, and the name that a run of it gets."""

    section: dict[str, Any]
    config: dict[str, Any]
    name: str


@click.command("init")
@click.argument("name", required=False, metavar="[MODEL]")
@click.option("--model", help="The same as MODEL.")
@click.option("--hf-config", type=click.Path(path_type=Path), help="A Hugging Face config.json, or its folder.")
@click.option("--nodes", type=click.IntRange(1, 65536), default=1, show_default=True, help="Machines.")
@click.option("--gpus-per-node", type=click.IntRange(1, 256), default=8, show_default=True, help="Ranks on each.")
@click.option("--accelerator", default="h100-sxm", show_default=True, help="What a rank runs on.")
@click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens of a sequence. Default: up to 8192.")
@no_estimate_option("Count weights, gradients and optimizer state only, which are exact.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="New file. Default: print it.")
def command(
    name: str | None,
    model: str | None,
    hf_config: Path | None,
    nodes: int,
    gpus_per_node: int,
    accelerator: str,
    sequence_length: int | None,
    output: Path | None,
    *,
    no_estimate: bool,
) -> None:
    """Write a first spec for a model and a cluster.

    MODEL is a preset, as in `parcompile init llama-3-70b`, or the path of a Hugging Face config.json or of its folder.
    The command chooses the smallest pp, then the smallest tp, whose estimated peak of memory fits with 90 % and which
    every rule allows, with full recomputation where that is faster, and says why. If none fits, it says what would.
    In a terminal, without a model, it lists the presets and asks for the values.
    """
    if name is not None:
        if model is not None or hf_config is not None:
            raise click.UsageError(f"{name} and {'--model' if model else '--hf-config'} both name a model: give one")
        model = name
    if model is None and hf_config is None:
        if not sys.stdin.isatty():
            raise click.UsageError("name the model, as in parcompile init llama-3-8b, or with --hf-config PATH")
        model = _asked_model()
        nodes = click.prompt("Machines", default=nodes, type=click.IntRange(1, 65536), err=True)
        gpus_per_node = click.prompt("Ranks on each", default=gpus_per_node, type=click.IntRange(1, 256), err=True)
        accelerator = click.prompt("Accelerator", default=accelerator, err=True)
    folder = output.parent if output else Path()
    chosen = chosen_model(model, hf_config, folder)
    if sequence_length is None:
        sequence_length = sequence_length_of(chosen.config)
    cluster = {"nodes": nodes, "gpus_per_node": gpus_per_node, "accelerator": accelerator}
    text, reason = made_spec(chosen, cluster, sequence_length, folder, estimate=not no_estimate)
    if output is None:
        click.echo(text, nl=False)
        click.echo(reason, err=True)
        return
    try:
        with output.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise click.ClickException(f"{output} exists already") from None
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written: {error.strerror}") from None
    click.echo(f"{reason}\nwrote {output}; compile it with: parcompile {output} -o plan")


def _asked_model() -> str:
    """The model that a user names: a preset, or a path."""
    click.echo(hanging("Presets: ", ", ".join(presets()), Style.of(sys.stderr).width), err=True)
    return str(click.prompt("Model (a preset, or the path of a Hugging Face config.json)", err=True))


def chosen_model(model: str | None, hf_config: Path | None, folder: Path) -> Chosen:
    """The model that the options name; a path is written relative to `folder`, where the spec will be.

    `model` is a preset, or the path of a file or folder that exists.

    Raises:
        UsageError: both or none is given, or there is no such preset.
        ClickException: the configuration cannot be read.
    """
    if (model is None) == (hf_config is None):
        raise click.UsageError("give one of --model and --hf-config")
    if hf_config is None:
        assert model is not None
        preset = find_preset(model)
        if preset is None and Path(model).exists():
            return chosen_model(None, Path(model), folder)
        if preset is None:
            near = closest(model, list(presets()))
            hint = f"did you mean {near}?" if near else "`parcompile init` in a terminal lists them."
            raise click.UsageError(
                f"there is no preset and no file {model!r}; {hint} For another model, download its config.json and "
                "name that file"
            )
        return Chosen({"preset": preset.name}, dict(preset.config), preset.name)
    file = hf_config / "config.json" if hf_config.is_dir() else hf_config
    try:
        config = json.loads(read_text(file))
    except OSError as error:
        raise click.ClickException(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise click.ClickException(f"{file} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise click.ClickException(f"{file} does not hold a JSON object")
    relative = Path(os.path.relpath(file, folder)).as_posix()
    return Chosen({"hf_config": relative}, config, str(config.get("model_type") or file.resolve().parent.name))


def made_spec(
    chosen: Chosen,
    cluster: dict[str, Any],
    length: int,
    folder: Path,
    precision: str = "bf16",
    *,
    estimate: bool = True,
) -> tuple[str, str]:
    """The text of a first spec, and why its layout was chosen.

    Raises:
        UsageError: the schema refuses a value.
        ClickException: no layout was found.
    """
    try:
        found = first_spec(chosen.name, chosen.section, cluster, length, folder, precision, estimate=estimate)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if found.spec is None:
        nodes, width = cluster["nodes"], Style.of(sys.stderr).width
        where = f"{nodes} node{'s' * (nodes > 1)} of {cluster['gpus_per_node']} {cluster['accelerator']}"
        # click writes "Error: " in front of the first line.
        lines = [hanging("", f"no tp and pp fit {chosen.name} on {where}: {found.reason}", width - len("Error: "))]
        lines += ["what would fit:", *(hanging("  ", one, width) for one in found.remedies)] if found.remedies else []
        raise click.ClickException("\n".join(lines))
    reason = hanging("", found.reason, Style.of(sys.stderr).width)
    return json.dumps(found.spec, indent=2, ensure_ascii=False) + "\n", reason
