"""Trains drawn layouts under Muon, SGD and Adagrad beside one process, and prints `docs/optimizers.md`.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/optimizer_matrix.py [--cells 48] > docs/optimizers.md

The exit code is 1 when a loss, a gradient norm or a parameter is further than 1e-5 (relative) from one process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))

START = """# Optimizers beside one process

Layouts drawn with their family, ZeRO stage, accumulation, clipping (0.5 is active, 1000 is not) and optimizer, trained
three steps on live ranks (gloo, fp32), and with transformers and torch's own optimizers in one process. Newton-Schulz
runs in fp32 on both sides; the page [Training](training.md#optimizers) says what bf16 does. Numbers are the largest
relative differences. `python .ci/optimizer_matrix.py | grep -v '^\\[' > docs/optimizers.md` makes this page again.

| | layout | family | ZeRO | accumulation | clipping | optimizer | loss | norm | parameters |
|---|---|---|---|---|---|---|---|---|---|"""


def main() -> int:
    """The page on standard output."""
    from optimizer_runs import draw, largest

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=48)
    worst = 0.0
    print(START)
    for number in range(parser.parse_args().cells):
        cell = draw(number)
        found = largest(cell)
        worst = max(worst, *found.values())
        words = {"muon": f"muon, {cell.adjust_lr}" + ("" if cell.nesterov else ", no nesterov")}
        words["sgd"] = "sgd, momentum, nesterov" if cell.nesterov else "sgd"
        values = " | ".join(f"{one:.1e}" for one in found.values())
        layout = f"{cell.layout} | {cell.family} | {cell.zero} | {cell.accumulation} | {cell.clip:g}"
        print(f"| {number} | {layout} | {words.get(cell.optimizer, cell.optimizer)} | {values} |", flush=True)
    print(f"\nThe largest difference is {worst:.1e}.")
    return int(worst > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
