"""`parcompile accelerators`, `advisories`, `explain` and `schema`: what it knows without a spec."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Mapping
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
from parcompile.schema import draft07
from parcompile.units import format_bandwidth, format_bytes, format_compute

from . import say, told


@click.command("accelerators")
@click.argument("name", required=False)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
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
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def explain_command(codes: tuple[str, ...], form: str) -> None:
    """Explain a code, with an example of wrong and right.

    Without a CODE, list all codes.
    """
    known = pages()
    if form == "json":
        shown = [_known(known, code) for code in codes or known]
        trees = [{**dataclasses.asdict(page), "severity": page.severity.value} for page in shown]
        say(json.dumps(trees, indent=2, ensure_ascii=False))
        return
    if not codes:
        say(_contents(list(known.values())))
        return
    for number, code in enumerate(codes):
        say(("\n" if number else "") + _page(_known(known, code)))


def _known(known: Mapping[str, Page], code: str) -> Page:
    """The page of a code.

    Raises:
        UsageError: there is none.
    """
    page = known.get(code.upper())
    if page is None:
        near = closest(code.upper(), list(known))
        raise click.UsageError(f"there is no code {code}" + (f"; did you mean {near}?" if near else ""))
    return page


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
