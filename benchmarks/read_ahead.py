"""What reading ahead saves of a step, and what reading once for all ranks of a copy does.

    python benchmarks/read_ahead.py [--rounds 9] [--json FILE]

The model and the data of `examples/byte_llama.json` on two tensor-parallel ranks of one thread, 16 samples a step in
four micro-batches. Both ways of a line take turns in one run, `STEPS` steps at a time; given is the time of the one
over that of the other in the same round. A sample waits (it sleeps), or computes (NumPy sorts, which leaves the
interpreter to the training); how long is told as a share of a step of this run without it. "Waits for data" is how long
a step waits for its samples, as a share of it.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from harness import JSON, ROOT, heads, parsed, plan_of, row, spread, write_json
from meters import TIMEOUT
from meters import slowest_seconds as seconds
from torch import Tensor

from parcompile.plan import Plan
from parcompile.runtime.data import PlanLoader
from parcompile.runtime.local import run_local

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
RANKS, STEPS, BATCH, MICRO = 2, 4, 16, 4


class Work(NamedTuple):
    """What a sample of the demo costs beside reading it."""

    waits: float = 0.0
    """Seconds of sleep, as a share of a step for all samples of a step."""
    computes: float = 0.0
    """Seconds of NumPy, likewise."""


class Way(NamedTuple):
    """How a loader reads."""

    ahead: bool = True
    once: bool = False


CASES = {
    "ahead / when due: samples wait 90 % of a step": (Work(waits=0.9), Way(), Way(ahead=False)),
    "ahead / when due: samples wait 50 % of a step": (Work(waits=0.5), Way(), Way(ahead=False)),
    "ahead / when due: samples compute 50 % of a step": (Work(computes=0.5), Way(), Way(ahead=False)),
    "ahead / when due: the demo": (Work(), Way(), Way(ahead=False)),
    "once / on every rank: samples compute 90 % of a step": (Work(computes=0.9), Way(once=True), Way()),
    "once / on every rank: samples compute 50 % of a step": (Work(computes=0.5), Way(once=True), Way()),
    "once / on every rank: the demo": (Work(), Way(once=True), Way()),
}
"""The work of samples, and the two ways that are compared."""


class Costly:
    """The samples of a data set, at a price."""

    def __init__(self, data: Sequence[Tensor], wait_seconds: float, sorts: int) -> None:
        self._data, self._wait, self._sorts = data, wait_seconds, sorts

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Tensor:
        if self._wait:
            time.sleep(self._wait)
        for _ in range(self._sorts):
            np.sort(NUMBERS)
        return self._data[index]


NUMBERS = np.random.default_rng(0).random(2000)


def measure(_: int, plan: Plan, rounds: int) -> dict[str, Any]:
    """By case: ratios of all rounds, and the share of a step that the first way waits."""
    from corpus import StandardLibrary

    from parcompile.runtime import initialize

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    engine, *_ = initialize(plan=plan, self_check=False)
    text = StandardLibrary(plan.spec.training.sequence_length, 0)

    plain = iter(PlanLoader(text, engine.mesh))
    step = statistics.median(seconds(lambda: engine.train_batch(plain)) for _ in range(12))
    sort = statistics.median(seconds(lambda: np.sort(NUMBERS), 50) for _ in range(9))
    runs: dict[str, list[Any]] = {}
    for name, (work, *ways) in CASES.items():
        data = Costly(text, work.waits * step / BATCH, round(work.computes * step / BATCH / sort))
        for way in ways:
            loader = PlanLoader(data, engine.mesh)
            loader.reads_ahead, loader.reads_once = way
            runs.setdefault(name, []).append(iter(loader))
    found: dict[str, Any] = {name: {"ratios": [], "waits": []} for name in CASES}

    def turn(batches: Any) -> tuple[float, float]:
        waited = 0.0

        def timed() -> Any:
            nonlocal waited
            started = time.perf_counter()
            first = next(batches)
            waited += time.perf_counter() - started
            yield first
            for _ in range(BATCH // MICRO - 1):
                yield next(batches)

        engine.train_batch(timed())  # what was read while others had their turn
        waited = 0.0
        taken = seconds(lambda: engine.train_batch(timed()), STEPS)
        return taken, waited / STEPS / taken

    for number in range(rounds + 1):
        for name, pair in runs.items():
            times = {}
            for place in (0, 1) if number % 2 else (1, 0):
                times[place] = turn(pair[place])
            if number:
                found[name]["ratios"].append(times[0][0] / times[1][0])
                found[name]["waits"].append(times[0][1])
    return {"step": step, "cases": found}


def main() -> None:
    options = parsed(__doc__, rounds=9, json=JSON)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    tree = json.loads((EXAMPLES / "byte_llama.json").read_text(encoding="utf-8"))
    tree["cluster"]["gpus_per_node"], tree["parallelism"] = RANKS, {"tp": RANKS}
    tree["training"] |= {"global_batch_size": BATCH, "micro_batch_size": MICRO}
    load = os.getloadavg()[0]
    found = run_local(RANKS, measure, plan_of(tree), options.rounds, timeout=TIMEOUT)[0]
    print(f"a step: {found['step']:.3f} s; load before and after: {load:.1f}, {os.getloadavg()[0]:.1f}")
    heads("", "time (quartiles)", "waits for data")
    for name, case in found["cases"].items():
        row(name, spread(case["ratios"]), f"{statistics.median(case['waits']):.1%}")
    write_json(options.json, found)


if __name__ == "__main__":
    main()
