"""`parcompile schema NAME`: a JSON Schema on standard output."""

from __future__ import annotations

import click

from parcompile import schema


@click.command("schema")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """Print the JSON Schema NAME (spec, plan, ds-config, process-groups, ...). Without NAME, list the names."""
    if name is None:
        click.echo("\n".join(one.replace("_", "-") for one in schema.names()))
        return
    try:
        text = schema.text(name)
    except schema.UnknownSchemaError as error:
        raise click.UsageError(str(error)) from None
    click.echo(text, nl=not text.endswith("\n"))
