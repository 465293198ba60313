"""Processor seconds of the search, for 8 to 16,384 GPUs.

    python benchmarks/search.py

Each world is searched several times in one process; medians with quartiles are shown. All targets are allowed, so
that pipelines are enumerated, too.
"""

from __future__ import annotations

import platform
import time
from typing import Any

from harness import JSON, heads, parsed, row, spread, write_json

from parcompile.searching.ranking import search
from parcompile.searching.space import open_space
from parcompile.spec.resolve import Resolution

WORLDS = {"llama-3-8b": (8, 64, 512, 4096, 16384), "llama-3-70b": (8, 64, 512, 4096, 16384), "deepseek-v3": (512,)}
"""GPUs for each model."""


def measure(model: str, world: int, rounds: int) -> dict[str, Any]:
    spec = {
        "version": 1,
        "model": {"preset": model},
        "cluster": {"nodes": world // 8, "gpus_per_node": 8, "accelerator": "h100-sxm"},
        "training": {"sequence_length": 8192, "global_batch_size": max(256, world)},
    }
    found: dict[str, Any] = {"model": model, "gpus": world, "processor_seconds": []}
    for _ in range(rounds):
        space = open_space(Resolution(spec), executable=False)
        start = time.process_time()
        found["layouts"] = search(space).enumerated
        found["processor_seconds"].append(time.process_time() - start)
    return found


def main() -> None:
    options = parsed(__doc__, rounds=3, json=JSON)
    rows = [measure(model, world, options.rounds) for model, worlds in WORLDS.items() for world in worlds]
    print(f"Python {platform.python_version()}, {platform.machine()}, {options.rounds} rounds")
    heads("model", "GPUs", "layouts", "processor seconds")
    for one in rows:
        row(one["model"], f"{one['gpus']:,}", f"{one['layouts']:,}", spread(one["processor_seconds"]))
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
