"""Everything that only a GPU can show, by one command (`make gpu`); what it finds goes into out/gpu/figures.json.

    python benchmarks/gpu.py [--output out/gpu] [--minutes 12] [--only PART …]

1. `tests`: those marked `gpu`: kernels against fp64, packed documents, merges, no host that waits;
2. `examples`: every example spec, compiled for one GPU in fp32 and in bf16 and trained for a few steps: the engine on
   NCCL with a world of one, its losses and norms beside those of a CPU, its peak memory beside the plan's;
3. `ranks`: layouts of tp, cp, ep, pp, dp and ZeRO 1 to 3 over several ranks on NCCL, beside one CPU. Ranks that have no
   GPU of their own share one: each says to NCCL that it is a host of its own (NCCL_HOSTID), so messages go by sockets;
4. `steps`: `benchmarks/gpu_step.py`, a step of real dimensions beside plain DeepSpeed's;
5. `speed`: `parcompile profile`, and `benchmarks/ring_attention_cuda.py`, which on several GPUs measures scaling too.

Parts 1 to 3 run side by side, as many as there are processors for; what is timed runs alone. Each part has its time;
one that fails or takes too long is written down, and the others go on. The exit code is 1 then, and 2 without a GPU.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import parcompile
from parcompile.cost.measurements import read_plain

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from harness import ENVIRONMENT, ROOT, parsed, run_for, write_json  # noqa: E402

EXAMPLES = ROOT / "examples"
STEPS = 10
"""Enough for a row of measurements, which is written after eight."""
TOLERANCE = {"fp32": {"loss": 1e-3, "gradient_norm": 1e-3}, "bf16": {"loss": 3e-2, "gradient_norm": 1e-1}}
"""Relative, over the steps of an example: fp32 matrix products of a GPU sum in another order, bf16 has 8 bits."""


class Parts:
    """Runs commands one after the other, within a time, and keeps what came of them."""

    def __init__(self, output: Path, minutes: float) -> None:
        self.output, self._end = output, time.monotonic() + 60 * minutes
        self.found: dict[str, Any] = {}

    def run(self, name: str, command: list[str], seconds: float, cpu: bool = False) -> bool:
        """Whether the command ended well; its output is kept beside the figures."""
        seconds = min(seconds, max(self._end - time.monotonic(), 1.0))
        environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "2", **({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})}
        if not cpu:
            del environment["DS_ACCELERATOR"]
        start = time.monotonic()
        log = self.output / f"{name}.log"
        with log.open("w", encoding="utf-8") as stream:
            ended = run_for(command, seconds, stream, environment)
        code = f"longer than {seconds:.0f} s" if ended is None else ended
        self.found[name] = {"exit": code, "seconds": round(time.monotonic() - start, 1)}
        print(f"{name}: {'ok' if code == 0 else f'failed ({code}), see {log}'}", flush=True)
        return code == 0

    def note(self, name: str, **figures: Any) -> None:
        self.found[name] |= figures


def spec_of(example: Path, gpus: int, precision: str | None, changes: dict[str, Any]) -> dict[str, Any]:
    """An example for so many GPUs, with `changes` made in its sections."""
    spec: dict[str, Any] = json.loads(example.read_text(encoding="utf-8"))
    accelerator = "cpu" if gpus == 0 else "h100-sxm"
    spec["cluster"] = {"nodes": 1, "gpus_per_node": max(gpus, 1), "accelerator": accelerator}
    spec["parallelism"] = {"dp": "auto"}
    for section, values in changes.items():
        spec[section] = spec.get(section, {}) | values
    if precision is not None:
        spec["training"]["precision"] = precision
    return spec


Numbers = dict[str, list[float]]
"""Of each step: `loss` and `gradient_norm`."""


def train(parts: Parts, name: str, spec: dict[str, Any], gpus: int) -> Numbers | None:
    """Losses and norms of some steps; peak memory beside the plan's goes to the figures."""
    folder = parts.output / name
    folder.mkdir(parents=True, exist_ok=True)
    source, plan, trained = folder / "spec.json", folder / "plan", folder / "run"
    write_json(source, spec)
    compiler = [sys.executable, "-m", "parcompile", str(source), "-o", str(plan)]
    if not parts.run(f"{name}-compile", compiler, 60):
        return None
    script = [str(EXAMPLES / "train.py"), "--plan", str(plan), "--steps", str(STEPS), "--output", str(trained)]
    script += ["--checkpoint-every", "0"]
    if not parts.run(name, [*launcher(gpus, shared=gpus > torch.cuda.device_count()), *script], 120, cpu=gpus == 0):
        return None
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    numbers = {key: [line[key] for line in lines] for key in ("loss", "gradient_norm")}
    parts.note(name, **numbers)
    measured = trained / "measurements.csv"
    if gpus and measured.exists():
        planned = parcompile.load_plan(str(plan)).estimate().to_json()["memory"]
        parts.note(name, peak_bytes=read_plain(measured)[-1].peak_bytes, planned_bytes=planned["peak_bytes"])
        parts.note(name, planned_interval_90_bytes=planned["interval_90_bytes"])
    return numbers


