"""Runs a step of every family on `cuda` without a GPU, and writes the table of docs/cuda.md.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/cuda_table.py [--draws 1] [FAMILY …]

Prints a row for each run as it ends; with no family named, the rows of all families are put into the page at the end.
The exit code is 1 when a run sends other messages than its plan says, mixes devices, or waits where the page lists no
wait. It takes about 2 seconds of one core for a run.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "runtime"))
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
HEADER = "| family | rank 1 of a plan | kernel of attention | what is not as planned |\n|---|---|---|---|\n"


def main() -> int:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("families", nargs="*")
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from cuda_runs import CudaRun, drawn, run

    from parcompile.model.catalogue import RUNTIME_FAMILIES

    rows, failed = [], 0
    for family in options.families or RUNTIME_FAMILIES:
        for layout, plan, packed in drawn(family, options.draws):
            found: CudaRun = run(family, layout, plan, packed)
            wrong = [*found.differs, *found.waits, *found.slower]
            failed += bool(found.differs or found.waits)
            kernels = "; ".join(found.kernels) or "–"
            row = f"| `{family}` | {layout} | {kernels} | {'; '.join(wrong) or '–'} |".replace("\n", " ")
            rows.append(row)
            print(row, flush=True)
    if not options.families:
        page = ROOT / "docs" / "cuda.md"
        text = page.read_text(encoding="utf-8")
        before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        page.write_text(before + HEADER + "".join(f"{row}\n" for row in rows) + after, encoding="utf-8")
    print(f"\n{len(rows)} runs, {failed} not as planned")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
