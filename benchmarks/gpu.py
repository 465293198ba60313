"""Everything that only a GPU can show, by one command (`make gpu`); what it finds goes into out/gpu/figures.json.

    python benchmarks/gpu.py [--output out/gpu] [--minutes 8]

1. the tests marked `gpu`: kernels against fp64, packed documents, merges, ranks that share a GPU, no host that waits;
2. every example spec, compiled for one GPU in fp32 and in bf16 and trained for a few steps: the engine on NCCL with a
   world of one, its losses beside those of a CPU, its peak memory beside the plan's;
3. `parcompile profile`;
4. `benchmarks/ring_attention_cuda.py`, which on several GPUs measures scaling too;
5. on several GPUs: the first example over tp and over cp on NCCL, its losses beside those of one GPU.

Each part has its time; one that fails or takes too long is written down, and the others go on. The exit code is 1
then, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import parcompile

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
STEPS = 10
"""Enough for a row of measurements, which is written after eight."""
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}
"""Relative, over the steps of an example: fp32 matrix products of a GPU sum in another order, bf16 has 8 bits."""


def missing() -> str | None:
    """Why nothing can run here, in one sentence."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"there is no GPU for torch {torch.__version__}, which was built without CUDA: install a build with it"
    return f"there is no GPU: torch {torch.__version__} was built for CUDA {torch.version.cuda} and sees no device"


