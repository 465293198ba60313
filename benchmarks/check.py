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
from pathlib import Path

from harness import parsed, ratios, seconds_in_turns, spread

from parcompile.rules import example_spec

BASELINE = "import jsonschema, click"
GOAL_RATIO, GOAL_SECONDS = 2.5, 0.005


def run(*words: str, codes: tuple[int, ...] = (0,)) -> None:
    found = subprocess.run([sys.executable, *words], check=False, capture_output=True)
    assert found.returncode in codes, found.stderr


def cold_start(folder: Path, runs: int) -> str:
    file = folder / "one.json"
    file.write_text(json.dumps(example_spec({}), indent=2), encoding="utf-8")
    ours, theirs = seconds_in_turns(
        {"ours": lambda: run("-m", "parcompile", "check", str(file)), "theirs": lambda: run("-c", BASELINE)}, runs
    ).values()
    return (
        f"cold start: {statistics.median(ours):.3f} s, baseline {statistics.median(theirs):.3f} s: "
        f"ratio {spread(ratios(ours, theirs))}, goal {GOAL_RATIO}"
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
    words = ("-m", "parcompile", "check", f"{folder}/*.json", "--format", "concise")
    (seconds,) = seconds_in_turns({"ours": lambda: run(*words, codes=(0, 1))}, rounds).values()
    each = spread([one / specs * 1000 for one in seconds])
    return f"{specs} specs in one call: {each} ms each, goal {GOAL_SECONDS * 1000:.0f} ms"


def main() -> None:
    options = parsed(__doc__, runs=15, specs=1000)
    with tempfile.TemporaryDirectory() as folder:
        print(cold_start(Path(folder), options.runs))
    with tempfile.TemporaryDirectory() as folder:
        print(many(Path(folder), options.specs))


if __name__ == "__main__":
    main()
