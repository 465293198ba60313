"""A Llama in pipeline stages: the engine's step beside the least that its passes can take, DeepSpeed's PipelineEngine
and the schedules of torch.distributed.pipelining, on the same layers and ranks of one thread.

    python benchmarks/pipeline.py [--stages 2 4] [--micro-batches 4 8 16] [--rounds 5] [--json FILE]

Every engine has its own processes, all start from the same weights, and they take turns, step by step, while the others
sleep; their losses have to agree. In every round the kernels of each stage are timed too, without a pipeline and with
as many ranks at a time as there are cores, in processor seconds. From their times comes the ideal: the passes of the
schedule in their order, each begun as soon as its stage is free and its input is there, and no time for anything else;
but never less than all passes together over the number of cores, which bounds stages that share cores. With equal
stages that is max((m + (pp - 1) / v) · t, m · pp · t / cores) with t for all passes of a micro-batch on a rank.

A step is timed until the last pass is through ("passes", what the ideal is for), and with clipping and the optimizer
("whole"). "CPU / kernels" compares processor seconds of all ranks: what the pipeline itself costs. "others" is the
share of the cores that other programs took meanwhile: they lengthen steps, but not the ideal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    JSON,
    check_losses,
    cpu_spec,
    drawn_model,
    heads,
    llama,
    parsed,
    plan_of,
    quartiles,
    ratios,
    rotated,
    row,
    spread,
    write_json,
)
from meters import TIMEOUT
from peers.pipelines import PEERS, Clock, Kernels, MicroBatch, Taken, Train

from parcompile.layout.pipeline import Pass, Schedule
from parcompile.runtime.local import LocalWorld
from parcompile.show.pictures.timeline import laid_out

VIRTUAL = 2
LENGTH, LR, VOCABULARY = 64, 1e-4, 2048
HEAD = {"vocabulary": VOCABULARY, "positions": LENGTH, "tie_word_embeddings": False}
MODELS = {2: llama(1024, 2048, layers=4, **HEAD), 4: llama(512, 1024, layers=8, **HEAD)}
"""By stages."""
OURS = {"parcompile 1F1B": 1, "parcompile interleaved": VIRTUAL}
WORLDS = [["parcompile 1F1B"], ["parcompile interleaved"], ["DeepSpeed PipelineEngine"], ["kernels", *list(PEERS)[1:]]]
"""Engines of DeepSpeed have processes of their own; what is torch's alone shares some."""
PRELOAD = ("torch", "torch.distributed.pipelining", "deepspeed", "transformers.models.llama", "parcompile.runtime")

_trains: dict[str, Train] = {}
_kernels: list[Kernels] = []


def parcompile(folder: str, settings: dict[str, Any], virtual: int) -> Train:
    """The engine of this project."""
    from parcompile.runtime import initialize, load_pretrained, pipeline, split_batch

    parallelism = {"pp": settings["stages"], "num_virtual_stages_per_pipeline_rank": virtual}
    training = {"sequence_length": LENGTH, "global_batch_size": settings["micro_batches"], "micro_batch_size": 1}
    model = MODELS[settings["stages"]]
    plan = plan_of(cpu_spec(model, settings["stages"], parallelism, **training, optimizer={"lr": LR}))
    engine, *_ = initialize(plan=plan, model=load_pretrained(folder, plan), self_check=False)
    clocks: list[Clock] = []
    run = pipeline.Step.run

    def mark(self: pipeline.Step, passes: Sequence[Pass]) -> None:
        run(self, passes)
        clocks[-1].passes_are_through()

    pipeline.Step.run = mark  # type: ignore[method-assign]

    def train(batches: Sequence[MicroBatch], clock: Clock) -> Taken:
        clocks[:] = [clock]
        split = (split_batch({"input_ids": ids, "labels": ids}, engine.mesh) for ids, _ in batches)
        return clock.taken(float(engine.train_batch(split)))

    return train


def micro_batches(count: int) -> list[MicroBatch]:
    """The same for everybody."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(count):
        ids = torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator)
        found.append((ids, torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)))
    return found


def start(rank: int, name: str, folder: str, settings: dict[str, Any]) -> None:
    """On each rank of a world: makes a method ready."""
    logging.disable(logging.WARNING)
    if name in OURS:
        _trains[name] = parcompile(folder, settings, OURS[name])
        return
    if name != "DeepSpeed PipelineEngine" and not dist.is_initialized():
        dist.init_process_group("gloo")
    if name == "kernels":
        _kernels[:] = [Kernels(folder, rank, settings, virtual) for virtual in (1, VIRTUAL)]
    else:
        _trains[name] = PEERS[name](folder, rank, settings)


def step(rank: int, name: str, count: int) -> Taken:  # noqa: ARG001 -- every rank is called with its number
    """One step."""
    batches = micro_batches(count)
    dist.barrier()
    return _trains[name](batches, Clock())


def kernels(rank: int, count: int, cores: int) -> list[list[tuple[float, float]]]:
    """Processor seconds of each of this rank's chunks, forward and backward: for 1F1B, and for the interleaved one."""
    batches, found = micro_batches(count), []
    for which in _kernels:
        for first in range(0, dist.get_world_size(), cores):
            dist.barrier()
            if first <= rank < first + cores:
                found.append(which.seconds(batches, time.thread_time))
    dist.barrier()
    return found


