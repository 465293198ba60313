"""A training step of real dimensions on one GPU beside plain DeepSpeed's: time, memory, kernels, waits.

    python benchmarks/gpu_step.py NAME [--steps 8] [--output out/gpu]

`NAME` is one of `MODELS`: a preset, with fewer layers where all of them do not fit. The plan's engine and then its
peer, the model of transformers in a DeepSpeed engine with the same settings, train on the same text. Printed: seconds
of a step (median and quartiles), peak memory beside the plan's, how long the GPU computes, the kernels of attention,
and how often the host waits. figures.json in the output folder holds the waits by where they begin, and the kernels
that take most.
"""

from __future__ import annotations

import collections
import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import parcompile
from parcompile.backends.deepspeed.write import ds_config
from parcompile.machines import attention_kernels
from parcompile.model.presets import find_preset

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

from harness import parsed, spread, write_json  # noqa: E402

MODELS: dict[str, dict[str, Any]] = json.loads((HERE / "gpu.json").read_text(encoding="utf-8"))["models"]
"""What is trained: a preset, and what is changed of it."""
ATTENTION = {
    "cuda-cudnn": ("cudnn_generated_fort_native_sdpa",),
    "cuda-flash": ("pytorch_flash::", "flash_fwd", "flash_bwd"),
    "cuda-efficient": ("fmha_cutlass",),
}
"""Parts of the names of the kernels by which each kernel of attention is known in a profile."""


def write_spec(name: str, folder: Path) -> Path:
    """Writes the spec of a model of `MODELS` for one H100, and the configuration of the model beside it."""
    change = MODELS[name]
    model = dict(find_preset(name).config)
    if "layers" in change:
        model["num_hidden_layers"] = change["layers"]
        for key in ("layer_types", "mlp_layer_types"):
            if isinstance(model.get(key), list):
                model[key] = model[key][: change["layers"]]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", model | change.get("model", {}))
    spec = {
        "version": 1,
        "name": name,
        "model": {"hf_config": "config.json"},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "accelerator": "h100-sxm"},
        "parallelism": {"dp": "auto"},
        "training": {
            "micro_batch_size": 1,
            "precision": "bf16",
            "optimizer": {"type": "adamw", "lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
            "gradient_clipping": 1.0,
            "train_steps": 20,
            **change["training"],
        },
    }
    file = folder / "spec.json"
    write_json(file, spec)
    return file


def measured(step: Callable[[], float], steps: int) -> dict[str, Any]:
    """Seconds of each step after three, the losses and the peak of memory; then the kernels and waits of one more."""
    losses = [step() for _ in range(3)]
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(step())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": seconds,
        "losses": losses,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "profile": kernels_of(step),
        "waits": waits_of(step),
    }


def kernels_of(step: Callable[[], float]) -> dict[str, Any]:
    """The kernels of one step: seconds and calls of those that take most, and what attention ran by."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        whole = time.perf_counter() - start
    seconds: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    host: collections.Counter[str] = collections.Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Optimizer."):
            seconds[event.name] += event.time_range.elapsed_us() / 1e6
            calls[event.name] += 1
        elif event.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"):
            host[event.name] += 1
    attention = sorted(
        kernel for kernel, parts in ATTENTION.items() if any(p in name for name in seconds for p in parts)
    )
    return {
        "seconds": whole,
        "computing_seconds": sum(seconds.values()),
        "launches": sum(calls.values()),
        "attention": attention or ["plain"],
        "attention_seconds": sum(
            took for name, took in seconds.items() if any(p in name for parts in ATTENTION.values() for p in parts)
        ),
        "synchronizations": dict(host),
        "copies": {name: calls[name] for name in sorted(calls) if name.startswith("Memcpy")},
        "most": [[name[:150], round(took * 1e3, 3), calls[name]] for name, took in seconds.most_common(30)],
    }


def waits_of(step: Callable[[], float]) -> dict[str, int]:
    """How often the host waits in one step, by the innermost lines of the project, DeepSpeed or transformers."""
    found: collections.Counter[str] = collections.Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing" not in str(message):
            return
        frames = [frame for frame in traceback.extract_stack()[:-2] if "/torch/" not in frame.filename]
        lines = [f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}" for frame in frames[-3:]]
        found[" < ".join(reversed(lines))] += 1

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return dict(found)


def of_plan(plan: parcompile.Plan, model: torch.nn.Module, steps: int) -> dict[str, Any]:
    """The plan's engine."""
    from corpus import StandardLibrary

    from parcompile.runtime import initialize

    training = plan.spec.training
    text = StandardLibrary(training.sequence_length, training.seed)
    start = time.perf_counter()
    engine, _, loader, _ = initialize(plan=plan, model=model, training_data=text, measurements=False, self_check=False)
    torch.cuda.synchronize()
    began = time.perf_counter() - start
    batches = iter(loader)

    def step() -> float:
        return float(engine.train_batch(batches))

    return measured(step, steps) | {"start_seconds": began, "norm": float(engine.get_global_grad_norm())}


