"""Proves the prover: planted mistakes have to be red, and the engine without one never. Prints `docs/prover.md`.

    OMP_NUM_THREADS=1 python .ci/prover_matrix.py [--right 400] [--cells 20] [--only PART] > docs/prover.md

For each mutant of `tests/runtime/mutants.py` it draws cells, as `parcompile prove --cells` does, until one is red. The
exit code is 1 when the right engine is red in a cell, or fewer than 95 % of the mutants in any.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ADAPTER = Path(__file__).parents[1] / "tests" / "runtime" / "mutants.py"
START = """# Proof of the prover

This page shows that `parcompile prove` finds mistakes, and that it blames no correct engine. The correct engine is
written by hand: it splits rows and positions of sequences over ranks, reduces gradients in two levels and updates
shards of the weights. Each *mutant* is that engine with one mistake. The table says in which drawn cell each mutant is
red first.
`python .ci/prover_matrix.py > docs/prover.md` makes this page again, in about half an hour on one core.
"""


def main() -> int:
    """The page on standard output, what goes on on the other."""
    from parcompile.runtime.prove import Engine, prove
    from parcompile.runtime.prove.ranks.cells import text_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--right", type=int, default=400, help="cells of the engine without a mistake")
    parser.add_argument("--cells", type=int, default=20, help="at most so many of each mutant")
    parser.add_argument("--only", default="", help="mutants whose name has this part")
    options = parser.parse_args()
    rows, found, missed = list[str](), Counter[int](), list[str]()
    with Engine(str(ADAPTER)) as engine:
        right = Counter[str]()
        wrong = list[str]()
        for first in range(0, options.right, 40):
            count = min(40, options.right - first)
            cells = engine.draw(count, 1000 + first, 4, {"mutant": "none"})
            done = prove(engine, cells, shrinks=False, each=lambda number, one: say(number, one.verdict))
            right.update(one.verdict for one in done.cells)
            wrong += [done.line(one) for one in done.cells if one.verdict == "red"]
        for number, name in enumerate(engine.features["mutant"][1:]):
            if options.only not in name:
                continue
            for tried, cell in enumerate(engine.draw(options.cells, number, 4, {"mutant": name}), 1):
                answer: dict[str, Any] = engine.run(cell)
                if answer["verdict"] == "red":
                    shown = text_of({**cell, "mutant": "none"}, engine.features)
                    rows.append(f"| {name} | {tried} | {shown} | {answer['why']} |")
                    found[tried] += 1
                    break
            else:
                missed.append(name)
                rows.append(f"| {name} | in none of {options.cells} | | |")
            say(number, rows[-1])
        versions = ", ".join(f"{name} {version}" for name, version in engine.versions.items())
    red, count = sum(found.values()), len(rows)
    print(START)
    print(f"Made with {versions}.\n")
    print(f"- {red} of {count} mutants are red: {found[1]} in their first cell, all within {max(found, default=0)}.")
    print(f"- Of {right.total()} cells of the engine without a mistake {right['red']} are red: ", end="")
    print(", ".join(f"{number} {verdict}" for verdict, number in right.items()) + ".\n")
    if missed:
        print("Not found: the mutant " + "; ".join(f'"{one}"' for one in missed) + ".\n")
    print("| mutant | cells until red | the cell | why |\n|---|---|---|---|\n" + "\n".join(rows))
    for line in wrong:
        say(0, line)
    return int(bool(wrong) or red < 0.95 * count)


def say(number: int, text: str) -> None:
    """How far it is."""
    print(f"{number:>4} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
