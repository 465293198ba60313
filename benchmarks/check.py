"""How long `parcompile check` takes: one spec from a cold start, beside an empty Python with the same libraries, and
many specs in one call.

    python benchmarks/check.py [--runs 15] [--specs 1000]

Cold starts alternate between the command and its baseline, `import jsonschema, click`, so that both meet the same
noise; the ratio of each pair is taken, and the median and the quartiles of the ratios are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from parcompile.rules import example_spec

BASELINE = "import jsonschema, click"
GOAL_RATIO, GOAL_SECONDS = 2.5, 0.005


def seconds_of(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def spread(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def cold_start(folder: Path, runs: int) -> dict[str, float]:
    file = folder / "one.json"
    file.write_text(json.dumps(example_spec({}), indent=2), encoding="utf-8")
    ours = [sys.executable, "-m", "parcompile", "check", str(file)]
    theirs = [sys.executable, "-c", BASELINE]
    for command in (ours, theirs):
        seconds_of(command)
    pairs = [(seconds_of(ours), seconds_of(theirs)) for _ in range(runs)]
    low, middle, high = spread([mine / other for mine, other in pairs])
    return {
        "check_seconds": statistics.median(mine for mine, _ in pairs),
        "baseline_seconds": statistics.median(other for _, other in pairs),
        "ratio_low": low,
        "ratio": middle,
        "ratio_high": high,
    }


def write_specs(folder: Path, specs: int) -> None:
    """Different specs: layouts, lengths and batches vary, and one in ten has a mistake."""
    for index in range(specs):
        part = {
            "name": f"run-{index}",
            "parallelism": {"tp": (1, 2, 4, 8)[index % 4], "cp": (1, 2)[index % 2] if index % 4 < 3 else 1},
            "training": {"global_batch_size": 64 + 8 * (index % 7) + (index % 10 == 9)},
        }
        (folder / f"spec-{index}.json").write_text(json.dumps(example_spec(part), indent=2), encoding="utf-8")


def many(folder: Path, specs: int, rounds: int = 3) -> dict[str, float]:
    write_specs(folder, specs)
    command = [sys.executable, "-m", "parcompile", "check", f"{folder}/*.json", "--format", "concise"]
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run(command, check=False, capture_output=True)
        times.append((time.perf_counter() - start) / specs)
    return {"seconds_per_spec": statistics.median(times), "fastest": min(times), "slowest": max(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--specs", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as folder:
        cold = cold_start(Path(one), arguments.runs)
        warm = many(Path(folder), arguments.specs)
    print(
        f"cold start: {cold['check_seconds']:.3f} s, baseline {cold['baseline_seconds']:.3f} s: "
        f"ratio {cold['ratio']:.2f} ({cold['ratio_low']:.2f} to {cold['ratio_high']:.2f}), goal {GOAL_RATIO}"
    )
    print(
        f"{arguments.specs} specs in one call: {warm['seconds_per_spec'] * 1000:.2f} ms each "
        f"({warm['fastest'] * 1000:.2f} to {warm['slowest'] * 1000:.2f}), goal {GOAL_SECONDS * 1000:.0f} ms"
    )


if __name__ == "__main__":
    main()
