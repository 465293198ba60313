"""How long a save keeps training from going on: at once, in the background, and DeepSpeed's own `save_checkpoint`.

    python benchmarks/checkpoint_stall.py [--rounds 7] [--json FILE]

A Llama of 24 million parameters in fp32 on two tensor-parallel ranks of one thread. The ways take turns in one run.
"stall" is the time until `save` returns, as a share of a synchronous save of the same round. "write" is the file
system's own part: the bytes of a rank's files written and brought to the disk, without hashes or serialisation.
DeepSpeed's own neither hashes its files nor brings them to the disk.
"""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from adapter import MODEL, RANKS, SETTINGS, spec
from harness import JSON, heads, parsed, plan_of, ratios, row, spread, write_json
from meters import slowest_seconds as seconds

from parcompile.plan import Plan
from parcompile.runtime.local import run_local


def measure(rank: int, plan: Plan, folder: str, rounds: int) -> dict[str, list[float]]:
    """Seconds by what was measured, one for each round; the slower rank counts."""
    from parcompile.runtime import initialize, split_batch
    from parcompile.runtime.checkpoint import read_note, save, wait_for_save

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    engine, *_ = initialize(plan=plan, self_check=False)
    ids = torch.randint(0, MODEL["vocab_size"], (SETTINGS["batch"], SETTINGS["length"]))
    dist.broadcast(ids, 0)

    engine.backward(engine(**split_batch({"input_ids": ids, "labels": ids}, engine.mesh)).loss)
    engine.step()  # optimizer states come into being

    def plain_write() -> None:
        note = read_note(Path(folder) / "at-once")
        size = sum(size for size, _ in note.files.values()) // RANKS
        with (Path(folder) / f"bytes-{rank}").open("wb") as stream:
            stream.write(bytes(size))
            stream.flush()
            os.fsync(stream.fileno())

    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        one = {
            "at once": seconds(lambda number=number: save(engine, f"{folder}/at-once", number, keep=1)),
            "in the background": seconds(
                lambda number=number: save(engine, f"{folder}/later", number, keep=1, wait=False)
            ),
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
    options = parsed(__doc__, rounds=7, json=JSON)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    folder = tempfile.mkdtemp(prefix="checkpoint-stall-")
    try:
        found = run_local(RANKS, measure, plan_of(spec({"tp": RANKS})), folder, options.rounds, timeout=3600)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    share = {name: ratios(values, found["at once"]) for name, values in found.items() if len(values) == options.rounds}
    shares = {
        "`save(…, wait=False)`: stall": share["in the background"],
        "`save(…, wait=False)`: the first, which reserves memory": found["first in the background"],
        "DeepSpeed's own `save_checkpoint`": share["DeepSpeed's own"],
        "the bytes alone, written": share["write"],
    }
    heads(f"of a synchronous save ({statistics.median(found['at once']):.2f} s)", "median (quartiles)")
    for name, values in shares.items():
        row(name, f"{values[0]:.2f}" if len(values) == 1 else spread(values))
    write_json(options.json, {"seconds": found, "shares": shares})


if __name__ == "__main__":
    main()