def of_peer(plan: parcompile.Plan, steps: int) -> dict[str, Any]:
    """The model of transformers in a plain DeepSpeed engine."""
    import deepspeed
    from corpus import StandardLibrary
    from transformers import AutoConfig, AutoModelForCausalLM

    training = plan.spec.training
    config = AutoConfig.for_model(**plan.spec.model.hf_config)
    torch.manual_seed(training.seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(torch.float32)
    settings = ds_config(plan)
    settings["zero_allow_untested_optimizer"] = True
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    text, rows = StandardLibrary(training.sequence_length, training.seed), iter(range(10**9))

    def batch() -> torch.Tensor:
        return text[next(rows) % len(text)].unsqueeze(0).cuda()

    def step() -> float:
        losses = []
        for _ in range(training.global_batch_size):
            ids = batch()
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    return measured(step, steps)


def main() -> int:
    arguments = parsed(
        __doc__,
        ("name", {"choices": sorted(MODELS)}),
        steps=8,
        output=(Path("out/gpu"), "folder for the spec and the figures"),
        without=("", "a kernel of attention that is not taken, such as cuda-cudnn"),
    )
    folder = arguments.output / arguments.name
    spec = write_spec(arguments.name, folder)
    attention_kernels.FUSED = tuple(one for one in attention_kernels.FUSED if one.name != arguments.without)
    if not torch.cuda.is_available():
        print("there is no GPU: nothing is measured")
        return 0
    plan = parcompile.compile(spec)
    from parcompile.runtime.model.pretrained import build_model

    model = build_model(plan)
    found: dict[str, Any] = {"name": arguments.name, "estimate": plan.estimate().to_json()}
    runs = {"plan": lambda: of_plan(plan, model, arguments.steps), "peer": lambda: of_peer(plan, arguments.steps)}
    for name, run in runs.items():
        try:
            found[name] = run()
        except Exception as error:  # one of both may not fit, and the other is worth its figures
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        gc.collect()
        torch.cuda.empty_cache()
        write_json(folder / "figures.json", found)
    for name in runs:
        one = found[name]
        if "error" in one:
            print(f"{name}: {one['error']}")
            continue
        profile = one["profile"]
        kernels = ", ".join(profile["attention"])
        took, peak = spread(one["seconds"], ".4f"), one["peak_bytes"] / 2**30
        print(f"{arguments.name}, {name}: {took} s a step, peak {peak:.2f} GiB")
        print(f"  attention by {kernels}: {profile['attention_seconds']:.4f} s")
        print(f"  the GPU computes {profile['computing_seconds']:.4f} s in {profile['launches']} launches")
        waits, losses = sum(one["waits"].values()), one["losses"]
        print(f"  the host waits {waits} times; losses {losses[0]:.4f} to {losses[-1]:.4f}")
    memory, taken = found["estimate"]["memory"], found["estimate"]["time"]
    peak = memory["peak_bytes"] / 2**30
    print(f"the plan: {taken['step_seconds']:.4f} s a step, peak {peak:.2f} GiB with the framework")
    return 1 if "error" in found["plan"] else 0


if __name__ == "__main__":
    sys.exit(main())
