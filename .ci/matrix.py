"""What matrices share: runs of `tests/runtime` on live ranks and in one process, as rows of a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "runtime"), str(ROOT / "benchmarks")]

from harness import heads, parsed, row  # noqa: E402, F401 -- for matrices

Runs = Sequence[tuple[str, Callable[[], list[Any]]]]
"""What a run is, and how far apart it is from one process (`tests/runtime/closeness.py`)."""


def numbers(found: list[Any]) -> list[str]:
    """How far apart losses, norms and parameters are."""
    from closeness import largest

    return [f"{largest(found, what):.1e}" for what in ("losses", "norms", "parameters")]


def logged(found: list[Any]) -> tuple[str, str, str, str]:
    """Of a Trainer, how far apart its log is most, in which number, and norms and weights."""
    log = max((one for one in found if one.what.startswith("log")), key=lambda one: one.difference)
    norm = max(one.difference for one in found if one.what.endswith("grad_norm"))
    weights = max(one.difference for one in found if one.what.startswith("parameters"))
    return f"{log.difference:.1e}", log.what.split("] ")[-1], f"{norm:.1e}", f"{weights:.1e}"


def table(columns: Sequence[str], runs: Runs, cells: Callable[[list[Any]], Iterable[str]] = numbers) -> int:
    """Prints a row for each run, and how many are within their limits; 1 where one is not."""
    heads(*columns)
    failed = 0
    for text, run in runs:
        try:
            found = run()
        except Exception as error:  # a rank's, whose message says what failed
            row(text, str(error).strip().splitlines()[-1][:400])
            failed += 1
            continue
        worst = max(found, key=lambda one: one.ratio)
        failed += worst.ratio > 1
        print(f"| {text} | {' | '.join(cells(found))} |{f' {worst.text}' if worst.ratio > 1 else ''}", flush=True)
    print(f"\n{len(runs) - failed} of {len(runs)} within their limits")
    return int(failed > 0)
