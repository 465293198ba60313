"""Damages files of every kind that parcompile reads and runs its commands on them: no traceback, no hang, no flood.

    python benchmarks/fuzz.py --mutants 1000000 --jobs 2 --seed 1
    python benchmarks/fuzz.py --kinds spec "config.json" --mutants 20000
    python benchmarks/fuzz.py --again 4711                 # one mutant, with its traceback

Files are taken from `examples/`, `tests/` and, where they are there, public files of other tools beside the repository.
Each mutant goes through the command line in a process that has imported it already. A mutant fails when it ends with an
exception or an exit code but 0, 1 and 2, takes more than 10 s of processor time, or lets memory grow by more than
300 MB. Failures are printed by the place in the code, and their files kept; the table stands in `benchmarks/README.md`.
A seed and the same files give the same mutants. SIGTERM ends it behind the mutants under way, with the table so far.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fuzzing.attack import Attack, bound_memory
from fuzzing.kinds import CORPUS, Kind, all_kinds
from harness import heads, parsed, row

BATCH = 50_000
"""Mutants of one process, and of one draw from the schemas: both take seconds."""

_MEMORY = Path("/dev/shm")
Line = Mapping[str, Any]
"""What a process tells: a `failure`, and at its end the `sums` by kind."""


def chosen_kinds(names: Sequence[str], made: Path, corpus: Path, first: int) -> list[Kind]:
    """The kinds of these names, or all, with the files of the batch of a seed.

    Raises:
        SystemExit: there is no such kind.
    """
    found = all_kinds(made, corpus, number=first // BATCH)
    known = [one.name for one in found]
    if unknown := sorted(set(names) - set(known)):
        sys.exit(f"there is no kind {', '.join(unknown)}; there are {', '.join(known)}")
    return [one for one in found if not names or one.name in names]


def work(folder: Path, seeds: range, options: argparse.Namespace, made: Path) -> None:
    """The mutants of some seeds, in a process of its own; each line of its file is one of `Line`."""
    with (folder / "errors").open("w", encoding="utf-8") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    left = list(reversed(seeds))
    signal.signal(signal.SIGTERM, lambda *_: left.clear())
    attack = Attack(folder, chosen_kinds(options.kinds, made, options.corpus, seeds.start))
    sums: dict[str, dict[str, Any]] = {}
    with (folder / "lines").open("w", encoding="utf-8") as lines:
        while left:
            seed = left.pop()
            is_first = not sums
            (folder / "now").write_text(str(seed), encoding="utf-8")
            kind, end = attack.run(seed, options.keep)
            if is_first:
                bound_memory()
                gc.freeze()  # what is imported stays
            own = {"mutants": 1, "refused": end.code != 0, "failed": end.failure is not None}
            own |= {"seconds": end.seconds, "longest": end.seconds, "growth": end.growth_bytes}
            _add(sums.setdefault(kind.name, {}), own)
            if end.failure is not None:
                print(json.dumps({"failure": asdict(end.failure)}), file=lines, flush=True)
        print(json.dumps({"sums": sums}), file=lines)


def run_all(options: argparse.Namespace) -> int:
    """All mutants in processes of their own, a few at a time; the number of failures."""
    root = Path(tempfile.mkdtemp(prefix="parcompile-fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None))
    options.keep = options.keep or root / "failed"
    first = options.seed * 10**9
    chosen_kinds(options.kinds, root / "made", options.corpus, first)
    context, running, began = multiprocessing.get_context("spawn"), set[Any](), time.monotonic()
    lines: list[Line] = []
    is_over = False

    def stop(*_: object) -> None:
        nonlocal is_over
        is_over = True
        for process in list(running):
            process.terminate()

    def run(seeds: range) -> None:
        """A process that dies is followed by another one for the seeds behind."""
        while seeds and not is_over:
            folder = root / str(seeds.start)
            folder.mkdir()
            process = context.Process(target=work, args=(folder, seeds, options, root / "made"))
            process.start()
            running.add(process)
            process.join()
            running.discard(process)
            if process.exitcode and not (folder / "now").is_file():
                stop()
                sys.exit((folder / "errors").read_text(encoding="utf-8"))  # before the first mutant
            found = [json.loads(line) for line in (folder / "lines").read_text(encoding="utf-8").splitlines()]
            for line in found:
                if "failure" in line:
                    print(json.dumps(line["failure"]), file=sys.stderr)
            last = int((folder / "now").read_text(encoding="utf-8"))
            if process.exitcode:
                said = (folder / "errors").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
                died = {"what": f"the process died ({process.exitcode})", "message": " ".join(said)[:300]}
                found.append({"failure": {"kind": "?", "seed": last, "words": [], "place": "", "kept": "", **died}})
            lines.extend(found)
            seeds = range(last + 1, seeds.stop) if process.exitcode else seeds[:0]
            shutil.rmtree(folder, ignore_errors=True)
            done = sum(each["mutants"] for line in lines if "sums" in line for each in line["sums"].values())
            print(f"{done:,} mutants, {time.monotonic() - began:.0f} s", file=sys.stderr)

    signal.signal(signal.SIGTERM, stop)
    every = range(first, first + options.mutants)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, (every[start : start + BATCH] for start in range(0, len(every), BATCH))))
    failures = [line["failure"] for line in lines if "failure" in line]
    print_table([line["sums"] for line in lines if "sums" in line])
    print(places(failures))
    if failures:
        print(f"the files are in {options.keep}")
    else:
        shutil.rmtree(root, ignore_errors=True)
    return len(failures)


def print_table(sums: Iterable[Mapping[str, Line]]) -> None:
    """The table of `benchmarks/README.md`."""
    whole: dict[str, dict[str, Any]] = {}
    total: dict[str, Any] = {"mutants": 0, "refused": 0, "failed": 0, "seconds": 0.0, "longest": 0.0, "growth": 0}
    for name, own in (pair for one in sums for pair in one.items()):
        _add(whole.setdefault(name, {}), own)
        _add(total, own)
    heads("files", "mutants", "refused", "failed", "ms each", "longest s", "most growth MB")
    for name, one in [*sorted(whole.items()), ("all", total)]:
        count = max(1, one["mutants"])
        ends = f"{100 * one['refused'] / count:.0f} %", f"{one['failed']:,}"
        times = f"{1000 * one['seconds'] / count:.1f}", f"{one['longest']:.1f}"
        row(name, f"{one['mutants']:,}", *ends, *times, f"{one['growth'] / 2**20:.0f}")


def _add(into: dict[str, Any], own: Line) -> None:
    for key, value in own.items():
        into[key] = max(into.get(key, 0), value) if key in ("longest", "growth") else into.get(key, 0) + value


def places(failures: Iterable[Line]) -> str:
    """Failures by what they are and where, the most frequent first, each with one seed and its message."""
    found: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for one in failures:
        found[one["what"], one["place"]].append(one)
    lines = [f"{sum(map(len, found.values()))} failures at {len(found)} places"]
    for (what, place), ones in sorted(found.items(), key=lambda pair: -len(pair[1])):
        kinds = ", ".join(sorted({one["kind"] for one in ones}))
        words = " ".join(ones[0]["words"])
        lines.append(f"{len(ones):>6} {what} at {place} ({kinds})")
        lines.append(f"       seed {ones[0]['seed']}: {words}: {ones[0]['message']} {ones[0]['kept']}")
    return "\n".join(lines)


def again(seed: int, names: Sequence[str], corpus: Path) -> int:
    """Prints the damaged file of a seed and runs its command, whose traceback is not caught."""
    folder = Path(tempfile.mkdtemp(prefix="parcompile-fuzz-"))
    attack = Attack(folder, chosen_kinds(names, folder / "made", corpus, seed))
    kind, base, words, content = attack.chosen(seed)
    attack.run(seed)
    print(content[:20_000].decode("utf-8", "replace"))
    line = kind.line(folder, base, words)
    print(f"parcompile {' '.join(line)}", flush=True)
    return subprocess.run([sys.executable, "-m", "parcompile", *line], check=False).returncode


def main() -> int:
    """0 when nothing failed."""
    options = parsed(
        __doc__,
        mutants=2000,
        seed=1,
        jobs=(1, "processes at a time"),
        kinds=([], "kinds of files (all)"),
        corpus=(CORPUS, "folder with ds/, megatron/, neox/ and hf/"),
        keep=(Path, "folder for the files that fail"),
        again=(int, "the seed of the only mutant, as it was reported"),
    )
    if options.again is not None:
        return again(options.again, options.kinds, options.corpus)
    return int(bool(run_all(options)))


if __name__ == "__main__":
    sys.exit(main())
