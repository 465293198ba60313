"""Single points of papers and project pages, as layouts: figures that nothing here was fitted to.

Each has its source. What a source does not say is assumed, and the note names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from published_runs import gpt_shape

from parcompile.cost.estimate import Estimate, estimate
from parcompile.cost.workload import Workload
from parcompile.layout.pipeline import PipelineSplit, merged, rank_stages
from parcompile.machines import Accelerator, accelerators
from parcompile.model.hf_config import shape_from_config
from parcompile.model.presets import presets
from parcompile.units import GIB

MEGATRON_2021, KORTHIKANTI = "arXiv 2104.04473, table 1", "arXiv 2205.05198, table 5"
LLAMA_3, TORCHTITAN = "arXiv 2407.21783, table 4", "torchtitan docs/performance.md, table 2"
ANCHOR = "peak of a Megatron-LM run on H100"


@dataclass(frozen=True, slots=True)
class Point:
    """A published figure and the layout that it was measured with."""

    source: str
    name: str
    unit: str
    published: float
    work: Workload

    def predicted(self) -> tuple[float, float, float]:
        """The same figure, estimated with the coefficients of the package, between the ends of its 90 % interval."""
        found = estimate(self.work)
        value, (fast, slow) = _FIGURES[self.unit](self.work, found), found.time.interval_seconds
        if self.unit == "GiB":
            low, high = found.memory.interval_bytes
            return low / GIB, value, high / GIB
        step = found.time.step.seconds
        return (fast, value, slow) if self.unit == "s" else (value * step / slow, value, value * step / fast)


def gpt_step_flops(*, b: int, s: int, layers: int, h: int, v: int, recompute: bool) -> float:
    """Operations of a GPT step as Megatron-LM counts them, recomputation included: arXiv 2104.04473, section 5.1."""
    factor, head = (96, 16) if recompute else (72, 12)
    return factor * b * s * layers * h * h * (1 + s / (6 * h) + v / (head * layers * h))


def _gpt_rate(work: Workload, found: Estimate) -> float:
    shape = work.shape
    flops = gpt_step_flops(
        b=work.global_batch,
        s=work.sequence_length,
        layers=shape.num_hidden_layers,
        h=shape.hidden_size,
        v=shape.vocab_size,
        recompute=True,
    )
    return flops / found.time.step.seconds / work.world_size / 1e12


_FIGURES: Mapping[str, Callable[[Workload, Estimate], float]] = {
    "s": lambda _, found: found.time.step.seconds,
    "hardware TFLOP/s": _gpt_rate,
    "model TFLOP/s": lambda work, found: found.time.utilisation * work.machine.flops_per_s / 1e12,
    "tokens/s per GPU": lambda _, found: found.time.tokens_per_second_per_gpu,
    "GiB": lambda _, found: found.memory.peak.total_bytes / GIB,
}

_ROWS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Of each source, with what stands in a row as the first of them."""


