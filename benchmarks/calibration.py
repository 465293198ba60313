"""Step times of this machine, predicted from a few of its own runs.

    DS_ACCELERATOR=cpu python benchmarks/calibration.py --ranks 2 --fitted 5 --judged 15 --seed 1

Draws layouts, trains each for a few steps, fits the coefficients of time to the first runs and predicts the others,
which the fit never sees. Three predictions are compared: from this machine's profile alone, from that profile and one
factor for all, and from `parcompile calibrate`. The machine has to be otherwise idle: the first layout runs again at
the end, and how far its two times are apart is printed beside the errors.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import BIN, ROOT, free_port, heads, llama, parsed, row, run_for

from parcompile.cost.calibration import fit_time
from parcompile.cost.measurements import Measurement, read_plain
from parcompile.cost.step import timing
from parcompile.searching.space import Candidate

STEPS = 12
"""The recorder leaves three of them out and takes the median of the others."""
LIMIT_SECONDS = 300
MODEL = llama(hidden=256, intermediate=768, layers=6, vocabulary=4096, positions=4096)


def drawn(chance: random.Random, ranks: int) -> dict[str, Any]:
    """A spec of that many ranks: axes, micro-batches, sequence length and recomputation are drawn."""
    sizes = {"tp": 1, "cp": 1, "pp": 1, "dp": 1}
    left = ranks
    while left > 1:
        sizes[chance.choice(list(sizes))] *= 2
        left //= 2
    micro, passes = chance.choice([(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
    if sizes["pp"] > 1:
        passes = max(passes, sizes["pp"])
    parallelism: dict[str, Any] = dict(sizes)
    if sizes["tp"] > 1:
        parallelism["sequence_parallel"] = chance.random() < 0.5
    if sizes["cp"] > 1:
        parallelism["cp_implementation"] = chance.choice(["ring", "all_gather", "ulysses"])
    return {
        "version": 1,
        "model": MODEL,
        "parallelism": parallelism,
        "training": {
            "sequence_length": chance.choice([256, 512, 1024]),
            "micro_batch_size": micro,
            "global_batch_size": micro * passes * sizes["dp"],
            "precision": "fp32",
            "activation_checkpointing": chance.choice(["none", "none", "full"]),
            "optimizer": {"type": "adamw", "lr": 1e-3},
            "train_steps": STEPS,
        },
    }


def finish(words: Sequence[str], log: Path) -> None:
    """Runs a command.

    Raises:
        SystemExit: it failed, or took too long; its output is printed.
    """
    with log.open("w", encoding="utf-8") as output:
        code = run_for(words, LIMIT_SECONDS, output)
    if code != 0:
        sys.exit(f"exit code {code} of {' '.join(words)}\n{log.read_text(encoding='utf-8')[-3000:]}")


def run(spec: Path, folder: Path) -> Measurement:
    """One run of a spec, as its recorder measured it."""
    shutil.rmtree(folder, ignore_errors=True)
    log = spec.with_suffix(".log")
    finish([sys.executable, "-m", "parcompile", str(spec), "-o", str(folder)], log)
    ranks = str(json.loads(spec.read_text(encoding="utf-8"))["cluster"]["gpus_per_node"])
    script = [str(ROOT / "examples" / "train.py"), "--plan", str(folder), "--checkpoint-every", "0"]
    finish([str(BIN / "deepspeed"), "--num_gpus", ranks, "--master_port", free_port(), *script], log)
    (found,) = read_plain(folder / "measurements.csv")
    return found


def errors(rows: Sequence[Measurement], predict: Callable[[Measurement], float]) -> list[float]:
    """Predicted / measured - 1 of each run."""
    return [predict(one) / (one.step_seconds or 1) - 1 for one in rows]


def report(fitted: Sequence[Measurement], judged: Sequence[Measurement], again: Measurement) -> None:
    own = fit_time(fitted)
    factor = statistics.median((one.step_seconds or 1) / timing(one.work).step.seconds for one in fitted)
    ways: dict[str, Callable[[Measurement], float]] = {
        "profile": lambda one: timing(one.work).step.seconds,
        "profile and one factor": lambda one: factor * timing(one.work).step.seconds,
        "calibrated": lambda one: timing(one.work, own).step.seconds,
    }
    heads("layout", "measured", *ways)
    for rows, how in ((fitted, "fitted"), (judged, "judged")):
        for one in rows:
            own_errors = (f"{errors([one], predict)[0]:+.1%}" for predict in ways.values())
            row(f"{text(one)} ({how})", f"{one.step_seconds:.3f} s", *own_errors)
    for name, predict in ways.items():
        found = sorted(map(abs, errors(judged, predict)))
        mean, middle = statistics.mean(found), statistics.median(found)
        print(f"{name}: mean error {mean:.1%}, median {middle:.1%}, worst {found[-1]:.1%} of {len(found)} judged runs")
    intervals = [timing(one.work, own).interval_seconds for one in judged]
    inside = sum(low <= (one.step_seconds or 0) <= high for one, (low, high) in zip(judged, intervals, strict=True))
    print(f"the calibrated 90 % interval covers {inside} of {len(judged)}")
    first, last = fitted[0].step_seconds or 1, again.step_seconds or 0
    print(f"the first layout at the end of the benchmark: {last / first - 1:+.1%}")


def text(one: Measurement) -> str:
    return f"{Candidate({}, one.work).name}, {one.work.micro_batches} × {one.work.sequence_length} tokens"


def main() -> None:
    ranks = 2, "a power of two, at most the processor's cores"
    options = parsed(__doc__, ranks=ranks, fitted=5, judged=15, seed=1)
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="parcompile-calibration-") as name:
        folder = Path(name)
        machine = folder / "machine.json"
        profile = [sys.executable, "-m", "parcompile", "profile", "--ranks", str(options.ranks), "--seconds", "20"]
        finish([*profile, "-o", str(machine)], folder / "profile.log")
        cluster = {"nodes": 1, "gpus_per_node": options.ranks, "accelerator": str(machine)}
        specs: list[str] = []
        while len(specs) < options.fitted + options.judged:
            spec = json.dumps({**drawn(chance, options.ranks), "cluster": cluster}, sort_keys=True)
            if spec not in specs:
                specs.append(spec)
        found = []
        for index, spec in enumerate([*specs, specs[0]]):
            file = folder / f"{index}.json"
            file.write_text(spec, encoding="utf-8")
            found.append(run(file, folder / "plan"))
            print(f"{index + 1}/{len(specs) + 1}: {text(found[-1])}: {found[-1].step_seconds:.3f} s", file=sys.stderr)
    *rows, again = found
    report(rows[: options.fitted], rows[options.fitted :], again)


if __name__ == "__main__":
    main()