def launcher(ranks: int, *, shared: bool) -> list[str]:
    """What starts so many ranks of a script; `shared`: on one GPU, where NCCL takes each for a host of its own."""
    if ranks < 2:
        return [sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    host = "NCCL_HOSTID=rank$RANK NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1"
    return [*torchrun, "--no-python", "sh", "-c", f'{host} exec "$0" "$@"', sys.executable] if shared else torchrun


def compare(
    parts: Parts, name: str, numbers: Numbers | None, wanted: Numbers | None, allowed: dict[str, float]
) -> None:
    if numbers is None or wanted is None:
        return
    errors = {
        key: max(abs(one - right) / abs(right) for one, right in zip(numbers[key], wanted[key], strict=True))
        for key in numbers
    }
    parts.note(name, worst_relative_error=errors, tolerance=allowed)
    said = ", ".join(f"{key} {error:.1e} (allowed {allowed[key]:.0e})" for key, error in errors.items())
    if not all(error <= allowed[key] for key, error in errors.items()):
        parts.note(name, exit=f"differs by {said}")
    print(f"{name}: differs by {said}", flush=True)


_TREE = json.loads((HERE / "gpu.json").read_text(encoding="utf-8"))
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {name: tuple(row) for name, row in _TREE["layouts"].items()}
"""By name: the example, the ranks, and what is changed in it."""


def on_cpu(layout: str) -> tuple[str, dict[str, Any]]:
    """The name of the run on one CPU that a layout is compared with, and what is changed there."""
    example, _, changes = LAYOUTS[layout]
    model = {"model": changes["model"]} if "model" in changes else {}
    return f"{example}-{layout}-cpu" if model else f"{example}-cpu", model


def examples(parts: Parts, names: list[str], layouts: list[str]) -> None:
    """Trains examples on one GPU and layouts on several ranks, side by side, and compares each with one CPU."""
    references: dict[str, tuple[str, dict[str, Any]]] = {f"{name}-cpu": (name, {}) for name in names}
    for layout in layouts:
        name, model = on_cpu(layout)
        references[name] = LAYOUTS[layout][0], model

    def numbers(name: str, example: str, gpus: int, precision: str | None, changes: dict[str, Any]) -> Numbers | None:
        return train(parts, name, spec_of(EXAMPLES / f"{example}.json", gpus, precision, changes), gpus)

    # A rank keeps about three processors busy while it starts.
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 4)) as pool:
        wanted = {name: pool.submit(numbers, name, one, 0, None, model) for name, (one, model) in references.items()}
        jobs = [(f"{one}-{kind}", one, 1, kind, {}, f"{one}-cpu") for one in names for kind in ("fp32", "bf16")]
        jobs += [(one, LAYOUTS[one][0], LAYOUTS[one][1], None, LAYOUTS[one][2], on_cpu(one)[0]) for one in layouts]
        for (name, _, _, kind, _, reference), future in [(job, pool.submit(numbers, *job[:5])) for job in jobs]:
            compare(parts, name, future.result(), wanted[reference].result(), TOLERANCE[kind or "fp32"])


PARTS = ["tests", "examples", "ranks", "steps", "speed"]


def main() -> int:
    arguments = parsed(
        __doc__,
        output=Path("out/gpu"),
        minutes=12.0,
        only=(PARTS, None, PARTS),
        without=("", "a kernel of attention that the steps do not take"),
        layouts=([*LAYOUTS], None, [*LAYOUTS]),
        models=([*_TREE["models"]], None, [*_TREE["models"]]),
    )
    if not torch.cuda.is_available():
        why = f": torch {torch.__version__} was built for CUDA {torch.version.cuda} and sees no device"
        if torch.version.cuda is None and torch.version.hip is None:
            why = f" for torch {torch.__version__}, which was built without CUDA: install a build with it"
        print(f"make gpu: there is no GPU{why}.", file=sys.stderr)
        return 2
    arguments.output.mkdir(parents=True, exist_ok=True)
    parts, gpus = Parts(arguments.output, arguments.minutes), torch.cuda.device_count()
    python = [sys.executable, "-m"]
    # One that starts from weights that another run has written is left out.
    names = [file.stem for file in sorted(EXAMPLES.glob("*.json")) if file.stem != "byte_finetune"]
    with ThreadPoolExecutor(1) as beside:
        if "tests" in arguments.only:
            tests = [*python, "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
            tests += [str(ROOT / "tests" / "runtime" / "test_gpu.py")]
            beside.submit(parts.run, "tests", tests, 150)
        layouts = arguments.layouts if "ranks" in arguments.only else []
        examples(parts, names if "examples" in arguments.only else [], layouts)
    if "speed" in arguments.only:
        profile = ["parcompile", "profile", "-o", str(arguments.output / "this.json"), "--seconds", "20"]
        parts.run("profile", [*python, *profile], 60)
        figures = arguments.output / "ring_attention.json"
        cuda = [str(HERE / "ring_attention_cuda.py"), "--rounds", "10", "--json", str(figures)]
        if parts.run("ring_attention_cuda", [sys.executable, *cuda], 120) and figures.exists():
            parts.note("ring_attention_cuda", figures=json.loads(figures.read_text(encoding="utf-8")))
    for model in arguments.models if "steps" in arguments.only else ():
        step = [str(HERE / "gpu_step.py"), model, "--output", str(arguments.output), "--without", arguments.without]
        if parts.run(f"step-{model}", [sys.executable, *step], 90):
            figures = arguments.output / model / "figures.json"
            parts.note(f"step-{model}", figures=json.loads(figures.read_text(encoding="utf-8")))
    device = torch.cuda.get_device_properties(0)
    machine = {"gpu": device.name, "gpus": gpus, "memory_bytes": device.total_memory, "torch": torch.__version__}
    machine |= {"cuda": torch.version.cuda, "python": platform.python_version()}
    failed = [name for name, part in parts.found.items() if part["exit"] != 0]
    write_json(arguments.output / "figures.json", {"machine": machine, "failed": failed, "parts": parts.found})
    print(f"{len(parts.found) - len(failed)} of {len(parts.found)} parts are fine: {arguments.output / 'figures.json'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
