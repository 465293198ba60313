"""Writes tests/compiler/megatron_verdicts.json: what Megatron-LM itself says of arguments that we write.

    PARCOMPILE_MEGATRON=FOLDER python .ci/generate/megatron_verdicts.py [--check]

FOLDER holds Megatron-LM's sources at the version that `compiler/backends/megatron/write.py` names. Specs of every model
type are drawn, compiled and written as arguments; its parser and checks judge them, and it builds the model that they
describe, whose parameters are counted. The file keeps a spec with its arguments and the verdict, so that the tests
notice arguments that nobody has judged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / ".ci"), str(ROOT / "tests" / "compiler")]

from decoder_cases import FAMILIES, compiled, specs  # noqa: E402 -- the paths come first
from upstream.megatron_lm import VARIABLE, Judge  # noqa: E402

from parcompile.backends.megatron.write import MEGATRON_VERSION, arguments, as_list, losses  # noqa: E402

OUTPUT = ROOT / "tests" / "compiler" / "megatron_verdicts.json"
PER_FAMILY = 6


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true", help="Compare with the file, and write nothing.")
    check = options.parse_args().check
    folder = os.environ.get(VARIABLE)
    if not folder:
        print(f"{VARIABLE} names no folder with Megatron-LM's sources", file=sys.stderr)
        return 2
    with Judge(Path(folder)) as judge:
        cases = [judged(judge, tree, words) for tree, words in drawn()]
    table = {"megatron_version": MEGATRON_VERSION, "cases": cases}
    text = "{\n" + f' "megatron_version": "{MEGATRON_VERSION}",\n "cases": [\n  '
    text += ",\n  ".join(json.dumps(case) for case in table["cases"]) + "\n ]\n}\n"
    if check:
        return int(OUTPUT.read_text(encoding="utf-8") != text)
    OUTPUT.write_text(text, encoding="utf-8")
    refused = [case for case in cases if not case["accepted"]]
    print(f"{len(cases)} cases, {len(refused)} refused", file=sys.stderr)
    for case in refused:
        print(case["message"], json.dumps(case["spec"]), file=sys.stderr)
    return 0


def drawn() -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Specs that compile and that Megatron-LM can express, the same ones on every run."""
    for name in FAMILIES:
        yield from drawn_of(name)


def drawn_of(name: str) -> list[tuple[dict[str, Any], list[str]]]:
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}

    @hypothesis.settings(
        max_examples=20 * PER_FAMILY,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(specs((name,), of_routers=True))
    def collect(tree: dict[str, Any]) -> None:
        plan = compiled(tree) if len(found) < PER_FAMILY else None
        if plan is not None and not any(loss.fatal for loss in losses(plan)):
            words = as_list(arguments(plan))
            found.setdefault(hashlib.sha256(" ".join(words).encode()).hexdigest(), (tree, words))

    collect()
    return list(found.values())


def judged(judge: Judge, tree: dict[str, Any], words: list[str]) -> dict[str, Any]:
    verdict = judge.verdict(words, 16)
    case = {"spec": tree, "arguments": words, "accepted": verdict["accepted"], "message": verdict.get("message", "")}
    try:
        return {**case, "parameters": judge.parameters(words)}
    except RuntimeError:
        # Latent attention has no layers that a machine without a GPU builds.
        return {**case, "parameters": None}


if __name__ == "__main__":
    sys.exit(main())
