"""Proves the prover: planted mistakes have to be red, and the engine without one never. Prints `docs/prover.md`.

    OMP_NUM_THREADS=1 python .ci/prover_matrix.py [--right 400] [--cells 20] [--only PART] > docs/prover.md

For each mutant of `tests/runtime/mutants.py` it draws cells, as `parcompile prove --cells` does, until one is red; and
for each of `tests/runtime/engine_mutants.py`, where the same cell without the mistake is not red. The exit code is 1
when the right engine is red in a cell, or fewer than 95 % of the mutants in any.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from matrix import ROOT, parsed

ADAPTER = ROOT / "tests" / "runtime" / "mutants.py"
ENGINES = ("deepspeed", "transformers", "accelerate", "megatron")
START = """# Proof of the prover

This page shows that `parcompile prove` finds mistakes, and that it blames no correct engine. The correct engine is
written by hand: it splits rows and positions of sequences over ranks, reduces gradients in two levels and updates
shards of the weights. Each *mutant* is that engine with one mistake. The table says in which drawn cell each mutant is
red first.
`python .ci/prover_matrix.py > docs/prover.md` makes this page again, in about half an hour on one core.
"""
HEAD = "| mutant | cells until red | the cell | why |\n|---|---|---|---|"
IN_ENGINES = """## Mistakes in engines

Mistakes in functions of the engines themselves, for features that the engine written by hand has not. In the same cell
the engine without the mistake is right. `python .ci/prover_matrix.py --engines` prints this part alone."""
IN_ENGINE = 5
"""So many cells of a mistake in an engine are drawn at a time."""
NONE, RIGHT = "in none of", ("equal", "rounding")


def main() -> int:
    """The page on standard output, what goes on on the other."""
    from parcompile.runtime.prove import Engine, prove

    options = parsed(
        __doc__,
        right=(400, "cells of the engine without a mistake"),
        cells=(20, "at most so many of each mutant"),
        only=("", "mutants whose name has this part"),
        engines=(False, "mistakes in engines alone, the second part of the page"),
    )
    if options.engines:
        return in_engines(options)
    rows, found = list[str](), Counter[int]()
    with Engine(str(ADAPTER)) as engine:
        right = Counter[str]()
        wrong = list[str]()
        for first in range(0, options.right, 40):
            count = min(40, options.right - first)
            cells = engine.draw(count, 1000 + first, 4, {"mutant": "none"})
            done = prove(engine, cells, shrinks=False, each=lambda number, one: say(number, one.verdict))
            right.update(one.verdict for one in done.cells)
            wrong += [done.line(one) for one in done.cells if one.verdict == "red"]
        for row, tried in mutants(engine, options.only, options.cells):
            rows.append(row)
            found[tried] += 1
        versions = ", ".join(f"{name} {version}" for name, version in engine.versions.items())
    count, missed = len(rows), [row.split(" | ")[0].removeprefix("| ") for row in rows if NONE in row]
    del found[0]
    red = sum(found.values())
    print(START)
    print(f"Made with {versions}.\n")
    print(f"- {red} of {count} mutants are red: {found[1]} in their first cell, all within {max(found, default=0)}.")
    print(f"- Of {right.total()} cells of the engine without a mistake {right['red']} are red: ", end="")
    print(", ".join(f"{number} {verdict}" for verdict, number in right.items()) + ".\n")
    if missed:
        print("Not found: the mutant " + "; ".join(f'"{one}"' for one in missed) + ".\n")
    print("\n".join([HEAD, *rows, ""]))
    for line in wrong:
        say(0, line)
    return int(bool(wrong) or red < 0.95 * count) or in_engines(options)


def in_engines(options: argparse.Namespace) -> int:
    """The second part of the page."""
    from parcompile.runtime.prove import Engine

    lines, found, adapter = list[str](), list[int](), ADAPTER.with_name("engine_mutants.py")
    nodes = [node for node in ast.walk(ast.parse(adapter.read_text(encoding="utf-8"))) if isinstance(node, ast.Dict)]
    pairs = [pair for node in nodes for pair in zip(node.keys, node.values, strict=True)]
    pairs = [(key.value, value.elts[1]) for key, value in pairs if isinstance(value, ast.Tuple)]
    needs = {name: ast.literal_eval(node) for name, node in pairs if isinstance(node, ast.Dict)}
    for name in ENGINES:
        os.environ["PROVE_ENGINE"] = name
        with Engine(str(adapter)) as engine:
            lines += ["", f"### {name} {engine.versions.get(name) or engine.versions[f'{name}-core']}", "", HEAD]
            for row, tried in mutants(engine, options.only, IN_ENGINE, needs):
                lines.append(row)
                found.append(tried)
    red = sum(tried > 0 for tried in found)
    print(f"{IN_ENGINES}\n\n- {red} of {len(found)} mistakes are red: {found.count(1)} in their first cell.")
    print("\n".join(lines))
    return int(red < 0.95 * len(found))


def mutants(engine: Any, only: str, cells: int, needs: Mapping[str, Any] | None = None) -> Iterator[tuple[str, int]]:
    """The row of each mutant, and in which of its cells it was red, from 1; 0: in none.

    `needs`: of mistakes in engines, whose cells are drawn again with these: few others may have them.
    """
    from parcompile.runtime.prove.ranks.cells import text_of

    for number, name in enumerate(engine.features["mutant"][1:]):
        if only not in name:
            continue
        every = engine.draw(cells, number, 4, {"mutant": name})
        every += engine.draw(cells, number, 4, {"mutant": name, **needs[name]}) if needs else []
        row, red = f"| {name} | {NONE} {len(every)} | | |", 0
        for tried, cell in enumerate(every, 1):
            answer: dict[str, Any] = engine.run(cell)
            right = {**cell, "mutant": "none"}
            if answer["verdict"] == "red" and not (needs and engine.run(right)["verdict"] not in RIGHT):
                row, red = f"| {name} | {tried} | {text_of(right, engine.features)} | {answer['why']} |", tried
                break
        say(number, row)
        yield row, red


def say(number: int, text: str) -> None:
    """How far it is."""
    print(f"{number:>4} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
