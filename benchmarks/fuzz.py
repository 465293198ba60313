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
import contextlib
import gc
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fuzzing.attack import Attack, bound_memory
from fuzzing.kinds import CORPUS, Kind, all_kinds

BATCH = 50_000
"""Mutants of one process, and of one draw from the schemas: both take seconds."""

_MEMORY = Path("/dev/shm")


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


def work(options: argparse.Namespace) -> None:
    """The mutants of a batch in this process; prints what failed, and at last the sums by kind."""
    left = [*range(options.first, options.first + options.mutants)][::-1]
    signal.signal(signal.SIGTERM, lambda *_: left.clear())
    folder = options.work
    attack = Attack(folder, chosen_kinds(options.kinds, options.made, options.corpus, options.first))
    sums: dict[str, dict[str, Any]] = {}
    now = folder / "now"
    bounded = False
    while left:
        seed = left.pop()
        now.write_text(str(seed), encoding="utf-8")
        kind, end = attack.run(seed, options.keep)
        if not bounded:
            bound_memory()
            gc.freeze()  # what is imported stays
            bounded = True
        own = sums.setdefault(
            kind.name, {"mutants": 0, "refused": 0, "seconds": 0.0, "longest": 0.0, "growth": 0, "failed": 0}
        )
        own["mutants"] += 1
        own["refused"] += end.code != 0
        own["seconds"] += end.seconds
        own["longest"] = max(own["longest"], end.seconds)
        own["growth"] = max(own["growth"], end.growth_bytes)
        if end.failure is not None:
            own["failed"] += 1
            print(json.dumps({"failure": end.failure.to_json()}), flush=True)
    print(json.dumps({"sums": sums}), flush=True)


def run_all(options: argparse.Namespace) -> int:
    """All mutants in processes of their own, a few at a time; the number of failures."""
    root = Path(tempfile.mkdtemp(prefix="parcompile-fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None))
    keep = options.keep or root / "failed"
    chosen_kinds(options.kinds, root / "made", options.corpus, options.seed * 10**9)
    seeds = [(first, min(BATCH, options.mutants - first)) for first in range(0, options.mutants, BATCH)]
    running: list[tuple[subprocess.Popen[str], Path, int, int]] = []
    lines: list[Mapping[str, Any]] = []
    began = time.monotonic()

    def stop(*_: object) -> None:
        seeds.clear()
        for process, *_ in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    signal.signal(signal.SIGTERM, stop)
    while seeds or running:
        while seeds and len(running) < options.jobs:
            first, count = seeds.pop(0)
            folder = root / str(first)
            folder.mkdir()
            words = [sys.executable, __file__, "--work", str(folder), "--first", str(options.seed * 10**9 + first)]
            words += ["--mutants", str(count), "--keep", str(keep), "--corpus", str(options.corpus)]
            words += ["--made", str(root / "made")]
            words += ["--kinds", *options.kinds] if options.kinds else []
            with (folder / "lines").open("w", encoding="utf-8") as stream, (folder / "errors").open("w") as errors:
                running.append((subprocess.Popen(words, stdout=stream, stderr=errors, text=True), folder, first, count))
        time.sleep(0.2)
        for one in [one for one in running if one[0].poll() is not None]:
            running.remove(one)
            process, folder, first, count = one
            found = [json.loads(line) for line in (folder / "lines").read_text(encoding="utf-8").splitlines()]
            lines += found
            for line in found:
                if "failure" in line:
                    print(json.dumps(line["failure"]), file=sys.stderr)
            if process.returncode and not (folder / "now").is_file():
                sys.exit((folder / "errors").read_text(encoding="utf-8"))  # before the first mutant
            if process.returncode:
                lines.append({"failure": _death(folder, process.returncode)})
                last = int((folder / "now").read_text(encoding="utf-8") or 0) - options.seed * 10**9
                if first <= last < first + count - 1:
                    seeds.insert(0, (last + 1, first + count - 1 - last))
            shutil.rmtree(folder, ignore_errors=True)
            done = sum(each["mutants"] for line in lines if "sums" in line for each in line["sums"].values())
            print(f"{done:,} mutants, {time.monotonic() - began:.0f} s", file=sys.stderr)
    failures = [line["failure"] for line in lines if "failure" in line]
    print(table([line["sums"] for line in lines if "sums" in line]))
    print(places(failures))
    if failures:
        print(f"the files are in {keep}")
    else:
        shutil.rmtree(root, ignore_errors=True)
    return len(failures)


def _death(folder: Path, code: int) -> dict[str, Any]:
    """What there is to say of a process that did not reach its end."""
    seed = (folder / "now").read_text(encoding="utf-8")
    last = (folder / "errors").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    return {
        "kind": "?",
        "seed": int(seed or 0),
        "words": [],
        "what": f"the process died ({code})",
        "place": "",
        "message": " ".join(last)[:300],
        "kept": "",
    }


def table(sums: Iterable[Mapping[str, Mapping[str, Any]]]) -> str:
    """The table of `benchmarks/README.md`."""
    whole: dict[str, dict[str, Any]] = {}
    for name, own in (pair for one in sums for pair in one.items()):
        _add(whole.setdefault(name, {}), own)
    rows = [
        "| files | mutants | refused | failed | ms each | longest s | most growth MB |",
        "|---|---|---|---|---|---|---|",
    ]
    total: dict[str, Any] = {"mutants": 0, "refused": 0, "failed": 0, "seconds": 0.0, "longest": 0.0, "growth": 0}
    for name, own in sorted(whole.items()):
        rows.append(_row(name, own))
        _add(total, own)
    return "\n".join([*rows, _row("all", total)])


def _add(into: dict[str, Any], own: Mapping[str, Any]) -> None:
    for key, value in own.items():
        into[key] = max(into.get(key, 0), value) if key in ("longest", "growth") else into.get(key, 0) + value


def _row(name: str, own: Mapping[str, Any]) -> str:
    each = 1000 * own["seconds"] / max(1, own["mutants"])
    counts = f"{own['mutants']:,} | {100 * own['refused'] / max(1, own['mutants']):.0f} % | {own['failed']:,}"
    return f"| {name} | {counts} | {each:.1f} | {own['longest']:.1f} | {own['growth'] / 2**20:.0f} |"


def places(failures: Iterable[Mapping[str, Any]]) -> str:
    """Failures by what they are and where, the most frequent first, each with one seed and its message."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
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
    line = [word.replace("@", str(kind.path(folder, base))).replace("%", str(folder / kind.name)) for word in words]
    print(f"parcompile {' '.join(line)}", flush=True)
    return subprocess.run([sys.executable, "-m", "parcompile", *line], check=False).returncode


def main() -> int:
    """0 when nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="Processes at a time.")
    parser.add_argument("--kinds", nargs="*", default=[], help="Kinds of files. Default: all.")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="Folder with ds/, megatron/, neox/ and hf/.")
    parser.add_argument("--keep", type=Path, help="Folder for the files that fail.")
    parser.add_argument("--again", type=int, metavar="SEED", help="Only this mutant, as it was reported.")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--made", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.again is not None:
        return again(options.again, options.kinds, options.corpus)
    if options.work:
        work(options)
        return 0
    return int(bool(run_all(options)))


if __name__ == "__main__":
    sys.exit(main())
