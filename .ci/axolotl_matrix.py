"""Trains axolotl's own examples, shrunken, by its plug-in on live ranks and in one process.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/axolotl_matrix.py EXAMPLES [--first 0] [--count 20]

EXAMPLES is the folder `examples` of axolotl's source distribution. The exit code is 1 when a number of the log or a
weight is further from one process than 1e-5 (relative).
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from matrix import logged, parsed, table

EXAMPLES: list[tuple[str, str, dict[str, Any]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
"""Each with a family and a layout."""


def compared(file: Path, family: str, layout: dict[str, Any]) -> list[Any]:
    from axolotl_runs import compare

    world = layout.get("tp", 1) * layout.get("cp", 1)
    with tempfile.TemporaryDirectory() as folder:
        return compare(yaml.safe_load(file.read_text()), family, world, layout, Path(folder))


def cells(found: list[Any]) -> tuple[str, ...]:
    log, of, *others = logged(found)
    return f"{log} ({of})", *others


def main() -> int:
    """One row for each example."""
    options = parsed(__doc__, ("examples", {"type": Path}), first=0, count=len(EXAMPLES))
    runs = []
    for name, family, layout in EXAMPLES[options.first : options.first + options.count]:
        sizes = ", ".join(f"{axis} {size}" for axis, size in layout.items())
        run = functools.partial(compared, options.examples / name, family, layout)
        runs.append((f"{name} | {family}, {sizes}", run))
    return table(("example", "model and layout", "log", "norm", "weights"), runs, cells)


if __name__ == "__main__":
    sys.exit(main())