class Parts:
    """Runs commands one after the other, within a time, and keeps what came of them."""

    def __init__(self, output: Path, minutes: float) -> None:
        self.output, self._end = output, time.monotonic() + 60 * minutes
        self.found: dict[str, Any] = {}

    def run(self, name: str, command: list[str], seconds: float, cpu: bool = False) -> bool:
        """Whether the command ended well; its output is kept beside the figures."""
        seconds = min(seconds, max(self._end - time.monotonic(), 1.0))
        environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
        if cpu:
            environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        start = time.monotonic()
        log = self.output / f"{name}.log"
        with log.open("w", encoding="utf-8") as stream:
            try:
                code: int | str = subprocess.run(
                    command, env=environment, stdout=stream, stderr=subprocess.STDOUT, timeout=seconds, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = f"longer than {seconds:.0f} s"
        self.found[name] = {"exit": code, "seconds": round(time.monotonic() - start, 1)}
        print(f"{name}: {'ok' if code == 0 else f'failed ({code}), see {log}'}", flush=True)
        return code == 0

    def note(self, name: str, **figures: Any) -> None:
        self.found[name] |= figures


def spec_of(example: Path, gpus: int, precision: str | None, parallelism: dict[str, Any]) -> dict[str, Any]:
    """An example for so many GPUs; everything that changes numbers stays, but the precision if one is named."""
    spec: dict[str, Any] = json.loads(example.read_text(encoding="utf-8"))
    accelerator = "cpu" if gpus == 0 else "h100-sxm"
    spec["cluster"] = {"nodes": 1, "gpus_per_node": max(gpus, 1), "accelerator": accelerator}
    spec["parallelism"] = {"dp": "auto", **parallelism}
    if precision is not None:
        spec["training"]["precision"] = precision
    return spec


def train(parts: Parts, name: str, spec: dict[str, Any], gpus: int) -> list[float] | None:
    """Losses of some steps; peak memory beside the plan's goes to the figures."""
    folder = parts.output / name
    folder.mkdir(parents=True, exist_ok=True)
    source, plan, trained = folder / "spec.json", folder / "plan", folder / "run"
    source.write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")
    compiler = [sys.executable, "-m", "parcompile", str(source), "-o", str(plan)]
    if not parts.run(f"{name}-compile", compiler, 30):
        return None
    script = [str(EXAMPLES / "train.py"), "--plan", str(plan), "--steps", str(STEPS), "--output", str(trained)]
    script += ["--checkpoint-every", "0"]
    alone = [sys.executable, *script]
    several = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(gpus), *script]
    if not parts.run(name, several if gpus > 1 else alone, 90, cpu=gpus == 0):
        return None
    lines = (trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    parts.note(name, losses=losses)
    measured = plan / "measurements.csv"
    if gpus and measured.exists():
        with measured.open(encoding="utf-8", newline="") as stream:
            measured_bytes = int(list(csv.DictReader(stream))[-1]["peak_bytes"])
        planned = parcompile.load_plan(str(plan)).estimate().to_json()["memory"]
        parts.note(name, peak_bytes=measured_bytes, planned_bytes=planned["peak_bytes"])
        parts.note(name, planned_interval_90_bytes=planned["interval_90_bytes"])
    return losses


def compare(parts: Parts, name: str, losses: list[float] | None, wanted: list[float] | None, tolerance: float) -> None:
    if losses is None or wanted is None:
        return
    error = max(abs(one - right) / abs(right) for one, right in zip(losses, wanted, strict=True))
    parts.note(name, worst_relative_error=error, tolerance=tolerance)
    if error > tolerance:
        parts.note(name, exit=f"losses differ by {error:.1e} > {tolerance:.0e}")
    print(f"{name}: losses differ by {error:.1e} (allowed {tolerance:.0e})", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/gpu"))
    parser.add_argument("--minutes", type=float, default=8.0)
    arguments = parser.parse_args()
    if (why := missing()) is not None:
        print(f"make gpu: {why}.", file=sys.stderr)
        return 2
    arguments.output.mkdir(parents=True, exist_ok=True)
    parts, gpus = Parts(arguments.output, arguments.minutes), torch.cuda.device_count()
    python = [sys.executable, "-m"]
    parts.run(
        "tests", [*python, "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(HERE.parent / "tests")], 150
    )
    wanted: dict[str, list[float] | None] = {}
    for example in sorted(EXAMPLES.glob("*.json")):
        if example.stem == "byte_finetune":
            continue  # starts from weights that another run has written
        on_cpu = wanted[example.stem] = train(parts, f"{example.stem}-cpu", spec_of(example, 0, None, {}), 0)
        for precision in ("fp32", "bf16"):
            name = f"{example.stem}-{precision}"
            losses = train(parts, name, spec_of(example, 1, precision, {}), 1)
            compare(parts, name, losses, on_cpu, LOSS_TOLERANCE[precision])
    parts.run(
        "profile", [*python, "parcompile", "profile", "-o", str(arguments.output / "this.json"), "--seconds", "20"], 60
    )
    figures = arguments.output / "ring_attention.json"
    cuda = [str(HERE / "ring_attention_cuda.py"), "--rounds", "10", "--json", str(figures)]
    if parts.run("ring_attention_cuda", [sys.executable, *cuda], 120) and figures.exists():
        parts.note("ring_attention_cuda", figures=json.loads(figures.read_text(encoding="utf-8")))
    for ranks in (2, 4):
        for axis in ("tp", "cp") if gpus >= ranks else ():
            name = f"byte_llama-{axis}{ranks}"
            losses = train(parts, name, spec_of(EXAMPLES / "byte_llama.json", ranks, "bf16", {axis: ranks}), ranks)
            compare(parts, name, losses, wanted["byte_llama"], LOSS_TOLERANCE["bf16"])
    device = torch.cuda.get_device_properties(0)
    machine = {"gpu": device.name, "gpus": gpus, "memory_bytes": device.total_memory, "torch": torch.__version__}
    machine |= {"cuda": torch.version.cuda, "python": platform.python_version()}
    failed = [name for name, part in parts.found.items() if part["exit"] != 0]
    text = json.dumps({"machine": machine, "failed": failed, "parts": parts.found}, indent=1) + "\n"
    (arguments.output / "figures.json").write_text(text, encoding="utf-8")
    print(f"{len(parts.found) - len(failed)} of {len(parts.found)} parts are fine: {arguments.output / 'figures.json'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