def ideal(schedule: Schedule, times: Sequence[Sequence[tuple[float, float]]], cores: int) -> float:
    """Seconds of the passes of a schedule that wait for nothing but each other; `times` of each rank and chunk."""
    passes = laid_out(schedule, times)
    return max(*(one.stop for one in passes), sum(one.stop - one.start for one in passes) / cores)


def run(stages: int, count: int, rounds: int, cores: int) -> dict[str, Any]:
    """All methods with as many stages and micro-batches."""
    settings = {"stages": stages, "micro_batches": count, "virtual": VIRTUAL, "batch": 1, "lr": LR}
    settings["hidden"] = MODELS[stages]["hidden_size"]
    names = [name for world in WORLDS for name in world if name != "kernels"]
    kinds = "passes", "whole", "cpu_passes", "cpu_whole", "others", "losses"
    found: dict[str, Any] = {"stages": stages, "micro_batches": count}
    found |= {"methods": {name: {kind: [] for kind in kinds} for name in names}}
    found |= {figure: {1: [], VIRTUAL: []} for figure in ("ideal", "kernels")}
    with drawn_model(MODELS[stages]) as folder, contextlib.ExitStack() as opened:
        worlds: dict[str, LocalWorld] = {}
        for those in WORLDS:
            world = LocalWorld(stages, process_group=False, start_method="forkserver", preload=PRELOAD)
            worlds |= dict.fromkeys(those, opened.enter_context(world))
        for name in ["kernels", *names]:
            worlds[name].run(start, name, folder, settings, timeout=TIMEOUT)
        for number in range(rounds + 1):
            _one_round(found, worlds, number, cores)
    check_losses({name: one["losses"] for name, one in found["methods"].items()})
    return found


def _one_round(found: dict[str, Any], worlds: Mapping[str, LocalWorld], number: int, cores: int) -> None:
    """Round 0 warms up: optimizer states come into being, shapes become known."""
    stages, count = found["stages"], found["micro_batches"]
    for name in rotated(list(found["methods"]), number):
        figures = found["methods"][name]
        before, began = busy_seconds(), time.perf_counter()
        taken: list[Taken] = worlds[name].run(step, name, count, timeout=TIMEOUT)
        elapsed = time.perf_counter() - began
        figures["losses"].append(next(one.loss for one in reversed(taken) if one.loss is not None))
        if number:
            own = sum(one.cpu_whole for one in taken)
            figures["others"].append(max(0.0, (busy_seconds() - before - own) / (elapsed * cores)))
            figures["passes"].append(max(one.passes for one in taken))
            figures["whole"].append(max(one.whole for one in taken))
            figures["cpu_passes"].append(sum(one.cpu_passes for one in taken))
            figures["cpu_whole"].append(own)
    times = worlds["kernels"].run(kernels, min(count, 8), cores, timeout=TIMEOUT)
    if number:
        for which, virtual in enumerate((1, VIRTUAL)):
            of_ranks = [rank[which] for rank in times]
            found["ideal"][virtual].append(ideal(Schedule(stages, count, virtual), of_ranks, cores))
            found["kernels"][virtual].append(count * sum(sum(both) for rank in of_ranks for both in rank))


def busy_seconds() -> float:
    """Processor seconds of all programs on this machine, since it started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, irq, softirq, steal = (int(one) for one in fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def show_speeds(found: Mapping[str, Any]) -> None:
    methods = found["methods"]
    for name, one in methods.items():
        virtual = VIRTUAL if "nterleaved" in name else 1
        ours, ideals = methods[next(one for one, size in OURS.items() if size == virtual)], found["ideal"][virtual]
        row(
            *(found["stages"], found["micro_batches"], name, f"{quartiles(one['passes'])[1]:.2f}"),
            spread(ratios(ideals, one["passes"])),
            *(spread(ratios(one[what], ours[what])) for what in ("passes", "whole")),
            spread(ratios(one["cpu_passes"], found["kernels"][virtual])),
            f"{quartiles(one['others'])[1]:.0%}",
        )


def main() -> None:
    options = parsed(
        __doc__,
        stages=([*MODELS], None, [*MODELS]),
        micro_batches=[4, 8, 16],
        rounds=(5, "steps of each engine"),
        json=JSON,
    )
    cores = len(os.sched_getaffinity(0))
    columns = "passes s", "ideal / passes", "passes / ours", "whole / ours", "CPU / kernels", "others"
    print(f"{cores} cores\n")
    heads("stages", "m", "engine", *columns)
    results = []
    for stages in options.stages:
        for count in options.micro_batches:
            results.append(run(stages, count, options.rounds, cores))
            show_speeds(results[-1])
            write_json(options.json, results)


if __name__ == "__main__":
    main()
