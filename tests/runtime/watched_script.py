"""A training script that tests interrupt: it trains until it is stopped, and writes a line for each step.

    deepspeed --num_gpus N watched_script.py PLAN FOLDER [FAULT RANK STEP]

A fault is an exception, a lack of memory, a label that is none, or loss values that are no numbers, on one rank at one
step. Of a label that is none the script catches the error (`caught`) or not (`label`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from deepspeed.utils import logger
from training_runs import samples

from parcompile.runtime import Stopped, StopSignals, groups, initialize, load_plan, report_errors
from parcompile.runtime.checkpoint import save


def train(plan_file: str, folder: str, fault: str = "", rank: str = "-1", at_step: str = "-1") -> None:
    logger.setLevel("ERROR")
    plan = load_plan(plan_file)
    data = samples(plan) * 1000
    if fault == "early" and os.environ["RANK"] == rank:
        groups.start_world = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    engine, _, loader, _ = initialize(plan=plan, training_data=data, measurements=False)
    mine = engine.mesh.rank == int(rank)
    stop = StopSignals() if fault == "stops" else None
    (Path(folder) / f"rank-{engine.mesh.rank}").write_text(str(os.getpid()))
    step = 0
    batches = iter(loader)
    while True:
        step += 1
        time.sleep(0.02)
        if mine and step == int(at_step):
            if fault == "exception":
                sys.stderr.write("\r 20%|##   | 3/15 [00:01, loss 4.1]")  # a progress bar
                raise ValueError("this sample is broken")
            if fault == "memory":
                raise torch.OutOfMemoryError("tried to allocate 2 GiB")
            if fault == "disk":
                raise OSError(28, "No space left on device", "samples.bin")
            if fault == "leaves":
                os._exit(3)
        batch = next(batches)
        if mine and step == int(at_step) and fault in ("label", "caught"):
            batch["shift_labels"][0, 1] = 10**6
        loss = engine(**batch).loss
        if fault == "nan" and step >= int(at_step):
            loss = loss * (float("nan") if mine else 1.0)
        engine.backward(loss)
        engine.step()
        (Path(folder) / f"step-{engine.mesh.rank}").write_text(str(step))
        if fault == "nan":
            save(engine, Path(folder) / "checkpoints", step)
        if stop is not None and stop.due(step):
            (Path(folder) / f"stopped-{engine.mesh.rank}").write_text(str(step))
            raise Stopped(f"stopped by {stop.signal} after step {step}")


def main(words: Sequence[str]) -> None:
    """Trains, and catches what is raised where the fault says so."""
    if "caught" not in words:
        with report_errors():
            return train(*words)
    try:
        train(*words)
    except Exception as error:
        print(f"caught by rank {os.environ['RANK']}: {error}", flush=True)  # noqa: T201 -- it is for the test


def forked(folder: Path, *fault: str) -> None:
    """On a rank that `launched.py` has forked, with the plan in its folder."""
    main([str(folder / "plan.json"), str(folder), *fault])


if __name__ == "__main__":
    main([word for word in sys.argv[1:] if not word.startswith("--local_rank")])
