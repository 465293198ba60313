"""`parcompile models`: which model types work, with which axes, and why others are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from parcompile.cost.table import columns
from parcompile.diagnostics import closest
from parcompile.model.catalogue import ALIKE, REASONS, ModelType, model_type, model_types
from parcompile.model.describing import axes_of, kinds_of, near_types, presets_of, summary_of, type_named
from parcompile.model.hf_config import ModelConfigError
from parcompile.model.presets import text_part
from parcompile.model.tables import counts_of, table_of
from parcompile.spec.resolve.model import read_config

from . import say, told

_NEAR = 0.8
"""How alike a name is to the type that was meant: others are as alike to `glm` as `chatglm` is."""
_STATES = click.Choice(["works", "refused"])


@click.command("models")
@click.argument("name", required=False)
@click.option("--only", type=_STATES, help="Only types that work, or only those that are refused.")
@click.option(
    "--config",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Count the parameters of this config.json; its type is told in detail.",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(name: str | None, only: str | None, file: Path | None, form: str) -> None:
    """List the model types that work, and why others do not.

    With NAME: one type in detail. A type that works runs with tp, cp, pp, dp and sequence
    parallelism, and with ep where it has experts. The number of parameters is that of a configuration
    that leaves everything to its class, or of the file that --config names; also of types that are refused.
    """
    config = None if file is None else _config(file, name)
    if config is not None:
        name = str(config["model_type"])
    elif name is not None:
        name = _named(name)
    if name is not None:
        one = model_type(name)
        shown = json.dumps(_tree(one, config), indent=2) if form == "json" else "\n".join(_details(one, config))
    else:
        chosen = [one for one in model_types().values() if only is None or one.works is (only == "works")]
        if form == "json":
            shown = json.dumps([_tree(one) for one in chosen], indent=2)
        else:
            ending = summary_of(model_types().values())
            shown = "\n".join([*columns([("model type", "", ""), *map(_row, chosen)]), "", ending])
    say(shown)


def _row(one: ModelType) -> tuple[str, str, str]:
    if one.works:
        return one.name, "works", ", ".join(kinds_of(one))
    assert one.reason is not None
    if one.text_works:
        return one.name, "text part", f"its {one.text} is trained alone"
    return one.name, "refused", one.reason.title


def _named(name: str) -> str:
    """The model type that a user names.

    Raises:
        click.UsageError: there is none of this name.
    """
    found = type_named(name)
    if found is None:
        near, meant = ", ".join(near_types(name)), closest(name, model_types(), least=_NEAR)
        if near:
            where = f"types whose names begin so: {near}"
        else:
            where = f"did you mean {meant}?" if meant else "`parcompile models` lists all"
        raise click.UsageError(
            f"there is no model type {name!r}; {where}{'' if where.endswith('?') else '.'} "
            "The type of a model is the model_type in its config.json, a file that --config takes"
        )
    return found


def _config(file: Path, name: str | None) -> Mapping[str, Any]:
    """A configuration, or that of its text part where this is what works.

    Raises:
        click.ClickException: the file holds no configuration, or one of another type than the one named.
    """
    with told(ModelConfigError):
        found = read_config(file)
    if not isinstance(found.get("model_type"), str):
        raise click.ClickException(f"{file} has no model_type: it is no configuration of a model")
    config = text_part(found)
    if name not in (None, found["model_type"], config["model_type"]):
        raise click.ClickException(f"{file} is a configuration of {found['model_type']}, not of {name}")
    return config


def _parameters(one: ModelType, config: Mapping[str, Any] | None) -> str | None:
    """A line with the number of parameters; None where it is not known."""
    table = table_of(one.name)
    if table is None:
        return None
    if config is None:
        counts, whose = counts_of({"model_type": one.name}), f"with the defaults of {table.model_class}"
    else:
        counts, whose = counts_of(config), "in this configuration"
    if counts is None:
        return None if config is None else "parameters: the derived table does not cover this configuration"
    experts = f", {counts.experts:,} of them in routed experts" if counts.experts else ""
    return f"parameters {whose}: {counts.total:,} ({counts.layers:,} in the layers{experts})"


def _details(one: ModelType, config: Mapping[str, Any] | None = None) -> list[str]:
    if one.works:
        lines = [f"{one.name} works: {', '.join(axes_of(one))}", *(f"  {kind}" for kind in kinds_of(one))]
    elif one.text_works:
        assert one.text is not None
        text = model_type(one.text)
        lines = [
            f"{one.name} is multimodal. Its text part {text.name} works: {', '.join(axes_of(text))}",
            *(f"  {kind}" for kind in kinds_of(text)),
            "the text part is trained alone; the towers of other media are left as they are",
        ]
    elif one.note:
        return [f"{one.name} works: {one.note}", *_details(model_type(ALIKE[one.name]), config)]
    else:
        assert one.reason is not None
        lines = [f"{one.name} is refused: {one.reason.why}"]
        told = one.reason is not REASONS["multimodal"]
        if one.text is not None:
            lines.append(f"text part: {one.text}" + ("" if told else ", which is refused"))
        if one.reason.instead and (told or not one.text):
            lines.append(f"what runs: {one.reason.instead}")
        if one.nearest:
            lines.append(f"nearest type that works: {one.nearest}")
    if (counted := _parameters(one, config)) is not None:
        lines.append(counted)
    found = presets_of(one.name if one.works or one.text is None else one.text)
    if found:
        lines.append(f"presets: {', '.join(found)}")
    return lines


def _tree(one: ModelType, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    counts = counts_of(config or {"model_type": one.name})
    return {
        "model_type": one.name,
        "works": one.works,
        "axes": [axis.replace("sequence parallelism", "sequence_parallel") for axis in axes_of(one)]
        if one.works
        else [],
        "planned": one.planned,
        "parameters": None if counts is None else counts.total,
        "reason": None if one.reason is None else one.reason.title,
        "why": None if one.reason is None else one.reason.why,
        "text_part": one.text,
        "text_part_works": one.text_works,
        "nearest": one.nearest,
        "presets": list(presets_of(one.name)),
    }
