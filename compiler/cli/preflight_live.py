"""`parcompile preflight PLAN --live` on one rank of a launched job: rank 0 speaks for all."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parcompile.backends.writing import to_text
from parcompile.diagnostics.reporters.style import writable
from parcompile.version import how_to_install

if TYPE_CHECKING:
    from parcompile.runtime.preflight.live import LiveReport


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
    try:
        # Only here: the compiler itself works without torch.
        from deepspeed.utils import logger

        from parcompile.runtime import leave, report_errors
        from parcompile.runtime.preflight.live import Limits
        from parcompile.runtime.preflight.live import check_job as check
    except ImportError as error:
        raise click.ClickException(f"{error}; {how_to_install('runtime,hf')}") from None
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