def megatron(layers: int, hidden: int, heads: int, tp: int, pp: int, gpus: int, batch: int, **more: Any) -> Workload:
    """A GPT of Megatron-LM on nodes of 8 A100: S 2048, V 51200, full recomputation unless `more` says otherwise."""
    dp = gpus // (tp * pp)
    settings: dict[str, Any] = {"recompute": "full", "micro_batch": 1, **more}
    return Workload(
        shape=gpt_shape(layers, hidden, heads),
        nodes=max(1, gpus // 8),
        gpus_per_node=8,
        accelerator="a100-80gb",
        sequence_length=2048,
        micro_batches=batch // dp // settings["micro_batch"],
        tp=tp,
        dp=dp,
        pp=pp,
        zero_stage=0,
        framework="megatron-2021",
        **settings,
    )


def points() -> Iterator[Point]:
    """Every point, by source."""
    for size, layers, hidden, heads, tp, pp, gpus, batch, rate in _ROWS["megatron"][1:]:
        name = f"{size:g}B: tp {tp}, pp {pp}, {gpus} GPUs, batch {batch}"
        yield Point(MEGATRON_2021, name, "hardware TFLOP/s", rate, megatron(layers, hidden, heads, tp, pp, gpus, batch))
    for size, layers, hidden, heads, tp, pp, gpus, batch, micro, virtual, full, fast in _ROWS["korthikanti"][1:]:
        sizes = (layers, hidden, heads, tp, pp, gpus, batch)
        name = f"{size}B: tp {tp}, pp {pp}, {gpus} GPUs"
        work = megatron(*sizes, micro_batch=micro, virtual_stages=virtual)
        yield Point(KORTHIKANTI, f"{name}, full recomputation", "s", full, work)
        selective = replace(work, recompute="selective", sequence_parallel=True)
        yield Point(KORTHIKANTI, f"{name}, selective, sequence parallel", "s", fast, selective)
    yield Point(ANCHOR, "7B GQA: tp 4, dp 2, S 8192, micro-batch 2", "GiB", 53.22, _anchor())
    for gpus, cp, dp, length, share, rate in _ROWS["llama_3"][1:]:
        name = f"Llama 3 405B: tp 8, cp {cp}, pp 16, dp {dp}, S {length}"
        yield Point(LLAMA_3, name, "model TFLOP/s", rate, _llama_3(gpus, cp, dp, length, share))
    for cp, length, rate in _ROWS["torchtitan"][1:]:
        name = f"Llama 3.1 8B: FSDP {8 // cp}, cp {cp}, S {length}"
        yield Point(TORCHTITAN, name, "tokens/s per GPU", rate, _torchtitan(cp, length))


def _anchor() -> Workload:
    # Only a plain MLP of 4 h makes seven billion parameters, and the published static part.
    shape = shape_from_config(
        {
            "model_type": "nemotron",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 16384,
            "vocab_size": 131073,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        }
    )
    return Workload(
        shape=shape,
        nodes=1,
        gpus_per_node=8,
        accelerator="h100-sxm",
        sequence_length=8192,
        micro_batch=2,
        micro_batches=1,
        tp=4,
        dp=2,
        framework="megatron",
    )


def _llama_3(gpus: int, cp: int, dp: int, length: int, share: int) -> Workload:
    """126 layers on 16 ranks of 8 virtual stages, where embedding and head count as a layer; ZeRO stage 1."""
    shape = shape_from_config(presets()["llama-3.1-405b"].config)
    split = PipelineSplit(16, 8, embedding=True, loss=True)
    stages = tuple(merged(one, shape.num_hidden_layers) for one in rank_stages(shape.num_hidden_layers, split))
    return Workload(
        shape=shape,
        nodes=gpus // 8,
        gpus_per_node=8,
        accelerator="h100-sxm",
        sequence_length=length,
        micro_batch=1,
        micro_batches=share,
        tp=8,
        cp=cp,
        pp=16,
        dp=dp,
        cp_implementation="all_gather",
        sequence_parallel=True,
        virtual_stages=8,
        stage_layers=stages,
        framework="megatron",
    )


def _torchtitan(cp: int, length: int) -> Workload:
    return Workload(
        shape=shape_from_config(presets()["llama-3-8b"].config),
        nodes=1,
        gpus_per_node=8,
        accelerator="h100-sxm",
        preset=_grand_teton(accelerators()["h100-sxm"]),
        sequence_length=length,
        micro_batch=1,
        micro_batches=1,
        cp=cp,
        dp=8 // cp,
        zero_stage=3,
        recompute="full",
        framework="megatron",
    )


def _grand_teton(base: Accelerator) -> Accelerator:
    """The H100 of the source: 96 GB at 2.4 TB/s."""
    return replace(base, name="h100-96gb", memory_bytes=96 * GIB, memory_bytes_per_s=2.4e12)
