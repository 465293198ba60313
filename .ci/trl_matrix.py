"""Trains drawn scripts of trl by a plan on live ranks and in one process, and prints how far apart they are.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/trl_matrix.py [--first 0] [--count 40]

The exit code is 1 when a number of the log or a weight is further from one process than 1e-5 (relative) and than a
change of the last bits of the weights explains (`tests/runtime/closeness.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))


def main() -> int:
    """One row for each drawn script."""
    from trl_runs import compare, draw

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    options = parser.parse_args()
    print("| script and plan | log | of | norm | weights |\n|---|---|---|---|---|")
    failed = 0
    for number in range(options.first, options.first + options.count):
        run = draw(number)
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = compare(run, folder)
        except Exception as error:  # a rank's, whose message says what failed
            print(f"| {number}: {run.text} | {str(error).strip().splitlines()[-1][:300]} |", flush=True)
            failed += 1
            continue
        failed += (worst := max(found, key=lambda one: one.ratio)).ratio > 1
        log = max((one for one in found if one.what.startswith("log")), key=lambda one: one.difference)
        norm = max(one.difference for one in found if one.what.endswith("grad_norm"))
        weights = max(one.difference for one in found if one.what.startswith("parameters"))
        mark = f" {worst.text}" if worst.ratio > 1 else ""
        numbers = f"{log.difference:.1e} | {log.what.split('] ')[-1]} | {norm:.1e} | {weights:.1e}"
        print(f"| {number}: {run.text} | {numbers} |{mark}", flush=True)
    print(f"\n{options.count - failed} of {options.count} within their limits")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
