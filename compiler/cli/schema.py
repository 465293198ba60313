"""`parcompile schema NAME`: a JSON Schema on standard output."""

from __future__ import annotations

import json

import click

from parcompile import schema
from parcompile.schema.draft07 import draft07

from .saying import say


@click.command("schema")
@click.argument("name", required=False)
@click.option("--draft-07", "older", is_flag=True, help="Its draft-07 twin, for editors that know nothing newer.")
def command(name: str | None, *, older: bool) -> None:
    """Print a JSON Schema, for editors and validators.

    NAME is spec, plan, ds-config, process-groups and so on, or the $id of a schema. Without NAME, list the names.
    """
    if name is None:
        say("\n".join(one.replace("_", "-") for one in schema.names()))
        return
    try:
        text = schema.text(name)
    except schema.UnknownSchemaError as error:
        raise click.UsageError(str(error)) from None
    if older:
        text = json.dumps(draft07(schema.load(name)), indent=2, ensure_ascii=False)
    say(text, nl=not text.endswith("\n"))
