"""A small Llama trained on two ranks of one thread: the injected engine against DeepSpeed with AutoTP, against
transformers' own tensor parallelism, and against plain DeepSpeed data parallelism.

    python benchmarks/adapter.py [--rounds 7] [--json FILE]

Every engine has two processes of its own, all start from the same weights, and they take turns, step by step, while the
others sleep: each number is from one run. A step trains on the same sequences everywhere, and its first losses have to
agree. "peak" is the most resident memory that a rank has had since before its model was read, during steps;
"start" is from there to an engine that is ready, reading weights included; of it, "injection" and, where it is asked
for, the self-check.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing as mp
import os
import socket
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from peers.engines import PEERS, Step
from torch import Tensor

RANKS = 2
MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}
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
    return {
        "version": 1,
        "name": "adapter",
        "model": {"hf_config": "config.json"},
        "cluster": {"gpus_per_node": RANKS, "accelerator": "cpu"},
        "parallelism": {"make_vocab_size_divisible_by": 8, **parallelism},
        "training": {
            "sequence_length": SETTINGS["length"],
            "global_batch_size": SETTINGS["batch"],
            "micro_batch_size": SETTINGS["batch"] // parallelism.get("dp", 1),
            "precision": "fp32",
            "optimizer": {"lr": SETTINGS["lr"]},
        },
    }


def parcompile(folder: str, parallelism: dict[str, Any], self_check: bool, notes: dict[str, float]) -> Step:
    """The injected engine."""
    from transformers import AutoModelForCausalLM

    from parcompile.pipeline import compile_file
    from parcompile.runtime import initialize, load_pretrained, reduce_loss, split_batch
    from parcompile.runtime.engine import initialization as module

    file = Path(folder) / f"spec-{os.getpid()}.json"
    file.write_text(json.dumps(spec(parallelism)), encoding="utf-8")
    plan, checked = compile_file(file)
    assert plan is not None, checked.diagnostics
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if self_check:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False)
        for name in ("__init__", "compare"):
            setattr(module.SelfCheck, name, timed(getattr(module.SelfCheck, name), notes, "self-check"))
        module.inject = timed(module.inject, notes, "injection")
    else:
        from parcompile.runtime.inject import loading

        loading.inject = timed(loading.inject, notes, "injection")
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


def timed(function: Callable[..., Any], notes: dict[str, float], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            notes[name] = notes.get(name, 0.0) + time.perf_counter() - start

    return run


def memory(key: str) -> float:
    """Megabytes of this process: VmRSS now, or VmHWM, the most since `forget_peak`."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(key))
    return int(line.split()[1]) * 1024 / 1e6


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def work(method: str, rank: int, port: int, folder: str, pipe: Connection) -> None:
    """A rank of a method: starts, says so, and makes one step for each message."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        torch.set_num_threads(1)
        # Engines, and the compilers they try, say much as they start; what goes wrong comes through the pipe.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        import deepspeed  # noqa: F401 -- what every method imports counts for none
        import transformers.models.llama  # noqa: F401

        ids = torch.randint(0, MODEL["vocab_size"], (2, SETTINGS["length"]), generator=torch.Generator().manual_seed(1))
        before, start, notes = memory("VmRSS"), time.perf_counter(), {}
        step = parcompile(folder, *OURS[method], notes) if method in OURS else PEERS[method](folder, SETTINGS)
        notes["start"] = time.perf_counter() - start
        losses = [step(ids)]  # optimizer states come into being
        forget_peak()
        pipe.send(notes)
        while pipe.recv():
            start = time.perf_counter()
            losses.append(step(ids))
            pipe.send(time.perf_counter() - start)
        pipe.send({"losses": losses, "peak": memory("VmHWM") - before})
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


class Pair:
    """The two ranks of a method."""

    def __init__(self, method: str, folder: str) -> None:
        context, self.method = mp.get_context("spawn"), method
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.pipes, self.ranks = [], []
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(method, rank, port, folder, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.ranks.append(process)
        self.notes = self.answers()

    def answers(self, timeout: float = 120) -> list[Any]:
        found = []
        for pipe in self.pipes:
            if not pipe.poll(timeout):
                raise SystemExit(f"{self.method}: no answer within {timeout} seconds")
            answer = pipe.recv()
            if isinstance(answer, str):
                raise SystemExit(f"{self.method}:\n{answer}")
            found.append(answer)
        return found

    def step(self) -> float:
        """Seconds, of the slower rank."""
        for pipe in self.pipes:
            pipe.send(True)
        return max(self.answers())

    def finish(self) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(False)
        found = self.answers()
        for rank in self.ranks:
            rank.join(20)
            if rank.is_alive():
                rank.kill()
        return found


def run(methods: list[str], rounds: int, folder: str) -> list[dict[str, Any]]:
    pairs = [Pair(method, folder) for method in methods]
    seconds: dict[str, list[float]] = {pair.method: [] for pair in pairs}
    for number in range(rounds + 1):
        for pair in pairs[number % len(pairs) :] + pairs[: number % len(pairs)]:
            taken = pair.step()
            if number:
                seconds[pair.method].append(taken)
    rows = []
    for pair in pairs:
        ends = pair.finish()
        rows.append(
            {
                "method": pair.method,
                "seconds": seconds[pair.method],
                "losses": ends[0]["losses"],
                "peak": max(end["peak"] for end in ends),
                "notes": pair.notes[0],
            }
        )
    expected = rows[0]["losses"]
    for row in rows:
        error = max(abs(one - other) / other for one, other in zip(row["losses"], expected, strict=True))
        assert error < 1e-3, f"{row['method']} trains something else: losses {row['losses']}, not {expected}"
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    tokens = SETTINGS["batch"] * SETTINGS["length"]
    base = rows[0]["seconds"]
    print(
        "| engine | tokens/s (quartiles) | speed of the first / its own | peak MB | start s | injection s | check s |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        low, middle, high = (tokens / value for value in reversed(quartiles(row["seconds"])))
        ratio = quartiles([own / first for own, first in zip(row["seconds"], base, strict=True)])
        notes = row["notes"]
        parts = (f"{notes[name]:.2f}" if name in notes else "–" for name in ("start", "injection", "self-check"))
        print(
            f"| {row['method']} | {middle:.0f} ({low:.0f} … {high:.0f}) "
            f"| {ratio[1]:.2f} ({ratio[0]:.2f} … {ratio[2]:.2f}) | {row['peak']:.0f} | {' | '.join(parts)} |"
        )


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each engine")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=METHODS, help="some of the engines")
    parser.add_argument("--json", type=Path, help="write every single measurement to this file")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    from transformers import AutoModelForCausalLM, LlamaConfig

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**MODEL)).save_pretrained(folder)
        rows = run(arguments.only, arguments.rounds, folder)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))
    show(rows)


if __name__ == "__main__":
    main()
