"""Runs the numeric tests under several instruction sets and lists how near to their limits they came.

    DS_ACCELERATOR=cpu python .ci/margins.py [--isa default avx2 avx512] [--threads 1 2] [--tests FILE …] [-k WORDS]
    python .ci/margins.py --read FOLDER …

The first runs every test file that compares numbers (`tests/runtime/closeness.py`), once for each instruction set that
this processor has and each number of threads, and keeps the records in out/margins/ISA-THREADS. The second reads the
records of any runs of `pytest --margins FOLDER`: each says which instruction set and how many threads it had. Both
write docs/numeric_margins.md. The exit code is 1 when a test failed, a margin is thin, or a folder has no records.
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

START = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")


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


def run(isa: str, threads: int, tests: list[str], words: str | None, workers: int = 2) -> tuple[int, Path]:
    """The exit code of pytest, and the folder of its records."""
    folder = RECORDS / f"{isa}-{threads}"
    shutil.rmtree(folder, ignore_errors=True)
    spread = ["-n", str(workers), "--dist", "loadgroup"]
    command = [sys.executable, "-m", "pytest", "-q", *spread, "--margins", str(folder), *tests]
    print(f"== {isa}, OMP_NUM_THREADS {threads}", flush=True)
    done = subprocess.run([*command, *(["-k", words] if words else [])], cwd=ROOT, env=environment(isa, threads))
    return done.returncode, folder


def read(folders: list[Path]) -> list[dict[str, Any]]:
    """The records of some folders, without those of the tests of the comparison, which fail on purpose."""
    return [
        record
        for folder in folders
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if "test_closeness.py" not in (record := json.loads(line))["test"]
    ]


def thin(records: list[dict[str, Any]]) -> list[str]:
    """What uses more than a third of its limit, in words."""
    return [
        f"{one['test']}: {one['what']}: {share(one):.0%} of the limit {one['limit']:.1e} under {one['variant']}"
        for one in records
        if share(one) > 1 / 3
    ]


def share(record: dict[str, Any]) -> float:
    """How much of its limit a comparison uses."""
    return float(record["difference"] / record["limit"])


def page(records: list[dict[str, Any]]) -> str:
    """A row for each instruction set, and one for each test: its worst case."""
    tests, variants = defaultdict(list), defaultdict(list)
    for one in records:
        function = one["test"].partition("[")[0].removeprefix("tests/").removeprefix("runtime/")
        if function:
            tests[function].append(one)
            variants[one["variant"]].append((function, share(one)))
    under = ["| instruction set | threads | tests | comparisons | largest share of a limit |", "|---|---|---|---|---|"]
    for name, compared in sorted(variants.items()):
        isa, _, threads = name.rpartition("-")
        ran, most = len({function for function, _ in compared}), max(one for _, one in compared)
        under.append(f"| {isa} | {threads} | {ran} | {len(compared):,} | {most:.0%} |")
    lines = [
        START.format(variants="\n".join(under)),
        "| test | comparisons | difference | limit | of it | noise | under |",
        "|---|---|---|---|---|---|---|",
    ]
    for function, found in sorted(tests.items()):
        worst = max(found, key=share)
        noise = "" if worst["noise"] is None else f"{worst['noise']:.1e}"
        lines.append(
            f"| `{function}` | {len(found)} | {worst['difference']:.1e} | {worst['limit']:.1e} | {share(worst):.0%} "
            f"| {noise} | {worst['variant']} |"
        )
    ran = {function.partition("::")[0] for function in tests}
    files = [str(path.relative_to(TESTS)).removeprefix("runtime/") for path in numeric_files()]
    without = ", ".join(f"`{name}`" for name in files if name not in ran and name != "test_closeness.py")
    compared = f"{len(tests)} tests, {sum(map(len, tests.values())):,} comparisons."
    return "\n".join([*lines, "", compared, *(["", f"Without a record: {without}."] if without else []), ""])


def write_page(folders: list[Path]) -> int:
    """1 where a margin is thin or a folder has no records."""
    empty = [folder for folder in folders if not any(folder.glob("*.jsonl"))]
    for folder in empty:
        print(f"{folder}: no records of `pytest --margins` in it")
    records = read(folders)
    PAGE.write_text(page(records), encoding="utf-8")
    found = thin(records)
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(empty or found))


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
        return write_page(options.read)
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
        codes.append(write_page(folders))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
