"""Runs advisories on the version that has the defect and on the one that fixed it, and prints docs/historical_pairs.md.

    OMP_NUM_THREADS=1 python .ci/historical_pairs.py [A203 ...] [--folder FOLDER] > docs/historical_pairs.md

Each pair has two throw-away interpreters: virtual environments in `--folder` in which the packages that pairs.json
names stand in front of those of this interpreter, so that torch is not downloaded again. A pair runs a cell of
`parcompile prove`, or a script of `.ci/pairs/` that imports upstream alone and prints what it measured beside what is
right. Results are kept in `.ci/pairs/results.json`; pairs that are named run again, and without names those that have
no result. The exit code is 1 where a pair is not red on the affected version, or not equal on the fixed one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAIRS = Path(__file__).with_name("pairs")
RESULTS = PAIRS / "results.json"
SECONDS = 240.0
START = """# Historical pairs

Known defects, run again: an [advisory](prove.md)'s cell on a version that has the defect, and on one without it. A
cell that is red before and equal after shows the defect. `python .ci/historical_pairs.py > docs/historical_pairs.md`
installs both versions into throw-away interpreters, runs what is missing, and writes this page. *prove* is a cell of
`parcompile prove`; a script of `.ci/pairs/` imports upstream alone, and prints what it measured beside what is right.
Differences are relative. `.ci/pairs/pairs.json` names the packages of each interpreter.
"""


def main() -> int:
    """The page on standard output, what goes on on the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("advisories", nargs="*", help="these of pairs.json run again")
    parser.add_argument("--folder", type=Path, help="keeps the interpreters; without it they are removed at the end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as passing:
        results, known = _run_pairs(options.advisories, options.folder or Path(passing))
    print(page(results, known))
    return int(any(not proves(result) for result in results.values()))


def _run_pairs(named: Sequence[str], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """All results, and advisories by their name."""
    from parcompile.lint.advisories import advisories

    pairs = json.loads((PAIRS / "pairs.json").read_text(encoding="utf-8"))
    if unknown := set(named) - set(pairs):
        raise SystemExit(
            f"{', '.join(sorted(unknown))}: not in {PAIRS / 'pairs.json'}; write the packages of both versions there"
        )
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    known = {advisory.id: advisory for advisory in advisories()}
    for name in named or [name for name in pairs if name not in results]:
        results[name] = []
        for packages in pairs[name]:
            result = _measured(known[name].tool, known[name].cell, interpreter(packages, folder))
            results[name].append({"version": packages[0].partition("==")[2], **result})
            print(name, packages[0], json.dumps(result), file=sys.stderr, flush=True)
        ordered = {key: results[key] for key in pairs if key in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return results, known


def proves(result: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a pair is red on the affected version, and equal on the fixed one where there is one."""
    return [one["verdict"] for one in result] in (["red", "equal"], ["red"])


def page(results: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Of all pairs that ran as they have to."""
    rows = []
    for name, result in results.items():
        if not proves(result):
            continue
        cell = known[name].cell
        features = " ".join(f"{key} {value}" for key, value in cell.items())
        shown = f"`{cell['script']}`" if "script" in cell else f"prove: {features}"
        columns = [f"{one['version']} | {one['of']} {one['difference']:.1e}" for one in result]
        fixed = any(end is not None for _, end in known[name].affected)
        columns += [f"– | {'not on PyPI' if fixed else 'no fix'}"] * (2 - len(columns))
        rows.append(f"| {name} | {known[name].tool} | {known[name].title} | {shown} | {' | '.join(columns)} |")
    both = sum(len(results[name]) == 2 for name in results if proves(results[name]))
    text = (
        f"{len(rows)} advisories were run: {both} pairs of versions, {len(rows) - both} defects without a fix on PyPI."
    )
    head = "| advisory | project | defect | cell or script | affected | off by | fixed | off by |\n" + "|---" * 8 + "|"
    return "\n".join([START, text, "", head, *rows])


def interpreter(packages: Sequence[str], folder: Path) -> Path:
    """One that has these packages in front of those of this interpreter; each is installed once."""
    layers = []
    for package in packages:
        layer = folder / "layers" / package.replace("/", "_")
        if not layer.exists():
            part = layer.with_name(layer.name + ".part")
            _run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--no-build-isolation",
                  "--target", str(part), package])  # fmt: skip
            part.rename(layer)
        layers.append(str(layer.resolve()))
    digest = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:8]
    place = folder / "interpreters" / f"{packages[0]}-{digest}"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=False, symlinks=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "layers.pth").write_text("\n".join([*layers, sysconfig.get_path("purelib")]) + "\n", encoding="utf-8")
    return python


def _measured(tool: str, cell: Mapping[str, Any] | None, python: Path) -> dict[str, Any]:
    """`verdict`, `difference`, what it is a difference `of`; of one that did not run, `why`."""
    assert cell is not None
    if "script" not in cell:
        from parcompile.runtime.prove import Engine, completed

        with Engine(tool, str(python), SECONDS) as engine:
            answer = engine.run(completed(engine.features, cell))
        if "differences" not in answer:
            return {"verdict": answer["verdict"], "of": "", "difference": 0.0, "why": answer["why"]}
        of, difference = max(answer["differences"].items(), key=lambda item: item[1])
        return {"verdict": answer["verdict"], "of": of, "difference": difference}
    script, *arguments = cell["script"].split()
    ranks = cell.get("ranks", 1)
    launched = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    try:
        said = _run([str(python), *launched, str(PAIRS / script), *arguments])
        last = json.loads([line for line in said.splitlines() if line.startswith("{")][-1])
    except (RuntimeError, IndexError, subprocess.TimeoutExpired) as error:
        return {"verdict": "not runnable", "of": "", "difference": 0.0, "why": str(error)[-600:]}
    difference = abs(last["value"] - last["right"]) / max(abs(last["right"]), 1e-30)
    verdict = "equal" if difference <= last["limit"] else "red"
    return {"verdict": verdict, "of": last["of"], "difference": float(f"{difference:.3g}")}


def _run(command: Sequence[str]) -> str:
    clean = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "",
             "HF_HUB_OFFLINE": "1", "DS_BUILD_OPS": "0", "ACCELERATE_USE_CPU": "true"}  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **clean}, cwd="/tmp"
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[-2:])} ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
