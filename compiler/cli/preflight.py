"""`parcompile preflight` and `local`: ranks of a plan are built, or all of them run here."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from parcompile.backends.artefacts import to_text
from parcompile.cli import needing, say, told
from parcompile.cli.options import SECONDS, form_option, read_plan
from parcompile.diagnostics.reporters import writable
from parcompile.entry_points import said

if TYPE_CHECKING:
    from parcompile.runtime.preflight.findings import Report
    from parcompile.runtime.preflight.live import LiveReport


# `parcompile preflight PLAN --live` on one rank of a launched job: rank 0 speaks for all.


def check_job(plan: Path, form: str, checkpoints: Path | None, times: Mapping[str, float | None]) -> None:
    """Checks the job; every rank ends with the same exit code.

    Args:
        plan: the plan's file or folder.
        form: text or json.
        checkpoints: the folder of checkpoints; None: the plan's.
        times: seconds by option, None where it was not given.
    """
    # Warnings would come from every rank; what torch's networking says when a rank ends is told in the report.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    warnings.simplefilter("ignore")
    with needing("runtime,hf"):
        from deepspeed.utils import logger

        from parcompile.runtime import leave, report_errors
        from parcompile.runtime.preflight.live import Limits
        from parcompile.runtime.preflight.live import check_job as check
    logger.setLevel("ERROR")
    names = {"wait": "wait_seconds", "limit": "whole_seconds", "seconds": "measure_seconds"}
    limits = Limits(**{names[name]: value for name, value in times.items() if value is not None})
    output = sys.stdout

    def speak(report: LiveReport) -> None:
        text = to_text(report.to_json()) if form == "json" else report.text() + "\n"
        output.write(writable(output, text))
        output.flush()

    # DeepSpeed prints: standard output is the report's.
    with contextlib.redirect_stdout(sys.stderr), report_errors():
        found = check(plan, checkpoints=checkpoints, limits=limits, speak=speak, owns_process=True)
    if found.report is not None:
        speak(found.report)
    if not found.passed:
        # Not sys.exit: collectives that wait for ranks that are gone would keep the process.
        sys.stderr.flush()
        os._exit(1)
    leave()


# `parcompile preflight PLAN`: builds what a plan describes, for any rank of any world, and compares.


@click.command("preflight")
@click.argument("plan")
@click.option("--ranks", help="Ranks to look at, as in 0,8,15; by default those that differ.")
@click.option("--model", metavar="FILE.py:FUNCTION", help="What builds a module of your own, called without arguments.")
@form_option()
@click.option("--live", "is_live", is_flag=True, help="Check the launched job of which this process is a rank.")
@click.option("--checkpoints", type=click.Path(path_type=Path), help="Live: where they will go (default: the plan's).")
@click.option("--wait", type=SECONDS, help="Live: seconds for all ranks to arrive (default: 120).")
@click.option("--limit", type=SECONDS, help="Live: seconds for everything after that (default: 900).")
@click.option("--seconds", type=SECONDS, help="Live: seconds to spend on measuring (default: 10).")
@click.pass_context
def command(
    context: click.Context,
    /,
    plan: str,
    ranks: str | None,
    model: str | None,
    form: str,
    is_live: bool,
    checkpoints: Path | None,
    **times: float | None,
) -> None:
    """Compare a plan with the real sharded model before it runs.

    Builds the model of chosen ranks without allocating memory, and runs a step. PLAN is a spec, a plan.json, or the
    folder that holds one; its world may have any size. Needs the extras [runtime]
    and [hf]. Exit code 1 when something differs.

    With --live, under a launcher with as many ranks as the plan has (plan/launch/torchrun.sh -m parcompile preflight
    plan --live): the ranks compare what they run, measure their links, look for room and run two steps.
    """
    if is_live:
        if ranks is not None:
            raise click.UsageError("--ranks cannot be used with --live, which checks all ranks of its job")
        if model is not None:
            raise click.UsageError("--model cannot be used with --live, which builds the plan's own model")
        check_job(Path(plan), form, checkpoints, times)
        return
    if checkpoints is not None or any(times.values()):
        raise click.UsageError("--checkpoints, --wait, --limit and --seconds need --live")
    loaded = read_plan(plan)[0]
    chosen = None if ranks is None else _numbers(ranks)
    found = preflight_builder()(loaded, chosen, None if model is None else _builder(model))
    say(to_text(found.to_json()) if form == "json" else found.text(), nl=form == "text")
    if not found.agrees:
        context.exit(1)


def preflight_builder() -> Callable[..., Report]:
    """What builds ranks of a plan; what it refuses is told to the user.

    Raises:
        ClickException: what it needs is not installed.
    """
    # torch warns that the fake group has no hooks, on every rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with needing("runtime,hf"):
        from parcompile.runtime import RunError
        from parcompile.runtime.preflight import preflight

    @told(RunError)
    def build(*given: Any) -> Report:
        return preflight(*given)

    return build


def _builder(where: str) -> Callable[[], Any]:
    """The function, or class, of a Python file or module."""
    name, _, attribute = where.rpartition(":")
    written = "write FILE.py:FUNCTION or package.module:FUNCTION"
    if not name:
        raise click.BadParameter(f"{where} names no function: {written}", param_hint="--model")
    sys.path.insert(0, "")
    try:
        if name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(name).stem, name)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[Path(name).stem] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(name)
        found = getattr(module, attribute)
    except (Exception, SystemExit) as error:  # the code of others may fail in any way
        path = name.replace(".", "/")
        line = next(
            (
                f" (line {one.lineno})"
                for one in traceback.extract_tb(error.__traceback__)[::-1]
                if one.filename.endswith((name, *(f"/{path}{end}" for end in (".py", "/__init__.py"))))
            ),
            "",
        )
        raise click.BadParameter(f"{where}: {said(error)}{line}; {written}", param_hint="--model") from None
    if not callable(found):
        raise click.BadParameter(f"{where} is {type(found).__name__}, nothing that can be called", param_hint="--model")
    return cast("Callable[[], Any]", found)


def _numbers(text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of ranks, as in 0,8,15", param_hint="--ranks") from None


# `parcompile local` runs all ranks of a plan here.


@click.command("local")
@click.argument("plan")
@click.option("--timeout", type=SECONDS, default=300.0, show_default=True, help="Seconds for the ranks.")
@form_option()
@click.pass_context
def local_command(context: click.Context, plan: str, timeout: float, form: str) -> None:
    """Run one step of a small plan with all its ranks here.

    PLAN is a spec, a plan.json, or the folder that holds one. Shows which slice of which weight each rank holds, and
    compares loss and gradient norm with one process. Needs the extras [runtime] and [hf]. The exit code
    is 1 when something differs.
    """
    loaded = read_plan(plan)[0]
    with needing("runtime,hf"):
        from parcompile.runtime import RunError
        from parcompile.runtime.local import RankError
        from parcompile.runtime.local.comparison import run_and_compare
    with told(RunError, RankError):
        found = run_and_compare(loaded, timeout)
    say(to_text(found.to_json()) if form == "json" else found.text(), nl=form == "text")
    if not found.equal:
        context.exit(1)
