"""Trains drawn layouts under Muon, SGD and Adagrad beside one process, and writes `docs/optimizers.md`.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/optimizer_matrix.py [--cells 48] [--write]

Without `--write` it prints the page. The exit code is 1 when a loss, a gradient norm or a parameter is further from one
process than `tests/runtime/closeness.py` allows.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matrix import ROOT, numbers, parsed

START = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").rstrip()


def main() -> int:
    """The page, written or on standard output."""
    from closeness import ROOM
    from optimizer_runs import compare, draw

    given, worst, rows = parsed(__doc__, cells=48, write=False), 0.0, [START]
    for number in range(given.cells):
        cell = draw(number)
        margins = compare(cell)
        worst = max(worst, *(one.ratio for one in margins))
        said = {
            "muon": [cell.adjust_lr, *([] if cell.nesterov else ["no nesterov"])],
            "sgd": ["momentum", "nesterov"] if cell.nesterov else [],
        }
        further = {"on the host": cell.on_host, "a falling rate": cell.falls}
        words = ", ".join(
            [cell.optimizer, *said.get(cell.optimizer, []), *(one for one, is_so in further.items() if is_so)]
        )
        layout = f"{cell.layout} | {cell.family} | {cell.zero} | {cell.accumulation} | {cell.clip:g}"
        rows.append(f"| {number} | {layout} | {words} | {' | '.join(numbers(margins))} |")
        print(rows[-1], file=sys.stderr, flush=True)
    page = "\n".join([*rows, f"\nThe largest share of its limit that a difference takes is {worst:.2f}.\n"])
    if given.write:
        (ROOT / "docs" / "optimizers.md").write_text(page, encoding="utf-8")
    else:
        print(page)
    return int(worst > 1 / ROOM)


if __name__ == "__main__":
    sys.exit(main())
