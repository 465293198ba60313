"""`parcompile local PLAN`: all ranks of a plan on this machine, and who holds which slice."""

from __future__ import annotations

import click

from parcompile.backends.artefacts import to_text
from parcompile.version import how_to_install

from .options import positive_number, read_plan
from .saying import say


@click.command("local")
@click.argument("plan")
@click.option("--timeout", type=positive_number, default=300.0, show_default=True, help="Seconds for the ranks.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def command(context: click.Context, plan: str, timeout: float, form: str) -> None:
    """Run one step of a small plan with all its ranks here.

    PLAN is a spec, a plan.json, or the folder that holds one. Shows which slice of which weight each rank holds, and
    compares loss and gradient norm with one process. Needs the extras [runtime] and [hf]. The exit code
    is 1 when something differs.
    """
    loaded = read_plan(plan)[0]
    try:
        # Only here: the compiler itself works without torch.
        from parcompile.runtime import RunError
        from parcompile.runtime.local import RankError
        from parcompile.runtime.local.comparison import run_and_compare
    except ImportError as error:
        raise click.ClickException(f"{error}; {how_to_install('runtime,hf')}") from None
    try:
        found = run_and_compare(loaded, timeout)
    except (RunError, RankError) as error:
        raise click.ClickException(str(error)) from None
    say(to_text(found.to_json()) if form == "json" else found.text(), nl=form == "text")
    if not found.equal:
        context.exit(1)
