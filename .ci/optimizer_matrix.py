"""Trains drawn layouts under Muon, SGD and Adagrad beside one process, and writes `docs/optimizers.md`.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/optimizer_matrix.py [--cells 48] [--write]

Without `--write` it prints the page. The exit code is 1 when a loss, a gradient norm or a parameter is further from one
process than `tests/runtime/closeness.py` allows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "runtime"))

START = """# Optimizers beside one process

Layouts drawn with their family, ZeRO stage, accumulation, clipping (0.5 is active, 1000 is not) and optimizer,
trained three steps on live ranks (gloo, fp32), and with transformers and torch's own optimizers in one process.
Newton-Schulz runs in fp32 on both sides; the page [Training](training.md#optimizers) says what bf16 does. "On the
host" is `zero.offload_optimizer`; a falling rate warms up for two steps and falls. Numbers are the largest relative
differences. Their limit is 1e-5 or, if that is more, ten times what a change of the last bits of the weights does to
one process: it moves norms of this qwen3_next by 1e-4. Differences stay within a third of the limit. `python
.ci/optimizer_matrix.py --write` makes this page again.

| | layout | family | ZeRO | accumulation | clipping | optimizer | loss | norm | parameters |
|---|---|---|---|---|---|---|---|---|---|"""


def main() -> int:
    """The page, written or on standard output."""
    from closeness import ROOM, largest
    from optimizer_runs import compare, draw

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=48)
    parser.add_argument("--write", action="store_true")
    given, worst, rows = parser.parse_args(), 0.0, [START]
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
        values = " | ".join(
            f"{one:.1e}" for one in (largest(margins, what) for what in ("losses", "norms", "parameters"))
        )
        layout = f"{cell.layout} | {cell.family} | {cell.zero} | {cell.accumulation} | {cell.clip:g}"
        rows.append(f"| {number} | {layout} | {words} | {values} |")
        print(rows[-1], file=sys.stderr, flush=True)
    page = "\n".join([*rows, f"\nThe largest share of its limit that a difference takes is {worst:.2f}.\n"])
    if given.write:
        (ROOT / "docs" / "optimizers.md").write_text(page, encoding="utf-8")
    else:
        print(page)
    return int(worst > 1 / ROOM)


if __name__ == "__main__":
    sys.exit(main())
