"""How long `parcompile check` takes: one spec from a cold start, right and with a mistyped key, and many specs in one
call.

    python benchmarks/check.py [--runs 15] [--specs 1000]

Cold starts alternate between the command and its baseline, a Python that imports `jsonschema` and `click` and ends, so
that both meet the same noise; the ratio of each pair is taken, and the median and the quartiles of the ratios are
printed. A spec that violates nothing of its schema is read without jsonschema.
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


def main() -> None:
    options = parsed(__doc__, runs=15, specs=1000)
    with tempfile.TemporaryDirectory() as name:
        folder, words = Path(name), ("-m", "parcompile", "check")
        one = folder / "one.json"
        one.write_text(json.dumps(example_spec({}), indent=2), encoding="utf-8")
        wrong = folder / "wrong.json"
        wrong.write_text(one.read_text(encoding="utf-8").replace('"training"', '"trainign"'), encoding="utf-8")
        turns = {
            "a spec": lambda: run(*words, str(one)),
            "a mistyped key": lambda: run(*words, str(wrong), codes=(1,)),
            "theirs": lambda: run("-c", BASELINE),
        }
        taken = seconds_in_turns(turns, options.runs)
        theirs = taken.pop("theirs")
        print(f"baseline: {statistics.median(theirs):.3f} s")
        for what, ours in taken.items():
            ratio = spread(ratios(ours, theirs))
            print(f"{what}, from a cold start: {statistics.median(ours):.3f} s: ratio {ratio}, goal {GOAL_RATIO}")
        # Different specs: layouts, lengths and batches vary, and one in ten has a mistake.
        for index in range(options.specs):
            part = {
                "name": f"run-{index}",
                "parallelism": {"tp": (1, 2, 4, 8)[index % 4], "cp": (1, 2)[index % 2] if index % 4 < 3 else 1},
                "training": {"global_batch_size": 64 + 8 * (index % 7) + (index % 10 == 9)},
            }
            (folder / f"spec-{index}.json").write_text(json.dumps(example_spec(part), indent=2), encoding="utf-8")
        words = (*words, f"{folder}/spec-*.json", "--format", "concise")
        (seconds,) = seconds_in_turns({"ours": lambda: run(*words, codes=(0, 1))}, 3).values()
        each = spread([taken / options.specs * 1000 for taken in seconds])
        print(f"{options.specs} specs in one call: {each} ms each, goal {GOAL_SECONDS * 1000:.0f} ms")


if __name__ == "__main__":
    main()
