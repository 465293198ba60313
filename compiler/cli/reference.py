"""`parcompile accelerators`, `advisories`, `explain`, `schema` and `models`: what it knows without a spec."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from parcompile import schema
from parcompile.backends.deepspeed.table import UnknownVersionError, order
from parcompile.cost.table import columns
from parcompile.diagnostics import closest
from parcompile.diagnostics.reporters import Style, hanging
from parcompile.lint.advisories import DEEPSPEED, Advisory, advisories, records
from parcompile.lint.registry import Page, pages
from parcompile.machines import Accelerator, accelerators
from parcompile.model.catalogue import ALIKE, REASONS, ModelType, model_type, model_types
from parcompile.model.describing import axes_of, kinds_of, near_types, presets_of, summary_of, type_named
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.key_types import mistyped
from parcompile.model.presets import find_preset, text_part
from parcompile.model.tables import Counts, counts_of, table_of
from parcompile.schema import draft07
from parcompile.spec.resolve.model import config_file, read_config
from parcompile.units import format_bandwidth, format_bytes, format_compute

from . import say, told
from .options import form_option, near_code


@click.command("accelerators")
@click.argument("name", required=False)
@form_option()
def accelerators_command(name: str | None, form: str) -> None:
    """List the accelerators that a spec can name.

    With NAME: all figures of one and their sources. Rates are peaks of dense bf16 products; links are those of one
    rank in one direction.
    """
    known = accelerators()
    if name is not None and name not in known:
        raise click.UsageError(f"there is no accelerator {name!r}; there are: {', '.join(known)}")
    chosen = list(known.values()) if name is None else [known[name]]
    if form == "json":
        trees = [_figures_tree(one) for one in chosen]
        say(json.dumps(trees if name is None else trees[0], indent=2))
    elif name is None:
        say(_table(chosen))
    else:
        say(_figures(chosen[0]))


def _memory(one: Accelerator) -> str:
    return "of its host" if one.memory_bytes is None else format_bytes(one.memory_bytes)


def _table(chosen: list[Accelerator]) -> str:
    rows = [("name", "memory", "bf16", "bandwidth", "in a node", "between nodes")]
    rows += [
        (
            one.name,
            _memory(one),
            format_compute(one.flops_per_s),
            format_bandwidth(one.memory_bytes_per_s),
            format_bandwidth(one.node_link.bytes_per_s),
            format_bandwidth(one.network_link.bytes_per_s),
        )
        for one in chosen
    ]
    return "\n".join(columns(rows))


def _figures(one: Accelerator) -> str:
    rows = [
        ("name", one.name, one.title),
        ("memory", _memory(one), one.sources.get("memory_mib", "")),
        ("bf16", format_compute(one.flops_per_s), one.sources["bf16_flops_per_s"]),
        ("fp32", format_compute(one.fp32_flops_per_s), one.sources.get("fp32_flops_per_s", "")),
        ("bandwidth", format_bandwidth(one.memory_bytes_per_s), one.sources["memory_bytes_per_s"]),
    ]
    if one.host_memory_bytes is not None:
        rows.append(("host", f"{format_bytes(one.host_memory_bytes)} a rank", one.sources["host_memory_gib"]))
    rows += [
        (what, format_bandwidth(link.bytes_per_s), f"{link.title}; {link.source}")
        for what, link in (
            ("in a node", one.node_link),
            ("between nodes", one.network_link),
            ("to the host", one.host_link),
        )
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    width = Style.of(sys.stdout).width
    labels = [f"{what.ljust(widths[0])}  {value.ljust(widths[1])}  " for what, value, _ in rows]
    return "\n".join(hanging(label, row[2], width).rstrip() for label, row in zip(labels, rows, strict=True))


def _figures_tree(one: Accelerator) -> dict[str, Any]:
    tree = dataclasses.asdict(one)
    for key in ("like", "measured", "assumed"):
        del tree[key]
    return tree


_NAMES = {DEEPSPEED: "DeepSpeed", "megatron": "Megatron-LM"}


@click.command("advisories")
@click.option("--tool", help="Only those of this tool.")
@click.option("--deepspeed-version", metavar="X.Y.Z", help="Only those that this version of DeepSpeed is subject to.")
@click.option(
    "--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output."
)
def advisories_command(tool: str | None, deepspeed_version: str | None, format_: str) -> None:
    """List the versions of tools that compute wrong numbers.

    `parcompile check` shows those that a file is subject to. With --format json they are records as OSV has them.
    """
    tools = sorted({advisory.tool for advisory in advisories()})
    if tool is not None and tool not in tools:
        raise click.UsageError(f"--tool {tool}: there are advisories on {', '.join(tools)}")
    shown = [advisory for advisory in advisories() if tool in (None, advisory.tool)]
    if deepspeed_version is not None:
        with told(UnknownVersionError, by=click.UsageError):
            order(deepspeed_version)
        shown = [advisory for advisory in shown if advisory.tool == DEEPSPEED and advisory.affects(deepspeed_version)]
    if format_ == "json":
        ids = {advisory.id for advisory in shown}
        listed = [record for record in records() if record["id"] in ids]
        say(json.dumps({"format": 2, "advisories": listed}, indent=2, ensure_ascii=False))
        return
    say("\n\n".join(map(_entry, shown)) or "no advisory")


def _entry(advisory: Advisory) -> str:
    body = [
        advisory.effect,
        *([f"Only when {advisory.when}."] if advisory.when else []),
        f"To avoid it: {advisory.avoid}.",
    ]
    lines = [
        f"{advisory.id}  {advisory.title}",
        f"      {_NAMES.get(advisory.tool, advisory.tool)}, {advisory.versions}",
    ]
    for text in body:
        lines += textwrap.wrap(text, Style.of(sys.stdout).width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join([*lines, *(f"      {source}" for source in advisory.sources)])


_WIDTH = 80


@click.command("explain")
@click.argument("codes", nargs=-1, metavar="CODE...")
@form_option()
def explain_command(codes: tuple[str, ...], form: str) -> None:
    """Explain a code, with an example of wrong and right.

    CODE may be a letter, whose codes are listed. Without a CODE, list all codes.
    """
    known = pages()
    asked = [code.strip().upper() for one in codes for code in one.split(",") if code.strip()]
    shown = [_meant(known, code) for code in asked] or [list(known.values())]
    if form == "json":
        trees = [{**dataclasses.asdict(page), "severity": page.severity.value} for page in itertools.chain(*shown)]
        say(json.dumps(trees, indent=2, ensure_ascii=False))
        return
    say("\n\n".join(_page(one[0]) if len(one) == 1 else _contents(one) for one in shown))


def _meant(known: Mapping[str, Page], code: str) -> list[Page]:
    """The page of a code, or those of all codes of a letter.

    Raises:
        UsageError: there is none.
    """
    found = [page for name, page in known.items() if code in (name, name.rstrip("0123456789"))]
    if not found:
        raise click.UsageError(f"there is no code {code}; {near_code(code, known) or '`parcompile explain` lists all'}")
    return found


def _page(page: Page) -> str:
    lines = [f"{page.code} ({page.severity.value}): {page.title}", ""]
    lines += textwrap.wrap(page.explanation, _WIDTH)
    for word, text in page.examples:
        lines += ["", f"{word}:", *("    " + line for line in text.splitlines())]
    lines.append("")
    if page.targets != ("all",):
        lines.append(f"concerns: {', '.join(page.targets)}")
    lines += [f"source: {source}" for source in page.sources]
    return "\n".join(lines).rstrip()


def _contents(all_pages: list[Page]) -> str:
    lines: list[str] = []
    group = ""
    for page in all_pages:
        if page.group != group:
            group = page.group
            lines += ([""] if lines else []) + [group]
        lines.append(f"  {page.code}  {page.severity.value:<8} {page.title}")
    return "\n".join(lines)


@click.command("schema")
@click.argument("name", required=False)
@click.option("--draft-07", "older", is_flag=True, help="Its draft-07 twin, for editors that know nothing newer.")
def schema_command(name: str | None, *, older: bool) -> None:
    """Print a JSON Schema, for editors and validators.

    NAME is spec, plan, ds-config, process-groups and so on, or the $id of a schema. Without NAME, list the names.
    """
    if name is None:
        say("\n".join(one.replace("_", "-") for one in schema.names()))
        return
    with told(schema.UnknownSchemaError, by=click.UsageError):
        text = schema.text(name)
    if older:
        text = json.dumps(draft07(schema.load(name)), indent=2, ensure_ascii=False)
    say(text, nl=not text.endswith("\n"))


_NEAR = 0.8
"""How alike a name is to the type that was meant: others are as alike to `glm` as `chatglm` is."""
_STATES = click.Choice(["works", "refused"])


@click.command("models")
@click.argument("name", required=False)
@click.option("--only", type=_STATES, help="Only types that work, or only those that are refused.")
@click.option(
    "--config",
    "file",
    type=click.Path(exists=True, path_type=Path),
    help="Count the parameters of this config.json, or of that in a folder; its type is told in detail.",
)
@form_option()
def models_command(name: str | None, only: str | None, file: Path | None, form: str) -> None:
    """List the model types that work, and why others do not.

    With NAME: one type in detail. A type that works runs with tp, cp, pp, dp and sequence
    parallelism, and with ep where it has experts. The number of parameters is that of a configuration
    that leaves everything to its class, of the preset that NAME is, or of the file that --config names; also of types
    that are refused.
    """
    config, whose = (None if file is None else _config(file, name)), "in this configuration"
    if config is not None:
        name = str(config["model_type"])
    elif name is not None:
        if (preset := find_preset(name)) is not None:
            config, whose = text_part(preset.config), f"of {preset.name}"
        name = _named(name)
    if name is not None:
        one = model_type(name)
        shown = json.dumps(_tree(one, config), indent=2) if form == "json" else "\n".join(_details(one, config, whose))
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
        found = read_config(file := config_file(file))
    if not isinstance(found.get("model_type"), str):
        raise click.ClickException(f"{file} has no model_type: it is no configuration of a model")
    config = text_part(found)
    if name not in (None, found["model_type"], config["model_type"]):
        raise click.ClickException(f"{file} is a configuration of {found['model_type']}, not of {name}")
    return config


def _counts(one: ModelType, config: Mapping[str, Any] | None) -> Counts | None:
    """The parameters of a configuration, or of the defaults of the class; None where they are not known."""
    if config is not None and mistyped(one.name, config) is not None:
        return None
    return counts_of(config or {"model_type": one.name})


def _refusal(one: ModelType, config: Mapping[str, Any] | None) -> str | None:
    """Why `check` refuses a configuration of a type that works; None where it does not."""
    if config is not None and one.works:
        try:
            shape_from_config(config)
        except ModelConfigError as error:
            return str(error)
    return None


def _parameters(one: ModelType, config: Mapping[str, Any] | None, whose: str) -> Iterator[str]:
    """What is wrong with a configuration, and the number of parameters; nothing of what is not known."""
    if (refused := _refusal(one, config)) is not None:
        yield f"this configuration of {one.name} is refused: {refused}"
    if (table := table_of(one.name)) is None:
        return
    if (counts := _counts(one, config)) is not None:
        whose = f"with the defaults of {table.model_class}" if config is None else whose
        experts = f", {counts.experts:,} of them in routed experts" if counts.experts else ""
        yield f"parameters {whose}: {counts.total:,} ({counts.layers:,} in the layers{experts})"
    elif config is not None and refused is None:
        yield "parameters: the derived table does not cover this configuration"


def _details(one: ModelType, config: Mapping[str, Any] | None, whose: str) -> list[str]:
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
        return [f"{one.name} works: {one.note}", *_details(model_type(ALIKE[one.name]), config, whose)]
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
    lines += _parameters(one, config, whose)
    found = presets_of(one.name if one.works or one.text is None else one.text)
    if found:
        lines.append(f"presets: {', '.join(found)}")
    return lines


def _tree(one: ModelType, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    counts = _counts(one, config)
    return {
        "model_type": one.name,
        "works": one.works,
        "axes": [axis.replace("sequence parallelism", "sequence_parallel") for axis in axes_of(one)]
        if one.works
        else [],
        "planned": one.planned,
        "parameters": None if counts is None else counts.total,
        "reason": None if one.reason is None else one.reason.title,
        "why": _refusal(one, config) if one.reason is None else one.reason.why,
        "text_part": one.text,
        "text_part_works": one.text_works,
        "nearest": one.nearest,
        "presets": list(presets_of(one.name)),
    }
