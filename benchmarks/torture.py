"""Kills compile, training, saving, resuming and converting at random moments, and compares what is left.

    DS_ACCELERATOR=cpu python benchmarks/torture.py --minutes 10 --seed 1

- compile: two specs are compiled into one folder by turns. After each kill the folder holds one whole set of files: its
  plan can be read, and `parcompile SPEC --check` agrees for one of the two.
- training: `examples/train.py` saves every step and is killed with all its ranks, again and again, until it is through.
  Its metrics are those of a run that nobody touched, to the bit.
- convert: a checkpoint is converted; what was killed is started anew. The result has the hashes of a conversion that
  nobody touched.
- pair: two compilations start at once into a folder that holds another file. It then holds one of the two plans, whole,
  and the other file.
- readers: two compilations take turns in one folder, alone or beside another file, while readers ask for the plan and
  its files. All that a reader gets is of one of the two plans.
- editor: a program appends lines to a spec, quickly or slowly, while `check --fix` mends it. No line is lost.
- planted: a folder comes with a pending set that names files outside, or is a link. They stay as they are.
- double: a job starts into the output and another on the port of a running one. Both are refused, and the running one
  goes on to the metrics of the run that nobody touched.
- stopped: a rank, or the one that holds the store, is stopped (SIGSTOP) while it trains. The other ends within the
  time-out + 10 s, and names it.

A kill comes at a random moment of up to 1.1 times what the program takes untouched on this machine.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness import BIN, ENVIRONMENT, ROOT, free_port, heads, parsed, row, run_for

from parcompile.atomic import read_set
from parcompile.plan import load_plan

STEPS = 8


class Broken(Exception):  # noqa: N818 -- it is a finding
    """Something was lost."""


def parcompile(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "parcompile", *map(str, words)]


def script(plan: Path, output: Path, steps: int = STEPS) -> list[str]:
    words = [str(ROOT / "examples" / "train.py"), "--plan", str(plan), "--output", str(output)]
    return [*words, "--steps", str(steps), "--checkpoint-every", "1", "--resume", "auto"]


def train(plan: Path, output: Path) -> list[str]:
    return [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", free_port(), *script(plan, output)]


SILENT = 20
"""Seconds of PARCOMPILE_SILENT_TIMEOUT and PARCOMPILE_HANDSHAKE_TIMEOUT where ranks are stopped or refused."""


def ranks(words: Sequence[str], port: str, errors: Path) -> list[subprocess.Popen[str]]:
    """Two ranks without a launcher, which would end one when the other has ended; what they say is in `errors`."""
    errors.mkdir(parents=True, exist_ok=True)
    started = []
    for rank in "01":
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own |= dict.fromkeys(("PARCOMPILE_SILENT_TIMEOUT", "PARCOMPILE_HANDSHAKE_TIMEOUT"), str(SILENT))
        own["PARCOMPILE_HEARTBEAT"] = "1"
        with (errors / rank).open("w", encoding="utf-8") as stream:
            started.append(
                subprocess.Popen(
                    [sys.executable, *words],
                    env={**ENVIRONMENT, **own},
                    stdout=subprocess.DEVNULL,
                    stderr=stream,
                    text=True,
                )
            )
    return started


def started(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """A command whose output nobody reads."""
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for one in processes:
        one.kill()
        one.wait()


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

    def _fresh(self, name: str) -> Path:
        """An empty folder."""
        found = self.folder / name
        shutil.rmtree(found, ignore_errors=True)
        found.mkdir()
        return found

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

    def pair(self) -> None:
        """Two compilations at once into a folder that holds something else."""
        out = self._fresh("shared")
        (out / "mine.txt").write_text("mine", encoding="utf-8")
        both = [started(parcompile(spec, "-o", out)) for spec in self.specs]
        codes = [one.wait() for one in both]
        self.kills["pair"] += 1
        fits = [run_for(parcompile(spec, "-o", out, "--check"), None) == 0 for spec in self.specs]
        if codes != [0, 0] or sum(fits) != 1 or (out / "mine.txt").read_text(encoding="utf-8") != "mine":
            raise Broken(f"{out} holds no whole set of one of two compilations (exit codes {codes})")

    def readers(self) -> None:
        """Readers of a folder into which two compilations go by turns."""
        out = self._fresh("read")
        if self.chance.random() < 0.5:
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
        if any(one.returncode for one in writers):
            raise Broken(f"exit codes {[one.returncode for one in writers]} of compilations into {out}")

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

    def planted(self) -> None:
        """A folder with a pending set that somebody else has made."""
        out, outside = self._fresh("planted"), self._fresh("outside")
        for name in ("victim.txt", "plan.json"):
            (outside / name).write_text("victim", encoding="utf-8")
        pending = out / ".parcompile-new"
        if self.chance.random() < 0.5:
            pending.symlink_to(outside, target_is_directory=True)
        else:
            pending.mkdir()
            (pending / "launch").symlink_to(outside, target_is_directory=True)
        names = ["../outside/victim.txt", "plan.json", "launch/victim.txt", str(outside / "victim.txt")]
        (pending / ".complete").write_text("\n".join(names), encoding="utf-8")
        run_for(parcompile(self.specs[0], "-o", out), None)
        self.kills["planted"] += 1
        held = {one.name: one.read_text(encoding="utf-8") for one in outside.iterdir() if one.name != ".complete"}
        if held != dict.fromkeys(("victim.txt", "plan.json"), "victim"):
            raise Broken(f"{outside}, which {out} only names, holds {held}")

    def double(self) -> None:
        """Jobs that come into the output and onto the port of a running one."""
        output, port = self._fresh("doubled"), free_port()
        first = ranks(script(self.plans[0], output), port, self.folder / "first")
        second: list[subprocess.Popen[str]] = []
        try:
            self._started(output, first)
            for plan, where in ((self.plans[0], free_port()), (self.plans[1], port)):
                second = ranks(script(plan, output), where, self.folder / "second")
                codes = [one.wait(6 * SILENT) for one in second]
                self.kills["double"] += 1
                if 0 in codes and first[0].poll() is None:
                    raise Broken(f"a second job ran beside the first (exit codes {codes})")
            codes = [one.wait(600) for one in first]
            if codes != [0, 0] or self._metrics(output) != self.expected:
                raise Broken(f"a second job has changed the first (exit codes {codes})")
        finally:
            kill([*first, *second])
        self._finish(parcompile("checkpoint", "verify", output / "checkpoints"))

    def stopped(self) -> None:
        """A rank that is stopped while it trains and saves."""
        output, rank, said = self._fresh("stopped"), self.chance.randrange(2), self.folder / "said"
        both = ranks(script(self.plans[0], output, 10_000), free_port(), said)
        try:
            self._started(output, both)
            time.sleep(self.chance.uniform(0, 2))
            both[rank].send_signal(signal.SIGSTOP)
            self.kills["stopped"] += 1
            try:
                code = both[1 - rank].wait(SILENT + 10)
            except subprocess.TimeoutExpired:
                raise Broken(f"rank {1 - rank} goes on though rank {rank} is stopped") from None
            text = (said / str(1 - rank)).read_text(encoding="utf-8", errors="replace")
            if not code or f"rank {rank} on host" not in text:
                raise Broken(f"rank {1 - rank} has not named rank {rank} (exit code {code}): {text[-500:]}")
        finally:
            kill(both)

    def _started(self, output: Path, processes: Sequence[subprocess.Popen[str]]) -> None:
        """Waits for the first step."""
        while not (output / "metrics.jsonl").is_file():
            if any(one.poll() is not None for one in processes):
                raise Broken(f"a job ended before its first step in {output}")
            time.sleep(0.05)


ATTACKS = {
    "compile": 3,
    "pair": 2,
    "readers": 1,
    "editor": 2,
    "planted": 2,
    "stopped": 1,
    "double": 1,
    "convert": 1,
    "training": 1,
}
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
