"""A small Llama trained on two ranks of one thread: the injected engine against DeepSpeed with AutoTP, against
transformers' own tensor parallelism, and against plain DeepSpeed data parallelism.

    python benchmarks/adapter.py [--rounds 7] [--json FILE]

Every engine has two processes of its own, all start from the same weights, and they take turns, step by step, while the
others sleep: each number is from one run. A step trains on the same sequences everywhere, and its first losses have to
agree. "peak" is the most resident memory that a rank has had since before its model was read, during steps;
"start" is from there to an engine that is ready, reading weights and the self-check included.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import torch
from harness import (
    JSON,
    check_losses,
    cpu_spec,
    drawn_model,
    forget_peak,
    heads,
    llama,
    parsed,
    plan_of,
    ratios,
    resident_bytes,
    rotated,
    row,
    spread,
    write_json,
)
from meters import TIMEOUT
from peers.engines import PEERS, Step
from torch import Tensor

from parcompile.runtime.local import LocalWorld

RANKS = 2
MODEL = llama(hidden=512, intermediate=1408, layers=6, vocabulary=4096, positions=512)
SETTINGS = {"batch": 2, "length": 256, "lr": 1e-4}
OURS: dict[str, tuple[dict[str, Any], bool]] = {
    "parcompile, tp 2": ({"tp": 2}, False),
    "parcompile, tp 2, self-check": ({"tp": 2}, True),
    "parcompile, tp 2, sequence parallel": ({"tp": 2, "sequence_parallel": True}, False),
    "parcompile, cp 2": ({"cp": 2}, False),
}
METHODS = [*OURS, *PEERS]
"""The first is what the others are compared with."""


def spec(parallelism: dict[str, Any]) -> dict[str, Any]:
    """The spec of a layout; the learning rate and the batch are those of the peers."""
    batch, micro = SETTINGS["batch"], SETTINGS["batch"] // parallelism.get("dp", 1)
    training = {"sequence_length": SETTINGS["length"], "global_batch_size": batch, "micro_batch_size": micro}
    parallelism = {"make_vocab_size_divisible_by": 8, **parallelism}
    return cpu_spec(MODEL, RANKS, parallelism, **training, optimizer={"lr": SETTINGS["lr"]})


def parcompile(folder: str, parallelism: dict[str, Any], self_check: bool) -> Step:
    """The injected engine."""
    from transformers import AutoModelForCausalLM

    from parcompile.runtime import initialize, load_pretrained, reduce_loss, split_batch

    plan = plan_of(spec(parallelism))
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if self_check:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False)
    else:
        model = load_pretrained(folder, plan)
    engine, *_ = initialize(plan=plan, model=model, self_check=self_check)
    mesh = engine.mesh

    def step(ids: Tensor) -> float:
        mine = ids.chunk(mesh.size("dp"))[mesh.index("dp")]
        loss = engine(**split_batch({"input_ids": mine, "labels": mine}, mesh)).loss
        engine.backward(loss)
        engine.step()
        return reduce_loss(loss, mesh)

    return step


_step: Step
"""On a rank: that of its method."""
_before: int


def start(_: int, method: str, folder: str) -> tuple[float, float]:
    """Makes a method ready on this rank: the seconds of that, and the loss of its first step, which makes states."""
    global _step, _before
    # Engines, and the compilers they try, say much as they start; what goes wrong comes back as an error.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    import deepspeed  # noqa: F401 -- what every method imports counts for none
    import transformers.models.llama  # noqa: F401

    _before, started = resident_bytes(), time.perf_counter()
    _step = parcompile(folder, *OURS[method]) if method in OURS else PEERS[method](folder, SETTINGS)
    return time.perf_counter() - started, step(0)[1]


def step(_: int) -> tuple[float, float]:
    """Seconds and loss."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, MODEL["vocab_size"], (SETTINGS["batch"], SETTINGS["length"]), generator=generator)
    started = time.perf_counter()
    loss = _step(ids)
    return time.perf_counter() - started, loss


def peak(_: int, forget: bool) -> float:
    """The most resident memory above that before the method, since it was forgotten."""
    if forget:
        forget_peak()
    return (resident_bytes(peak=True) - _before) / 1e6


def run(methods: list[str], rounds: int, folder: str) -> list[dict[str, Any]]:
    worlds = {method: LocalWorld(RANKS, process_group=False) for method in methods}
    rows: dict[str, dict[str, Any]] = {}
    for method, world in worlds.items():
        taken, loss = world.run(start, method, folder, timeout=TIMEOUT)[0]
        rows[method] = {"method": method, "seconds": [], "losses": [loss], "start": taken}
        world.run(peak, True)
    for number in range(rounds + 1):
        for method in rotated(list(rows), number):
            one, taken = rows[method], worlds[method].run(step)
            one["losses"].append(taken[0][1])
            if number:
                one["seconds"].append(max(seconds for seconds, _ in taken))
    for method, world in worlds.items():
        rows[method]["peak"] = max(world.run(peak, False))
        world.close()
    check_losses({method: one["losses"] for method, one in rows.items()})
    return list(rows.values())


def main() -> None:
    options = parsed(
        __doc__, rounds=(7, "steps of each engine"), only=(METHODS, "some of the engines", METHODS), json=JSON
    )
    with drawn_model(MODEL) as folder:
        rows = run(options.only, options.rounds, folder)
    write_json(options.json, rows)
    tokens = SETTINGS["batch"] * SETTINGS["length"]
    heads("engine", "tokens/s (quartiles)", "speed of the first / its own", "peak MB", "start s")
    for one in rows:
        rates, share = [tokens / value for value in one["seconds"]], ratios(one["seconds"], rows[0]["seconds"])
        row(one["method"], spread(rates, ".0f"), spread(share), f"{one['peak']:.0f}", f"{one['start']:.2f}")


if __name__ == "__main__":
    main()
