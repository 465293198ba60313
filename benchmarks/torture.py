"""Kills compile, training, saving, resuming and converting at random moments, and compares what is left.

    DS_ACCELERATOR=cpu python benchmarks/torture.py --minutes 10 --seed 1

- compile: two specs are compiled into one folder by turns. After each kill the folder holds one whole set of files: its
  plan can be read, and `parcompile SPEC --check` agrees for one of the two.
- training: `examples/train.py` saves every step and is killed with all its ranks, again and again, until it is through.
  Its metrics are those of a run that nobody touched, to the bit.
- convert: a checkpoint is converted; what was killed is started anew. The result has the hashes of a conversion that
  nobody touched.
- readers: two compilations take turns in one folder, alone or beside another file, while readers ask for the plan and
  its files. All that a reader gets is of one of the two plans; so is what is left at the end, with the other file.
- editor: a program appends lines to a spec, quickly or slowly, while `check --fix` mends it. No line is lost.

A kill comes at a random moment of up to 1.1 times what the program takes untouched on this machine. What needs no
chance is tested: pending sets and links that somebody planted (`tests/compiler/test_atomic.py`), second jobs
(`tests/runtime/test_checkpoint_faults.py`) and stopped ranks (`tests/runtime/test_stopped_ranks.py`).
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness import BIN, ROOT, free_port, heads, parsed, row, run_for

from parcompile.atomic import read_set
from parcompile.plan import load_plan

STEPS = 8


class Broken(Exception):  # noqa: N818 -- it is a finding
    """Something was lost."""


def parcompile(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "parcompile", *map(str, words)]


def train(plan: Path, output: Path) -> list[str]:
    words = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", free_port(), str(ROOT / "examples/train.py")]
    words += ["--plan", str(plan), "--output", str(output), "--steps", str(STEPS)]
    return [*words, "--checkpoint-every", "1", "--resume", "auto"]


def started(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """A command whose output nobody reads."""
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Torture:
    """The three programs, and what each run of them must leave."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.kills = dict.fromkeys(ATTACKS, 0)
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

    def _until_through(self, program: str, name: str, words: Callable[[Path], list[str]]) -> Path:
        """The output of a program that is killed at random moments, and started anew until it is through."""
        output = self.folder / name
        shutil.rmtree(output, ignore_errors=True)
        while run_for(words(output), self._moment(program)) is None:
            self.kills[program] += 1
        return output

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
        output = self._until_through("training", "parts", functools.partial(train, self.plans[0]))
        if self._metrics(output) != self.expected:
            raise Broken(f"{output}: the metrics are not those of the run that nobody touched")
        self._finish(parcompile("checkpoint", "verify", output / "checkpoints"))

    def convert(self) -> None:
        """One conversion that is killed until it is through."""
        output = self._until_through("convert", "again", self._convert)
        if self._hashes(output) != self.hashes:
            raise Broken(f"{output}: its files are not those of the conversion that nobody touched")
        self._finish(parcompile("checkpoint", "verify", output))

    def readers(self) -> None:
        """Readers of a folder into which two compilations go by turns."""
        out = self.folder / "read"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        if beside := self.chance.random() < 0.5:
            (out / "mine.txt").write_text("mine", encoding="utf-8")
        names = ["ds_config.json", "process_groups.json", "plan.json"]
        wanted = [{name: (plan / name).read_bytes() for name in names} for plan in self.plans]
        self._finish(parcompile(self.specs[0], "-o", out))
        writers = [started(parcompile(spec, "-o", out)) for spec in self.specs * 2]
        while any(one.poll() is None for one in writers):
            found = read_set(out, names)
            self.kills["readers"] += 1
            if found not in wanted:
                raise Broken(f"a reader of {out} has files of two plans")
            load_plan(out)
        codes = [one.returncode for one in writers]
        fits = [run_for(parcompile(spec, "-o", out, "--check"), None) == 0 for spec in self.specs]
        if any(codes) or sum(fits) != 1 or (out / "mine.txt").exists() is not beside:
            raise Broken(f"{out} holds no whole set of one of two compilations (exit codes {codes})")

    def editor(self) -> None:
        """A program that appends lines to a spec while its fixes are saved."""
        file = self.folder / "edited.yaml"
        tree = json.loads(self.specs[0].read_text(encoding="utf-8"))
        file.write_text(
            "\n".join(f"{key}: {json.dumps(value)}" for key, value in {**tree, "version": "1"}.items()) + "\n"
        )
        pause, written = self.chance.choice((0.0005, 0.02, 0.3)), list[str]()
        fixing = started(parcompile("check", "--fix", file))
        while fixing.poll() is None:
            written.append(f"# {len(written)}")
            with file.open("a", encoding="utf-8") as stream:
                stream.write(f"{written[-1]}\n")
            time.sleep(pause)
        self.kills["editor"] += 1
        if [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("# ")] != written:
            raise Broken(f"{file} has lost lines that were appended while it was fixed")


ATTACKS = {"compile": 3, "readers": 1, "editor": 2, "convert": 1, "training": 1}
"""How often each comes in a round."""


def torture(minutes: float, seed: int, names: Sequence[str]) -> int:
    folder = Path(tempfile.mkdtemp(prefix="parcompile-torture-"))
    try:
        victim = Torture(folder, seed)
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            for name in [name for name, count in ATTACKS.items() if name in names for _ in range(count)]:
                getattr(victim, name)()
    except Broken as found:
        print(f"BROKEN after the kills below (kept in {folder}): {found}")
        return 1
    print("nothing was lost; kills and other attacks:")
    heads("attack", "times")
    for name, count in victim.kills.items():
        row(name, count)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    options = parsed(__doc__, minutes=10.0, seed=1, attacks=([*ATTACKS], None, [*ATTACKS]))
    sys.exit(torture(options.minutes, options.seed, options.attacks))
