"""`parcompile advisories`: which versions of DeepSpeed and Megatron-LM train with other numbers."""

from __future__ import annotations

import json
import sys
import textwrap

import click

from parcompile.backends.deepspeed.table import UnknownVersionError, order
from parcompile.diagnostics.reporters.dispatch import Style
from parcompile.lint.advisories import Advisory, advisories
from parcompile.lint.advisories.advisory import DEEPSPEED, MEGATRON

from .saying import say


@click.command("advisories")
@click.option("--tool", type=click.Choice([DEEPSPEED, MEGATRON]), help="Only those of this tool.")
@click.option("--deepspeed-version", metavar="X.Y.Z", help="Only those that this version of DeepSpeed is subject to.")
@click.option(
    "--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output."
)
def command(tool: str | None, deepspeed_version: str | None, format_: str) -> None:
    """List the versions of tools that compute wrong numbers.

    `parcompile check` shows those that a file is subject to.
    """
    found = [one for one in advisories() if tool in (None, one.tool)]
    if deepspeed_version is not None:
        try:
            order(deepspeed_version)
        except UnknownVersionError as error:
            raise click.UsageError(str(error)) from None
        found = [one for one in found if one.tool == DEEPSPEED and one.affects(deepspeed_version)]
    if format_ == "json":
        say(json.dumps({"format": 1, "advisories": [one.as_tree() for one in found]}, indent=2, ensure_ascii=False))
        return
    say("\n\n".join(_entry(one) for one in found) or "no advisory")


def _entry(one: Advisory) -> str:
    name = {DEEPSPEED: "DeepSpeed", MEGATRON: "Megatron-LM"}[one.tool]
    body = [one.effect, *([f"Only when {one.when}."] if one.when else []), f"To avoid it: {one.avoid}."]
    lines = [f"{one.id}  {one.title}", f"      {name}, {one.versions}"]
    for text in body:
        lines += textwrap.wrap(text, Style.of(sys.stdout).width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join([*lines, *(f"      {source}" for source in one.sources)])
