"""`parcompile doctor [PLAN] FILES…`: why a run hangs, has died, is slow or computes something else."""

from __future__ import annotations

from pathlib import Path

import click

from parcompile.backends.artefacts import to_text
from parcompile.doctor import judge, read_all

from .options import read_plan
from .saying import say


@click.command("doctor")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--plan", "plan", help="The plan or spec of the run: says how far memory and time are from it.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def command(context: click.Context, /, paths: tuple[str, ...], plan: str | None, form: str) -> None:
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
