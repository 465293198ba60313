"""Derives the parameter tables of the installed transformers.

    python .ci/generate/model_tables [TYPE ...] [--missing]
    python .ci/generate/model_tables [TYPE ...] --check 100

Without types: all causal language models. Writes compiler/model/tables/transformers-VERSION.json; with types, only
their entries change. A type takes a few seconds on one core. `--check` writes nothing: it draws so many configurations
of each type in the file and compares the table with the models that transformers builds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import transformers
from building import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from collecting import LeftOutError
from comparing import compared
from study import study
from writing import read, write

ROOM = Path(__file__).parents[3] / "compiler" / "model" / "tables"


def main() -> None:
    """Studies the types and writes the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all where none is named")
    parser.add_argument("--missing", action="store_true", help="only types that the file does not have")
    parser.add_argument("--seconds", type=int, default=240, help="the longest that a type may take, of a processor")
    parser.add_argument("--file", type=Path, default=ROOM / f"transformers-{transformers.__version__}.json")
    parser.add_argument(
        "--check", type=int, metavar="DRAWS", help="compare the file with this many models of each type"
    )
    parser.add_argument("--seed", default="check", help="of these draws")
    given = parser.parse_args()
    if unknown := sorted(set(given.types) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        sys.exit(f"not causal language models of transformers {transformers.__version__}: {', '.join(unknown)}")
    stored: dict[str, Any] = read(given.file)
    if given.check:
        sys.exit(check(stored, given.types or list(stored["types"]), given.check, given.seed))
    done = {*stored["types"], *stored["left_out"]} if given.missing else set()
    for name in [one for one in given.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if one not in done]:
        start = time.monotonic()
        stored = read(given.file)
        stored["types"].pop(name, None)
        stored["left_out"].pop(name, None)
        try:
            found = study(name, given.seconds)
            stored["types"][name] = found.stored
            said = f"exact, {len(found.stored['rows'])} rows, {found.builds} models built, {found.rounds} rounds"
        except LeftOutError as error:
            stored["left_out"][name] = str(error)
            said = f"left out: {error}"
        write(given.file, stored)
        print(f"{name}: {said}, {time.monotonic() - start:.1f} s", flush=True)


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
