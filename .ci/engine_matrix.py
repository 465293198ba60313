"""Proves engines in drawn cells, and prints `docs/engines.md`.

    OMP_NUM_THREADS=1 python .ci/engine_matrix.py [ENGINE ...] [--cells 40] [--seed 0] > docs/engines.md

An engine that is not installed in this interpreter is listed as such. Scripts that show red cells are written to
docs/red_cells/. The exit code is 1 when this runtime is red.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

START = """# Engines beside one process

Cells of [`parcompile prove`](prove.md), drawn so that each pair of features meets: the same tiny models, batches and
optimizer in an engine's own ranks and in one plain process. `python .ci/engine_matrix.py > docs/engines.md` makes this
page again. Of a red cell the first wrong place is named; its script runs with `torchrun`, imports upstream alone, and
was kept because it fails, and passes without the suspected feature. A *shim* is what an adapter replaces so that an
engine runs on CPUs: a cell with one says less about GPUs.
"""
RED_CELLS = Path(__file__).parents[1] / "docs" / "red_cells"
SIGN = {"equal": "equal", "rounding": "rounding", "red": "**red**", "not runnable": "not runnable"}


def main() -> int:
    """The page on standard output, what goes on on the other."""
    from parcompile.runtime.prove import Engine, EngineError, prove
    from parcompile.runtime.prove.engine import BUILT_IN
    from parcompile.runtime.prove.ranks.cells import text_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", default=BUILT_IN)
    parser.add_argument("--cells", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    summary, parts, failed = list[str](), list[str](), False
    for name in options.engines:
        try:
            engine = Engine(name)
        except EngineError as error:
            summary.append(f"| {name} | not installed | | | | |")
            print(error, file=sys.stderr, flush=True)
            continue
        with engine:
            cells = engine.draw(options.cells, options.seed, 4)
            proved = prove(
                engine, cells, each=lambda number, one: print(number, one.verdict, file=sys.stderr, flush=True)
            )
            version = ", ".join(
                f"{key} {value}" for key, value in engine.versions.items() if key not in ("python", "torch")
            )
            count = Counter(one.verdict for one in proved.cells)
            summary.append(f"| {name} | {version} | " + " | ".join(str(count[one]) for one in SIGN) + " |")
            parts.append(f"## {name}\n\n| cell | verdict | loss | norm | update | |\n|---|---|---|---|---|---|")
            for one in proved.cells:
                apart = one.answer.get("differences", {})
                numbers = " | ".join(f"{apart[key]:.1e}" if key in apart else "" for key in ("loss", "norm", "update"))
                why = one.answer.get("why") or ("shim" if one.answer.get("shims") else "")
                if one.smallest is not None:
                    smallest = text_of(one.smallest, engine.features)
                    why += f"; with the fewest features: {smallest}"
                    first = one.answer["explanation"]
                    why += f"; first wrong: {first.get('place') or 'the last parameters'}: {first.get('said')}"
                    if script := one.answer.get("script"):
                        file = f"{name} {smallest}".replace(" ", "_").replace(".", "_") + ".py"
                        RED_CELLS.mkdir(exist_ok=True)
                        (RED_CELLS / file).write_text(script, encoding="utf-8")
                        why += f"; [script](red_cells/{file})"
                parts.append(f"| {proved.text_of(one)} | {SIGN[one.verdict]} | {numbers} | {why} |")
            parts.append("")
            failed = failed or (name == "parcompile" and count["red"] > 0)
    head = f"| engine | versions | {' | '.join(SIGN)} |\n|---|---|---|---|---|---|"
    print("\n".join([START, head, *summary, "", *parts]).rstrip())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
