"""Kills compile, training, saving, resuming and converting at random moments, and compares what is left.

    DS_ACCELERATOR=cpu python benchmarks/torture.py --minutes 10 --seed 1

- compile: two specs are compiled into one folder by turns. After each kill the folder holds one whole set of files: its
  plan can be read, and `parcompile SPEC --check` agrees for one of the two.
- training: `examples/train.py` saves every step and is killed with all its ranks, again and again, until it is through.
  Its metrics are those of a run that nobody touched, to the bit.
- convert: a checkpoint is converted; what was killed is started anew. The result has the hashes of a conversion that
  nobody touched.

A kill comes at a random moment of up to 1.1 times what the program takes untouched on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
STEPS = 8
ENVIRONMENT = {
    **os.environ,
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{BIN}:{os.environ['PATH']}",
}


class Broken(Exception):  # noqa: N818 -- it is a finding
    """Something was lost."""


def run_for(words: Sequence[str], seconds: float | None) -> int | None:
    """Runs a command in a session of its own and kills all of it after that time; None when it was killed."""
    process = subprocess.Popen(
        words, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def parcompile(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "parcompile", *map(str, words)]


def train(plan: Path, output: Path) -> list[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    script = [str(ROOT / "examples" / "train.py"), "--plan", str(plan), "--output", str(output)]
    options = ["--steps", str(STEPS), "--checkpoint-every", "1", "--resume", "auto"]
    return [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", port, *script, *options]


class Torture:
    """The three programs, and what each run of them must leave."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.kills = dict.fromkeys(("compile", "training", "convert"), 0)
        tree = json.loads((ROOT / "examples" / "byte_llama.json").read_text(encoding="utf-8"))
        self.specs = [self._spec("tp2", tree, {"tp": 2}), self._spec("cp2", tree, {"cp": 2})]
        self.plans = [self.folder / f"{spec.stem}-plan" for spec in self.specs]
        for spec, plan in zip(self.specs, self.plans, strict=True):
            compiling = self._finish(parcompile(spec, "-o", plan))
        training = self._finish(train(self.plans[0], folder / "whole"))
        self.expected = self._metrics(folder / "whole")
        converting = self._finish(self._convert(folder / "converted"))
        self.seconds = {"compile": compiling, "training": training, "convert": converting}
        self.hashes = self._hashes(folder / "converted")

    def _spec(self, name: str, tree: Mapping[str, object], parallelism: Mapping[str, int]) -> Path:
        file = self.folder / f"{name}.json"
        cluster = {"nodes": 1, "gpus_per_node": 2, "accelerator": "cpu"}
        file.write_text(json.dumps({**tree, "cluster": cluster, "parallelism": dict(parallelism)}), encoding="utf-8")
        return file

    def _finish(self, words: Sequence[str]) -> float:
        """Runs a command to its end; how many seconds it took."""
        start = time.monotonic()
        code = run_for(words, None)
        if code:
            raise Broken(f"exit code {code} without a kill: {' '.join(words)}")
        return time.monotonic() - start

    def _moment(self, program: str) -> float:
        """When to kill a program, in seconds after its start."""
        return self.chance.uniform(0.1, 1.1) * self.seconds[program]

    def _metrics(self, output: Path) -> list[tuple[float, ...]]:
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return [(row["step"], row["loss"], row["gradient_norm"]) for row in rows]

    def _convert(self, output: Path) -> list[str]:
        return parcompile(
            "checkpoint", "convert", self.folder / "whole/checkpoints", "--to", self.plans[1], "-o", output
        )

    def _hashes(self, output: Path) -> object:
        note = json.loads((output / f"step-{STEPS}" / "parcompile.json").read_text(encoding="utf-8"))
        return note["files"]

    def compile(self) -> None:
        """One kill of a compilation into a folder that holds another plan."""
        out = self.folder / "compiled"
        if run_for(parcompile(self.chance.choice(self.specs), "-o", out), self._moment("compile")) is None:
            self.kills["compile"] += 1
        if out.exists() and not any(run_for(parcompile(spec, "-o", out, "--check"), None) == 0 for spec in self.specs):
            raise Broken(f"{out} is neither of the two plans")

    def training(self) -> None:
        """One run that is killed until it is through."""
        output = self.folder / "parts"
        shutil.rmtree(output, ignore_errors=True)
        while run_for(train(self.plans[0], output), self._moment("training")) is None:
            self.kills["training"] += 1
        if self._metrics(output) != self.expected:
            raise Broken(f"{output}: the metrics are not those of the run that nobody touched")
        self._finish(parcompile("checkpoint", "verify", output / "checkpoints"))

    def convert(self) -> None:
        """One conversion that is killed until it is through."""
        output = self.folder / "again"
        shutil.rmtree(output, ignore_errors=True)
        while run_for(self._convert(output), self._moment("convert")) is None:
            self.kills["convert"] += 1
        if self._hashes(output) != self.hashes:
            raise Broken(f"{output}: its files are not those of the conversion that nobody touched")
        self._finish(parcompile("checkpoint", "verify", output))


def torture(minutes: float, seed: int) -> int:
    folder = Path(tempfile.mkdtemp(prefix="parcompile-torture-"))
    try:
        victim = Torture(folder, seed)
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            for attack in (victim.compile, victim.compile, victim.compile, victim.convert, victim.training):
                attack()
    except Broken as found:
        print(f"BROKEN after the kills below (kept in {folder}): {found}")
        return 1
    print("nothing was lost; kills:", ", ".join(f"{name} {count}" for name, count in victim.kills.items()))
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.exit(torture(options.minutes, options.seed))
