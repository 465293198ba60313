"""This version beside an earlier one: cold start, many specs, a plan of a million ranks, its report, and lines of code.

    python benchmarks/versions.py --before PYTHON [--runs 9] [--specs 1000]

PYTHON is the interpreter of an environment with the earlier version (a worktree of its commit, and `make install`
there). Both run the same command lines on the same files and take turns; given are the medians of the processor time of
both, and the median and the quartiles of the ratios of neighbours.
"""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from check import write_specs
from harness import ROOT, parsed, ratios, spread
from layout import spec as world_spec

from parcompile.rules import example_spec

MILLION = 1_048_576
COUNT_LINES = """
import importlib.util, pathlib
for name in ("parcompile", "parcompile.runtime"):
    root = pathlib.Path(importlib.util.find_spec(name).submodule_search_locations[0])
    files = [one for one in root.rglob("*.py") if name != "parcompile" or root / "runtime" not in one.parents]
    print(sum(bool(line.strip()) for one in files for line in one.read_text(encoding="utf-8").splitlines()))
"""


def seconds_of(command: list[str], folder: Path) -> float:
    """Processor time of a command, which other work on the machine disturbs least."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = subprocess.run(command, check=False, capture_output=True, cwd=folder)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
    # 1: findings, which some of the many specs have.
    if found.returncode not in (0, 1) or b"Traceback" in found.stderr:
        raise SystemExit(found.stderr.decode())
    return seconds


def commands(folder: Path, specs: int) -> dict[str, list[str]]:
    """What is timed, by name, as arguments of `parcompile`."""
    (folder / "one.json").write_text(json.dumps(example_spec({}), indent=2), encoding="utf-8")
    (folder / "million.json").write_text(json.dumps(world_spec(MILLION)), encoding="utf-8")
    write_specs(folder, specs)
    return {
        "cold start: check of one spec": ["check", "one.json"],
        f"check of {specs:,} specs": ["check", "--format", "concise", "spec-*.json"],
        f"compile for {MILLION:,} ranks": ["compile", "million.json", "-o", "plan", "-q"],
        "the same, report": ["view", "million.json", "-o", "report.html"],
    }


def lines_of(python: str) -> tuple[int, int]:
    """Lines of code that are not empty: of the compiler and of the runtime, as they are installed."""
    found = subprocess.run([python, "-c", COUNT_LINES], check=True, capture_output=True, text=True)
    compiler, runtime = map(int, found.stdout.split())
    return compiler, runtime


def lines_of_tools() -> int:
    """Lines of what earlier versions had in the compiler, and this one beside it."""
    texts = [one.read_text(encoding="utf-8") for one in (ROOT / ".ci" / "pages").glob("*.py")]
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


def main() -> None:
    environment = str, "the interpreter of an environment with the earlier version"
    options = parsed(__doc__, before=environment, runs=9, specs=1000)
    if options.before is None:
        print("left out: --before names the interpreter of an environment with an earlier version")
        return
    before, after = str(Path(options.before).absolute()), sys.executable
    print(f"{'':34}{'before':>10}{'after':>10}  after / before (quartiles)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, arguments in commands(folder, options.specs).items():
            pairs = []
            for turn in range(options.runs + 1):
                times = []
                for python in (before, after):
                    shutil.rmtree(folder / "plan", ignore_errors=True)
                    times.append(seconds_of([python, "-m", "parcompile", *arguments], folder))
                # The first turn fills caches of files.
                if turn:
                    pairs.append(times)
            old, new = zip(*pairs, strict=True)
            first, second = statistics.median(old), statistics.median(new)
            print(f"{what:34}{first:>8.3f} s{second:>8.3f} s  {spread(ratios(new, old))}", flush=True)
    (old_compiler, old_runtime), (compiler, runtime) = lines_of(before), lines_of(after)
    counts = {
        "lines of the compiler": (old_compiler, compiler),
        "with tools that were part of it": (old_compiler, compiler + lines_of_tools()),
        "lines of the runtime": (old_runtime, runtime),
    }
    for what, (old, new) in counts.items():
        print(f"{what:34}{old:>10,}{new:>10,}  {new / old:.2f}")


if __name__ == "__main__":
    main()
