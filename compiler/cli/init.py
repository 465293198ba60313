"""`parcompile init`: a first spec from a model and a cluster."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from parcompile.diagnostics.diagnostic import closest
from parcompile.diagnostics.reporters.dispatch import Style, hanging
from parcompile.model.hf_config import ModelConfigError
from parcompile.model.presets import find_preset, near_presets, preset_alike, presets
from parcompile.searching.first import Offer, first_spec, sequence_length_of
from parcompile.spec.resolve.model import read_config

from .options import accelerator_name, accelerator_option, no_estimate_option
from .saying import say
from .search import progress_bar


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
@accelerator_option(default="h100-sxm", show_default=True)
@click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens of a sequence. Default: up to 8192.")
@no_estimate_option("Count weights, gradients and optimizer state only, which are exact.")
@click.option("-y", "--yes", is_flag=True, help="Take the fastest layout without asking.")
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
    yes: bool,
) -> None:
    """Write a first spec for a model and a cluster.

    MODEL is a preset, as in `parcompile init llama-3-70b`, the name of such a model on the Hugging Face Hub, or the
    path of a Hugging Face config.json or of its folder. The command searches tp, cp, ep, pp, the micro-batch,
    recomputation and the ZeRO stage, as `parcompile search` does, and offers the fastest layout that fits, the one
    that needs least memory, and the simplest one. In a terminal it asks which to write; with --yes, and elsewhere,
    it writes the fastest. If none fits, it says what would. In a terminal, without a model, it lists the presets
    and asks for the values.
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
        accelerator = click.prompt("Accelerator", default=accelerator, value_proc=accelerator_name, err=True)
    folder = output.parent if output else Path()
    chosen = chosen_model(model, hf_config, folder)
    if sequence_length is None:
        sequence_length = sequence_length_of(chosen.config)
    cluster = {"nodes": nodes, "gpus_per_node": gpus_per_node, "accelerator": accelerator}
    offers = offered(chosen, cluster, sequence_length, folder, estimate=not no_estimate)
    for line in offer_lines(offers, Style.of(sys.stderr)):
        say(line, err=True)
    taken = offers[0] if yes or len(offers) == 1 else _asked_offer(offers)
    text = spec_text(taken)
    if output is None:
        say(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise click.ClickException(f"{output} exists already") from None
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written: {error.strerror}") from None
    say(f"wrote {output} ({taken.word}); compile it with: parcompile {output} -o plan")


def _asked_offer(offers: tuple[Offer, ...]) -> Offer:
    """The one that a person takes; the first where nobody can be asked."""
    if not sys.stdin.isatty():
        return offers[0]
    words = [one.word for one in offers]
    chosen = click.prompt("Which one", default=words[0], type=click.Choice(words), err=True)
    return offers[words.index(chosen)]


def _asked_model() -> str:
    """The model that a user names: a preset, or a path."""
    say(hanging("Presets: ", ", ".join(presets()), Style.of(sys.stderr).width), err=True)
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
        if preset is None and (preset := preset_alike(model)) is not None:
            said = f"{model} is read as the preset {preset.name} ({preset.hf_name}): where its config.json differs, "
            say(hanging("", f"{said}name that file", Style.of(sys.stderr).width), err=True)
        if preset is None:
            near = near_presets(model) or tuple(filter(None, [closest(model, list(presets()))]))
            hint = f"did you mean {', '.join(near)}?" if near else "`parcompile init` in a terminal lists them."
            raise click.UsageError(
                f"there is no preset and no file {model!r}; {hint} For another model, download its config.json and "
                "name that file"
            )
        return Chosen({"preset": preset.name}, dict(preset.config), preset.name)
    file = hf_config / "config.json" if hf_config.is_dir() else hf_config
    try:
        config = read_config(file)
    except ModelConfigError as error:
        raise click.ClickException(str(error)) from None
    relative = Path(os.path.relpath(file, folder)).as_posix()
    return Chosen({"hf_config": relative}, config, str(config.get("model_type") or file.resolve().parent.name))


def offered(
    chosen: Chosen,
    cluster: dict[str, Any],
    length: int,
    folder: Path,
    precision: str = "bf16",
    *,
    training: dict[str, Any] | None = None,
    estimate: bool = True,
) -> tuple[Offer, ...]:
    """Layouts to choose from, the fastest first.

    Raises:
        UsageError: the schema refuses a value.
        ClickException: no layout fits.
    """
    try:
        found = first_spec(
            chosen.name,
            chosen.section,
            cluster,
            length,
            folder,
            precision,
            training=training,
            estimate=estimate,
            progress=progress_bar,
        )
    except ModelConfigError as error:
        raise click.UsageError(f"{chosen.section.get('hf_config', chosen.name)}: {error}") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not found.offers:
        nodes, width = cluster["nodes"], Style.of(sys.stderr).width
        where = f"{nodes} node{'s' * (nodes > 1)} of {cluster['gpus_per_node']} {cluster['accelerator']}"
        # click writes "Error: " in front of the first line.
        lines = [hanging("", f"no layout of {chosen.name} fits on {where}: {found.reason}", width - len("Error: "))]
        lines += ["what would fit:", *(hanging("  ", one, width) for one in found.remedies)] if found.remedies else []
        raise click.ClickException("\n".join(lines))
    return found.offers


def offer_lines(offers: tuple[Offer, ...], style: Style) -> list[str]:
    """Each offer with its reason, and what speaks against it."""
    wide = max(len(one.word) for one in offers)
    lines = []
    for one in offers:
        lines.append(hanging(f"{one.word:<{wide}}  ", one.reason, style.width))
        lines += [hanging(f"{'':<{wide}}  warning: ", said, style.width) for said in one.warnings]
    return lines


def spec_text(offer: Offer) -> str:
    """The file of an offer."""
    return json.dumps(offer.spec, indent=2, ensure_ascii=False) + "\n"
