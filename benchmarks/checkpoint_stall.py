"""How long a save keeps training from going on: at once, in the background, and DeepSpeed's own `save_checkpoint`.

    python benchmarks/checkpoint_stall.py [--rounds 7] [--json FILE]

A Llama of 24 million parameters in fp32 on two tensor-parallel ranks of one thread. The ways take turns in one run.
"stall" is the time until `save` returns, as a share of a synchronous save of the same round; "slower steps" is what the
steps that run while the background writes take longer than those of quiet rounds, as a share of the same. "write" is
the file system's own part: the bytes of a rank's files written and brought to the disk, without hashes or
serialisation. DeepSpeed's own neither hashes its files nor brings them to the disk.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adapter import MODEL, RANKS, SETTINGS, spec
from meters import quartiles

from parcompile.pipeline import compile_file
from parcompile.plan import Plan
from parcompile.runtime.local import run_local

STEPS = 3
"""Steps of each round, which the background save runs beside."""


def measure(rank: int, plan: Plan, folder: str, rounds: int) -> dict[str, list[float]]:
    """Seconds by what was measured, one for each round; the slower rank counts."""
    from parcompile.runtime import initialize, split_batch
    from parcompile.runtime.checkpoint import read_note, save, wait_for_save

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    engine, *_ = initialize(plan=plan, self_check=False)
    ids = torch.randint(0, MODEL["vocab_size"], (SETTINGS["batch"], SETTINGS["length"]))
    dist.broadcast(ids, 0)

    def train() -> None:
        for _ in range(STEPS):
            engine.backward(engine(**split_batch({"input_ids": ids, "labels": ids}, engine.mesh)).loss)
            engine.step()

    def plain_write() -> None:
        note = read_note(Path(folder) / "at-once")
        size = sum(size for size, _ in note.files.values()) // RANKS
        with (Path(folder) / f"bytes-{rank}").open("wb") as stream:
            stream.write(bytes(size))
            stream.flush()
            os.fsync(stream.fileno())

    def seconds(work: Callable[[], Any]) -> float:
        dist.barrier()
        started = time.perf_counter()
        work()
        taken = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    found: dict[str, list[float]] = {}
    train()
    for number in range(rounds + 1):
        one = {
            "at once": seconds(lambda number=number: save(engine, f"{folder}/at-once", number, keep=1)),
            "quiet steps": seconds(train),
            "in the background": seconds(
                lambda number=number: save(engine, f"{folder}/later", number, keep=1, wait=False)
            ),
            "steps beside it": seconds(train),
            "rest of the wait": seconds(lambda: wait_for_save(engine)),
            "DeepSpeed's own": seconds(lambda: engine.save_checkpoint(f"{folder}/deepspeed", tag="one")),
            "write": seconds(plain_write),
        }
        if number == 0:  # memory and groups are made once
            found["first in the background"] = [one["in the background"] / one["at once"]]
            continue
        for name, value in one.items():
            found.setdefault(name, []).append(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-stall-"))
    try:
        (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        (folder / "spec.json").write_text(json.dumps(spec({"tp": RANKS})), encoding="utf-8")
        plan, checked = compile_file(folder / "spec.json")
        assert plan is not None, checked.diagnostics
        found = run_local(RANKS, measure, plan, str(folder), options.rounds, timeout=3600)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    whole = found["at once"]

    def share(name: str) -> list[float]:
        return [one / all_ for one, all_ in zip(found[name], whole, strict=True)]

    shares = {
        "`save(…, wait=False)`: stall": share("in the background"),
        "`save(…, wait=False)`: slower steps": [
            beside - quiet for beside, quiet in zip(share("steps beside it"), share("quiet steps"), strict=True)
        ],
        "`save(…, wait=False)`: the first, which reserves memory": found["first in the background"],
        "DeepSpeed's own `save_checkpoint`": share("DeepSpeed's own"),
        "the bytes alone, written": share("write"),
    }
    print(f"| of a synchronous save ({statistics.median(whole):.2f} s) | median (quartiles) |\n|---|---|")
    for name, values in shares.items():
        if len(values) == 1:
            print(f"| {name} | {values[0]:.2f} |")
            continue
        low, middle, high = quartiles(values)
        print(f"| {name} | {middle:.2f} ({low:.2f} … {high:.2f}) |")
    if options.json:
        options.json.write_text(json.dumps({"seconds": found, "shares": shares}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
