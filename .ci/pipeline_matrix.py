"""Trains drawn pipelines on live ranks and in one process, and prints how far apart they are, as a table.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/pipeline_matrix.py [--first 0] [--count 100] [--ranks 8]

The exit code is 1 when a loss, a gradient norm or a parameter is further than 1e-5 (relative) from one process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))

TOLERANCE = 1e-5


def main() -> int:
    """One row for each drawn plan."""
    from drawn_pipelines import difference, draw

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=8, help="of the largest plan")
    options = parser.parse_args()
    print("| plan | loss | norm | parameters |\n|---|---|---|---|")
    failed = 0
    for number in range(options.first, options.first + options.count):
        plan, text = draw(number, options.ranks)
        found = difference(plan)
        failed += max(found) >= TOLERANCE
        print(f"| {text} | {found.loss:.1e} | {found.norm:.1e} | {found.parameter:.1e} |", flush=True)
    print(f"\n{options.count - failed} of {options.count} within {TOLERANCE:.0e}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
