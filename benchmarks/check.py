"""How long `parcompile check` takes: one spec from a cold start, beside an empty Python with the same libraries, and
many specs in one call.

    python benchmarks/check.py [--runs 15] [--specs 1000]

Cold starts alternate between the command and its baseline, `import jsonschema, click`, so that both meet the same
noise; the ratio of each pair is taken, and the median and the quartiles of the ratios are printed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import parsed, ratios, spread

from parcompile.rules import example_spec

BASELINE = "import jsonschema, click"
GOAL_RATIO, GOAL_SECONDS = 2.5, 0.005


def seconds_of(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def cold_start(folder: Path, runs: int) -> str:
    file = folder / "one.json"
    file.write_text(json.dumps(example_spec({}), indent=2), encoding="utf-8")
    ours = [sys.executable, "-m", "parcompile", "check", str(file)]
    theirs = [sys.executable, "-c", BASELINE]
    for command in (ours, theirs):
        seconds_of(command)
    pairs = [(seconds_of(ours), seconds_of(theirs)) for _ in range(runs)]
    mine, other = zip(*pairs, strict=True)
    return (
        f"cold start: {statistics.median(mine):.3f} s, baseline {statistics.median(other):.3f} s: "
        f"ratio {spread(ratios(mine, other))}, goal {GOAL_RATIO}"
    )


def write_specs(folder: Path, specs: int) -> None:
    """Different specs: layouts, lengths and batches vary, and one in ten has a mistake."""
    for index in range(specs):
        part = {
            "name": f"run-{index}",
            "parallelism": {"tp": (1, 2, 4, 8)[index % 4], "cp": (1, 2)[index % 2] if index % 4 < 3 else 1},
            "training": {"global_batch_size": 64 + 8 * (index % 7) + (index % 10 == 9)},
        }
        (folder / f"spec-{index}.json").write_text(json.dumps(example_spec(part), indent=2), encoding="utf-8")


def many(folder: Path, specs: int, rounds: int = 3) -> str:
    write_specs(folder, specs)
    command = [sys.executable, "-m", "parcompile", "check", f"{folder}/*.json", "--format", "concise"]
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run(command, check=False, capture_output=True)
        times.append((time.perf_counter() - start) / specs * 1000)
    return (
        f"{specs} specs in one call: {statistics.median(times):.2f} ms each "
        f"({min(times):.2f} to {max(times):.2f}), goal {GOAL_SECONDS * 1000:.0f} ms"
    )


def main() -> None:
    options = parsed(__doc__, runs=15, specs=1000)
    with tempfile.TemporaryDirectory() as folder:
        print(cold_start(Path(folder), options.runs))
    with tempfile.TemporaryDirectory() as folder:
        print(many(Path(folder), options.specs))


if __name__ == "__main__":
    main()
