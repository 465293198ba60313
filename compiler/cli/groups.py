"""`parcompile groups PLAN --rank N`: who is in which group with a rank."""

from __future__ import annotations

from pathlib import Path

import click

from parcompile.plan import Plan, PlanError
from parcompile.targets.files import to_text
from parcompile.targets.process_groups import rank_groups


@click.command("groups")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--rank", type=int, required=True, help="The rank whose groups to show.")
def command(plan: Path, rank: int) -> None:
    """Show the coordinates of a rank, and who is in which group with it, on which node (JSON).

    PLAN is a plan.json, or the folder that holds it.
    """
    try:
        click.echo(to_text(rank_groups(Plan.load(plan), rank)), nl=False)
    except (PlanError, ValueError) as error:
        raise click.ClickException(str(error)) from None
