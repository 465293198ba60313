"""Layouts per second and seconds of the search, for 8 to 16,384 GPUs.

    python benchmarks/search.py

Each world is searched several times in one process; the median and the range are shown. All targets are allowed, so
that pipelines are enumerated, too.
"""

from __future__ import annotations

import platform
import statistics
import time
from pathlib import Path
from typing import Any

from harness import JSON, parsed, write_json

from parcompile.model.hf_config import shape_from_config
from parcompile.model.presets import presets
from parcompile.searching.ranking import search
from parcompile.searching.space import open_space

WORLDS = {"llama-3-8b": (8, 64, 512, 4096, 16384), "llama-3-70b": (8, 64, 512, 4096, 16384), "deepseek-v3": (512,)}
"""GPUs for each model."""


def spec(model: str, world: int) -> dict[str, Any]:
    return {
        "version": 1,
        "model": {"preset": model},
        "cluster": {"nodes": world // 8, "gpus_per_node": 8, "accelerator": "h100-sxm"},
        "training": {"sequence_length": 8192, "global_batch_size": max(256, world)},
    }


def measure(model: str, world: int, rounds: int) -> dict[str, Any]:
    seconds, busy, layouts = [], [], 0
    shape = shape_from_config(presets()[model].config)
    experts = shape.moe.num_experts if shape.moe else 0
    for _ in range(rounds):
        tree = spec(model, world)
        space = open_space(tree, Path(), executable=False, layers=shape.num_hidden_layers, experts=experts)
        start, worked = time.perf_counter(), time.process_time()
        found = search(space)
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - worked)
        layouts = found.enumerated
    median = statistics.median(seconds)
    return {
        "model": model,
        "gpus": world,
        "layouts": layouts,
        "seconds_median": round(median, 3),
        "seconds_range": [round(min(seconds), 3), round(max(seconds), 3)],
        "processor_seconds_median": round(statistics.median(busy), 3),
        "layouts_per_second": round(layouts / median),
    }


def main() -> None:
    options = parsed(__doc__, rounds=3, json=JSON)
    rows = [measure(model, world, options.rounds) for model, worlds in WORLDS.items() for world in worlds]
    print(f"Python {platform.python_version()}, {platform.machine()}, {options.rounds} rounds")
    for row in rows:
        low, high = row["seconds_range"]
        print(
            f"{row['model']:<12} {row['gpus']:>6} GPUs  {row['layouts']:>6} layouts  {row['seconds_median']:>7.2f} s "
            f"({low:.2f} to {high:.2f})  {row['layouts_per_second']:>6} layouts/s  "
            f"{row['processor_seconds_median']:>6.2f} s of processor"
        )
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
