"""Attacks the command line with damaged files: no traceback, no exit code but 0, 1 and 2, no hang, below 1 GB.

    python benchmarks/fuzz.py --cases 2000 --seed 1

Each case takes a well-formed file (a spec, a DeepSpeed configuration, Megatron-LM arguments, a compiled plan, a model's
configuration, measurements), damages it, and runs a command on it in a process whose memory and time are bounded. What
fails is kept in the folder that is printed, with the command.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
SECONDS = 60
"""For one batch."""
BATCH = 25
"""Cases that one process runs: importing takes longer than a case."""

VALUES = (
    *(None, True, -1, 0, 1.5, 2**31, 2**53, 2**63, 10**30, 1e308, -0.0),
    *("", "auto", "x" * 5000, "\u0000", "\u202e", "../../etc/passwd", "1e400", [], {}, [[]], {"": {}}),
)
DEEP = "[" * 20_000

MEGATRON = "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 512 \\\n"
MEGATRON += (
    "  --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 2 --bf16\n"
)
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
}
SPEC = {
    "version": 1,
    "name": "fuzzed",
    "model": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 1024,
    },
    "cluster": {"nodes": 1, "gpus_per_node": 8, "accelerator": "h100-sxm"},
    "parallelism": {"tp": 2, "cp": 2},
    "training": {"sequence_length": 512, "global_batch_size": 8, "precision": "bf16"},
}


def well_formed(folder: Path) -> dict[str, tuple[Path, list[list[str]]]]:
    """Files by kind, each with the commands that read it; `@` stands for the file."""
    folder.mkdir(parents=True, exist_ok=True)
    spec, deepspeed, plan = folder / "spec.json", folder / "ds.json", folder / "plan"
    spec.write_text(json.dumps(SPEC, indent=1), encoding="utf-8")
    deepspeed.write_text(json.dumps(DEEPSPEED, indent=1), encoding="utf-8")
    (folder / "run.sh").write_text(MEGATRON, encoding="utf-8")
    config = folder / "config.json"
    config.write_text(json.dumps(SPEC["model"], indent=1), encoding="utf-8")
    held = {**SPEC, "model": {"hf_config": "config.json"}}
    (folder / "held.json").write_text(json.dumps(held), encoding="utf-8")
    rows = "model,hf_config,tp,peak_bytes,step_seconds\nx,{},2,1000,0.5\n"
    (folder / "rows.csv").write_text(rows, encoding="utf-8")
    run_command = [sys.executable, "-m", "parcompile", str(spec), "-o", str(plan)]
    subprocess.run(run_command, check=True, capture_output=True)
    output = ["-o", str(folder / "out")]
    return {
        "spec": (spec, [["check", "@"], ["check", "--fix", "@"], ["check", "--format", "sarif", "@"], ["@", *output]]),
        "deepspeed": (deepspeed, [["check", "@"], ["check", "--fix", "--unsafe-fixes", "@"], ["import", "@"]]),
        "megatron": (folder / "run.sh", [["check", "@"], ["import", "@"]]),
        "config": (config, [["check", str(folder / "held.json")], ["estimate", str(folder / "held.json")]]),
        "plan": (plan / "plan.json", [["view", str(plan), *output], ["groups", str(plan), "--rank", "0"]]),
        "lock": (plan / "parcompile.lock.json", [[str(spec), "-o", str(plan)]]),
        "rows": (folder / "rows.csv", [["calibrate", "@"]]),
    }


def damage(data: bytes, chance: random.Random) -> bytes:
    """The text with one to three damages: of its tree, where it is JSON, or of its bytes."""
    for _ in range(chance.randint(1, 3)):
        how: Callable[[bytes, random.Random], bytes] = chance.choice((_tree, _tree, _tree, _bytes, _cut, _deep))
        data = how(data, chance)
    return data


def _tree(data: bytes, chance: random.Random) -> bytes:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(data, chance)
    node = tree
    while isinstance(node, (dict, list)) and node:
        key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
        below = node[key]
        if not isinstance(below, (dict, list)) or not below or chance.random() < 0.3:
            action = chance.random()
            if action < 0.6:
                node[key] = chance.choice(VALUES)
            elif action < 0.8:
                del node[key]
            elif isinstance(node, dict):
                node[f"{key}{chance.choice('sx_ é')}"] = node.pop(key)
            break
        node = below
    return json.dumps(tree).encode()


def _bytes(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + bytes(chance.randrange(256) for _ in range(chance.randint(1, 8))) + data[place:]


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _deep(data: bytes, chance: random.Random) -> bytes:
    return data.replace(b"1", DEEP.encode(), 1) if chance.random() < 0.3 else _bytes(data, chance)


def run_case(folder: Path, seed: int) -> str:
    """Runs one case in this process; returns what is wrong with its end, empty when nothing is."""
    import contextlib
    import io

    from parcompile.cli.main import main

    chance = random.Random(seed)
    kinds = well_formed_files(folder)
    file, commands = kinds[chance.choice(sorted(kinds))]
    before = file.read_bytes()
    file.write_bytes(damage(before, chance))
    words = [word.replace("@", str(file)) for word in chance.choice(commands)]
    arguments, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["parcompile", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        wrong = ""
    except SystemExit as ended:
        wrong = "" if ended.code in (0, 1, 2, None) else f"exit code {ended.code}"
    except BaseException as error:
        wrong = f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        sys.argv = arguments
    if "Traceback" in err.getvalue():
        wrong = "a traceback on standard error"
    if wrong:
        kept = folder / f"failed-{seed}-{file.name}"
        shutil.copyfile(file, kept)
        wrong = f"seed {seed}: parcompile {' '.join(words)} ({kept}): {wrong}"
    file.write_bytes(before)
    return wrong


_FILES: dict[Path, dict[str, tuple[Path, list[list[str]]]]] = {}


def well_formed_files(folder: Path) -> dict[str, tuple[Path, list[list[str]]]]:
    """As `well_formed`, made once."""
    if folder not in _FILES:
        _FILES[folder] = well_formed(folder)
    return _FILES[folder]


def attack(cases: int, seed: int) -> int:
    """Batches of cases in bounded processes; returns how many failed."""
    folder = Path(tempfile.mkdtemp(prefix="parcompile-fuzz-"))
    ends: Counter[str] = Counter()
    began = time.monotonic()
    for first in range(0, cases, BATCH):
        place = folder / str(first)
        words = [sys.executable, __file__, "--batch", str(place), "--seed", str(seed * 10**6 + first)]
        words += ["--cases", str(min(BATCH, cases - first))]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS + 2 * BATCH, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("seed ")]
            if done.returncode and not lines:
                lines = [f"batch of seed {seed * 10**6 + first}: exit code {done.returncode}: {done.stderr[-300:]}"]
        except subprocess.TimeoutExpired:
            lines = [f"batch of seed {seed * 10**6 + first}: a hang"]
        for line in lines:
            print(line)
            ends[line.rpartition(": ")[2][:60]] += 1
        if not lines:
            shutil.rmtree(place, ignore_errors=True)
    print(f"{cases} cases in {time.monotonic() - began:.0f} s, {sum(ends.values())} failed")
    return sum(ends.values())


def run_batch(folder: Path, cases: int, seed: int) -> int:
    """Cases in this process, whose memory is bounded."""
    resource.setrlimit(resource.RLIMIT_AS, (GIB, GIB))
    wrong = [found for one in range(cases) if (found := run_case(folder, seed + one))]
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.batch:
        sys.exit(run_batch(options.batch, options.cases, options.seed))
    sys.exit(int(bool(attack(options.cases, options.seed))))
