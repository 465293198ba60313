"""`parcompile doctor` says why a run hangs, died or went wrong; `parcompile local` runs all ranks of a plan here."""

from __future__ import annotations

from pathlib import Path

import click

from parcompile.backends.artefacts import to_text
from parcompile.doctor import judge, read_all
from parcompile.version import how_to_install

from .options import positive_number, read_plan
from .saying import say


@click.command("doctor")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--plan", "plan", help="The plan or spec of the run: says how far memory and time are from it.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def doctor_command(context: click.Context, /, paths: tuple[str, ...], plan: str | None, form: str) -> None:
    """Say why a run hangs, died, is slow, or went wrong.

    PATHS are files and folders of any engine's run, in any state: records of the runtime, Flight Recorder dumps,
    output of ranks, launchers and Slurm, `py-spy` dumps, metrics.jsonl, nvidia-smi logs. A folder of a plan, or a
    plan.json, may be among them. Exit code 1 when something is wrong, 0 when nothing is found.
    """
    given = [one for one in paths if Path(one).name == "plan.json" or Path(one, "plan.json").is_file()]
    if plan is None and given:
        plan = given[0]
    loaded = None if plan is None else read_plan(plan)[0]
    verdict = judge(read_all(one for one in paths if Path(one).name != "plan.json"), loaded)
    say(to_text(verdict.to_json()) if form == "json" else verdict.text(), nl=form == "text")
    if verdict.kind != "nothing":
        context.exit(1)


@click.command("local")
@click.argument("plan")
@click.option("--timeout", type=positive_number, default=300.0, show_default=True, help="Seconds for the ranks.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def local_command(context: click.Context, plan: str, timeout: float, form: str) -> None:
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
