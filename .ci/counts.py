"""How many places of the code know what: counts that may fall and must not rise.

    python .ci/counts.py            the counts beside those of `.ci/counts.json`
    python .ci/counts.py --write    records them, after a change that made one fall

| count | what it is |
|---|---|
| files that name a mechanism | of `compiler/` and `runtime/`, without its own files and tables |
| literals of model types | strings in their code that are the name of a model type |
| lines of `memory_terms`, fields of `ModelShape`, calls in `_Injection.run` | what one place knows of all mechanisms |
| lines, files | Python outside of tests |
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
MECHANISMS = {
    "n-grams": r"(?i)n-?gram",
    "AltUp": r"(?i)altup",
    "indexer": r"[Ii]ndexer|INDEXER",
    "recurrent": r"(?i)recurrent",
    "MLA": r"\bmla|_mla\b|Mla|MLA",
    "kinds of experts": (
        r"shared_expert|num_shared|shared_intermediate|shared_width|num_identities|identity_expert|zero.experts"
        r"|\.hashed\b|taken_size|norm_after|beside_mlp|correction_bias|CORRECTION_BIASES|\bn_group\b"
    ),
}
"""The word of each in names and texts. Of experts those of single kinds: all that ep spreads knows of experts."""
STEMS = {"kinds of experts": r"expert|router_bias"}
"""What names of its own files have, where that is another word."""
OWN = ("blocks", "mechanisms", "tables", "families", "recurrent", "expert_parallel")
"""Folders in which a mechanism is at home, or data."""


def counts() -> dict[str, int]:
    """All of them, by what they count."""
    files = list(_files("compiler", "runtime"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    found = {
        f"files that name {name}": sum(
            re.search(word, text) is not None
            for file, text in texts.items()
            if not set(OWN) & set(file.relative_to(ROOT).parts) and not re.search(STEMS.get(name, word), file.stem)
        )
        for name, word in MECHANISMS.items()
    }
    (table,) = (ROOT / "compiler" / "model" / "tables").glob("transformers-*.json")
    types = set(json.loads(table.read_text(encoding="utf-8"))["types"])
    found["literals of model types"] = sum(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in types
        for tree in trees.values()
        for node in ast.walk(tree)
    )
    found["lines of memory_terms"] = _lines(trees[ROOT / "compiler/cost/memory_terms.py"], "memory_terms")
    shape = _node(trees[ROOT / "compiler/model/shape.py"], "ModelShape")
    found["fields of ModelShape"] = sum(isinstance(one, ast.AnnAssign) for one in shape.body)
    run = _node(_node(trees[ROOT / "runtime/inject/injection.py"], "_Injection"), "run")
    found["calls in _Injection.run"] = sum(
        isinstance(one, ast.Call) for statement in run.body for one in ast.walk(statement)
    )
    every = [*files, *_files("schemas", "examples", "benchmarks")]
    found["lines of Python outside of tests"] = sum(
        len(file.read_text(encoding="utf-8").splitlines()) for file in every
    )
    found["files of compiler and runtime"] = len(files)
    return found


def _files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def _node(tree: ast.AST, name: str) -> ast.ClassDef | ast.FunctionDef:
    return next(one for one in ast.walk(tree) if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == name)


def _lines(tree: ast.AST, name: str) -> int:
    node = _node(tree, name)
    return (node.end_lineno or node.lineno) - node.lineno + 1


def risen() -> dict[str, tuple[int, int]]:
    """Counts above the recorded ones: recorded, now. Lines and files may grow with what the project does."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    now = counts()
    return {name: (recorded[name], now[name]) for name in now if now[name] > recorded[name] and name not in _MAY_RISE}


_MAY_RISE = ("lines of Python outside of tests", "files of compiler and runtime")


def main() -> int:
    """1: a count has risen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the counts of now")
    if parser.parse_args().write:
        RECORD.write_text(json.dumps(counts(), indent=2) + "\n", encoding="utf-8")
    recorded = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    for name, number in counts().items():
        print(f"{name:<36} {number:>7,} (recorded {recorded.get(name, 0):,})")
    return int(bool(recorded) and bool(risen()))


if __name__ == "__main__":
    sys.exit(main())
