"""Trains drawn scripts of trl by a plan on live ranks and in one process, and prints how far apart they are.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/trl_matrix.py [--first 0] [--count 40]

The exit code is 1 when a number of the log or a weight is further from one process than 1e-5 (relative) and than a
change of the last bits of the weights explains (`tests/runtime/closeness.py`).
"""

from __future__ import annotations

import functools
import sys
import tempfile
from typing import Any

from matrix import logged, parsed, table


def compared(run: Any) -> list[Any]:
    from trl_runs import compare

    with tempfile.TemporaryDirectory() as folder:
        return compare(run, folder)


def main() -> int:
    """One row for each drawn script."""
    from trl_runs import draw

    options = parsed(__doc__, first=0, count=40)
    drawn = [(number, draw(number)) for number in range(options.first, options.first + options.count)]
    runs = [(f"{number}: {run.text}", functools.partial(compared, run)) for number, run in drawn]
    return table(("script and plan", "log", "of", "norm", "weights"), runs, logged)


if __name__ == "__main__":
    sys.exit(main())
