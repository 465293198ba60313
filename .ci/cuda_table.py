"""Runs a step of every family on `cuda` without a GPU, and prints the kernel of attention and what is not as planned.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/cuda_table.py [--draws 1] [FAMILY …]

The exit code is 1 when a run sends other messages than its plan says, mixes devices, or waits where docs/cuda.md lists
no wait. It takes about 2 seconds of one core for a run.
"""

from __future__ import annotations

import os
import sys

from matrix import parsed


def main() -> int:
    """The table."""
    options = parsed(__doc__, ("families", {"nargs": "*"}), draws=1)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from cuda_runs import CudaRun, drawn, run

    from parcompile.model.catalogue import RUNTIME_FAMILIES

    count, failed = 0, 0
    for family in options.families or RUNTIME_FAMILIES:
        for layout, plan, packed in drawn(family, options.draws):
            found: CudaRun = run(family, layout, plan, packed)
            wrong = [*found.differs, *found.waits, *found.slower]
            failed += bool(found.differs or found.waits)
            kernels = "; ".join(found.kernels) or "–"
            count += 1
            print(f"{family}, {layout}: {kernels}; {'; '.join(wrong) or 'as planned'}".replace("\n", " "), flush=True)
    print(f"\n{count} runs, {failed} not as planned")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
