"""Derives the parameter tables of the installed transformers.

    python .ci/generate/model_tables [TYPE ...] [--missing] [--jobs 1]
    python .ci/generate/model_tables [TYPE ...] --check 100

Without types: all causal language models. Writes compiler/model/tables/transformers-VERSION.json when all types are
done; with types, only their entries change. Each finished type is kept in a file beside it (`.part`): the same command
goes on where it was interrupted. `--check` writes nothing: it draws so many configurations of each type in the file and
compares the table with the models that transformers builds.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import transformers
from building import CLASSES
from comparing import compared
from running import run
from writing import empty, read, write

ROOM = Path(__file__).parents[3] / "compiler" / "model" / "tables"


def main() -> None:
    """Studies the types and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all where none is named")
    parser.add_argument("--missing", action="store_true", help="only types that the file does not have")
    parser.add_argument("--seconds", type=int, default=240, help="the longest that a type may take, of a processor")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="types at a time; 0.6 GB of memory each")
    parser.add_argument("--file", type=Path, default=ROOM / f"transformers-{transformers.__version__}.json")
    parser.add_argument(
        "--check", type=int, metavar="DRAWS", help="compare the file with this many models of each type"
    )
    parser.add_argument("--seed", default="check", help="of these draws")
    given = parser.parse_args()
    if unknown := sorted(set(given.types) - set(CLASSES)):
        sys.exit(f"not causal language models of transformers {transformers.__version__}: {', '.join(unknown)}")
    stored: dict[str, Any] = read(given.file)
    if given.check:
        if none := sorted(set(given.types) - set(stored["types"])):
            sys.exit(f"no table of these types is in the file: {', '.join(none)}")
        sys.exit(check(stored, given.types or list(stored["types"]), given.check, given.seed))
    done = {*stored["types"], *stored["left_out"]} if given.missing else set()
    names = [name for name in given.types or sorted(CLASSES) if name not in done]
    try:
        found = run(names, given.seconds, given.jobs, given.file.with_name(given.file.name + ".part"))
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on from here")
    whole = not given.types and not given.missing
    write(given.file, _with(empty() if whole else stored, found))


def _with(stored: dict[str, Any], found: dict[str, dict[str, Any] | str]) -> dict[str, Any]:
    """The file with what was found for some types: a table, or why there is none."""
    for name, entry in found.items():
        here, there = ("left_out", "types") if isinstance(entry, str) else ("types", "left_out")
        stored[here][name] = entry
        stored[there].pop(name, None)
    return stored


def check(stored: dict[str, Any], names: list[str], draws: int, seed: str) -> int:
    """Prints what each type gets wrong; 1 where one does."""
    failed = 0
    for name in names:
        built, wrong = compared(name, stored["types"][name], draws, f"{seed} {name}")
        failed += bool(wrong)
        print(f"{name}: {built - len(wrong)} of {built} exact{''.join(f'; {one}' for one in wrong[:1])}", flush=True)
    print(f"{len(names) - failed} of {len(names)} types exact")
    return int(failed > 0)


if __name__ == "__main__":
    main()
