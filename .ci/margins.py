"""Runs the numeric tests under several instruction sets and lists how near to their limits they came.

    DS_ACCELERATOR=cpu python .ci/margins.py [--isa default avx2 avx512] [--threads 1 2] [--tests FILE …] [-k WORDS]
    python .ci/margins.py --read FOLDER …

The first runs every test file that compares numbers (`tests/runtime/closeness.py`), once for each instruction set that
this processor has and each number of threads, and keeps the records in out/margins/ISA-THREADS. The second reads such
folders. Both write docs/numeric_margins.md. The exit code is 1 when a test failed, and a thin margin fails its test.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS, PAGE, RECORDS = ROOT / "tests", ROOT / "docs" / "numeric_margins.md", ROOT / "out" / "margins"

SETS = {
    "default": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
}
"""ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and MKL_ENABLE_INSTRUCTIONS."""

START = """# Margins of the numeric tests

How near to its limit every numeric test comes. A number is compared with a reference, relative to the reference's norm.
Its limit is what sums in another order cost (1e-5 in fp32, 1e-12 in fp64, others where a test says so), or ten times
what a change of 1e-7 of each weight does to the reference itself, and never more than 1e-3 for that reason
(`tests/runtime/closeness.py`). A test fails where a number uses more than a third of its limit: another processor
rounds otherwise. *Noise* is that change of the reference, where the first limit alone was nearly used up.

The page is written by `python .ci/margins.py` (every numeric test, with `ATEN_CPU_CAPABILITY`, `ONEDNN_MAX_CPU_ISA`,
`MKL_ENABLE_INSTRUCTIONS` and `OMP_NUM_THREADS` set); `tests/runtime/test_instruction_sets.py` runs a sample of it in
the suite. A row is a test with all of its cases that ran, under all of these: {variants}.
"""


def environment(isa: str, threads: int) -> dict[str, str]:
    """Of a process that computes with an instruction set and at most so many threads."""
    aten, onednn, mkl = SETS[isa]
    return {
        **os.environ,
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "OMP_NUM_THREADS": str(threads),
    }


def available() -> list[str]:
    """The instruction sets of this processor, as torch sees them."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    names = [*SETS]
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={key: one for key, one in os.environ.items() if key != "ATEN_CPU_CAPABILITY"},
        capture_output=True,
        text=True,
        check=True,
    )
    best = said.stdout.strip().lower()
    return names[: names.index(best) + 1] if best in names else names[:1]


def numeric_files() -> list[Path]:
    """Test files that judge numbers, or import a module beside them that does."""
    sources = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    judging = re.compile(r"^from closeness import .*(assert_|judge)", re.M)
    reached = [path for path, text in sources.items() if judging.search(text)]
    words = "|".join(sorted(path.stem for path in reached))
    found = {path for path, text in sources.items() if re.search(rf"^from \.?({words}) import ", text, re.M)}
    return sorted(path for path in found.union(reached) if path.name.startswith("test_"))


def run(isa: str, threads: int, tests: list[str], words: str | None) -> tuple[int, Path]:
    """The exit code of pytest, and the folder of its records."""
    folder = RECORDS / f"{isa}-{threads}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "--margins", str(folder), *tests]
    print(f"== {isa}, OMP_NUM_THREADS {threads}", flush=True)
    done = subprocess.run([*command, *(["-k", words] if words else [])], cwd=ROOT, env=environment(isa, threads))
    return done.returncode, folder


def read(folders: list[Path]) -> list[dict[str, Any]]:
    """The records, each with the name of its folder."""
    return [
        {**json.loads(line), "variant": folder.name}
        for folder in folders
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]


def page(records: list[dict[str, Any]]) -> str:
    """One row for each test: its worst case."""
    tests = defaultdict(list)
    for one in records:
        function = one["test"].partition("[")[0].removeprefix("tests/").removeprefix("runtime/")
        if "test_closeness.py" not in function and function:
            tests[function].append(one)
    variants = ", ".join(sorted({one["variant"].replace("-", " with OMP_NUM_THREADS ") for one in records}))
    lines = [
        START.format(variants=variants),
        "| test | comparisons | difference | limit | of it | noise | under |",
        "|---|---|---|---|---|---|---|",
    ]
    for function, found in sorted(tests.items()):
        worst = max(found, key=lambda one: one["difference"] / one["limit"])
        noise = "" if worst["noise"] is None else f"{worst['noise']:.1e}"
        share = worst["difference"] / worst["limit"]
        lines.append(
            f"| `{function}` | {len(found)} | {worst['difference']:.1e} | {worst['limit']:.1e} | {share:.0%} | {noise} "
            f"| {worst['variant']} |"
        )
    compared = sum(map(len, tests.values()))
    return "\n".join([*lines, "", f"{len(tests)} tests, {compared} comparisons.", ""])


def main() -> int:
    """Runs or reads, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", nargs="+", choices=SETS, default=[*SETS])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--tests", nargs="+", help="instead of all that compare numbers; the page is not written")
    parser.add_argument("-k", metavar="WORDS", help="of these tests alone, as pytest takes it; the page is not written")
    parser.add_argument("--read", nargs="+", type=Path, metavar="FOLDER", help="records of runs that are over")
    options = parser.parse_args()
    if options.read:
        PAGE.write_text(page(read(options.read)), encoding="utf-8")
        return 0
    has, codes, folders = available(), [], []
    for isa in options.isa:
        if isa not in has:
            print(f"{isa}: this processor does not have it; left out", flush=True)
            continue
        for threads in options.threads:
            tests = options.tests or list(map(str, numeric_files()))
            code, folder = run(isa, threads, tests, options.k)
            codes.append(code)
            folders.append(folder)
    if folders and not options.tests and not options.k:
        PAGE.write_text(page(read(folders)), encoding="utf-8")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
