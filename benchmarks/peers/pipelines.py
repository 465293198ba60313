"""Pipelines that train the same layers on the same ranks: the peers of `benchmarks/pipeline.py`, and their kernels.

Each stage is made of transformers' own layers, read from the same folder. A micro-batch is (token ids, labels), both
[B, S], with labels that were shifted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .engines import ds_config, start_deepspeed

MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step took on one rank, in seconds, and in processor seconds of all its threads."""

    passes: float
    """Until the last pass was through: without reduction, clipping and optimizer."""
    whole: float
    cpu_passes: float
    cpu_whole: float
    loss: float | None
    """Where it is known."""


class Clock:
    """Of a step: started when made, and looked at when its passes are through and at its end."""

    def __init__(self) -> None:
        self._start = self._passes = time.perf_counter(), time.process_time()

    def passes_are_through(self) -> None:
        self._passes = time.perf_counter(), time.process_time()

    def taken(self, loss: float | None) -> Taken:
        (start, cpu_start), (passes, cpu_passes) = self._start, self._passes
        whole, cpu_whole = time.perf_counter() - start, time.process_time() - cpu_start
        return Taken(passes - start, whole, cpu_passes - cpu_start, cpu_whole, loss)


Train = Callable[[Sequence[MicroBatch], Clock], Taken]


class Chunk(nn.Module):
    """Consecutive layers of a Llama, with the embedding before the first and the norm and the head behind the last."""

    def __init__(self, model: Any, layers: range) -> None:
        super().__init__()
        base = model.model
        self.first, self.last = layers.start == 0, layers.stop == len(base.layers)
        self.layers, self.rotary = nn.ModuleList(base.layers[number] for number in layers), base.rotary_emb
        if self.first:
            self.embedding = base.embed_tokens
        if self.last:
            self.norm, self.head = base.norm, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) if self.first else x
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        rotated = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotated)
        return self.head(self.norm(hidden)) if self.last else hidden


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def chunks(folder: str, rank: int, stages: int, virtual: int) -> list[Chunk]:
    """This rank's: global stage `chunk · stages + rank` of as many equal ones."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    each = len(model.model.layers) // (stages * virtual)
    starts = [(chunk * stages + rank) * each for chunk in range(virtual)]
    found = [Chunk(model, range(start, start + each)) for start in starts]
    for parameter in (one for chunk in found for one in chunk.parameters()):
        # What was read lies in pages of its file, which are larger until an optimizer writes: 8 % on the kernels.
        parameter.data = parameter.data.clone()
    return found


class Kernels:
    """What the passes of a rank compute, without a pipeline around them."""

    def __init__(self, folder: str, rank: int, settings: dict[str, Any], virtual: int) -> None:
        self._chunks = chunks(folder, rank, settings["stages"], virtual)
        self._rank, self._settings = rank, settings

    def seconds(self, batches: Sequence[MicroBatch], clock: Callable[[], float]) -> list[tuple[float, float]]:
        """Of each chunk, forward and backward for one micro-batch: medians over these."""
        found = []
        for chunk in self._chunks:
            forward, backward = [], []
            for ids, labels in batches:
                shape = (*ids.shape, self._settings["hidden"])
                x = ids if chunk.first else torch.randn(shape).requires_grad_()
                gradient = torch.randn(shape)
                start = clock()
                out = chunk(x)
                out = loss_of(out, labels) / len(batches) if chunk.last else out
                middle = clock()
                out.backward(None if chunk.last else gradient)
                backward.append(clock() - middle)
                forward.append(middle - start)
            found.append((statistics.median(forward), statistics.median(backward)))
            chunk.zero_grad()
        return found


def torch_schedule(name: str) -> Callable[[str, int, dict[str, Any]], Train]:
    """One of torch.distributed.pipelining's, with torch's AdamW and a gradient norm over all stages."""

    def start(folder: str, rank: int, settings: dict[str, Any]) -> Train:
        from torch.distributed import pipelining

        virtual = settings["virtual"] if name == "ScheduleInterleaved1F1B" else 1
        own, stages = chunks(folder, rank, settings["stages"], virtual), settings["stages"]
        parts = [
            pipelining.PipelineStage(chunk, number * stages + rank, stages * virtual, torch.device("cpu"))
            for number, chunk in enumerate(own)
        ]
        kind: Any = getattr(pipelining, name)
        schedule = kind(parts if virtual > 1 else parts[0], settings["micro_batches"], loss_fn=loss_of)
        parameters = [parameter for chunk in own for parameter in chunk.parameters()]
        optimizer = torch.optim.AdamW(parameters, settings["lr"], betas=(0.9, 0.95), weight_decay=0.1)

        def train(batches: Sequence[MicroBatch], clock: Clock) -> Taken:
            ids, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
            losses: list[Tensor] = []
            schedule.step(
                *([ids] if rank == 0 else []),
                **({"target": labels, "losses": losses} if rank == stages - 1 else {}),
            )
            clock.passes_are_through()
            squares = torch.stack([one.grad.square().sum() for one in parameters]).sum()
            dist.all_reduce(squares)
            factor = min(1.0, 1.0 / (float(squares.sqrt()) + 1e-6))
            for one in parameters:
                one.grad.mul_(factor)
            optimizer.step()
            optimizer.zero_grad()
            return clock.taken(float(torch.stack(losses).mean()) if losses else None)

        return train

    return start


def deepspeed_pipeline(folder: str, _: int, settings: dict[str, Any]) -> Train:
    """DeepSpeed's PipelineEngine, each stage one layer of a PipelineModule: it has fewest hand-overs so."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.schedule import ReduceTiedGrads

    start_deepspeed()
    stages = settings["stages"]
    layers = [LayerSpec(_Stage, folder, number, stages) for number in range(stages)]
    model = PipelineModule(layers, num_stages=stages, loss_fn=loss_of, partition_method="uniform")
    config = ds_config(settings, 1) | {
        "gradient_accumulation_steps": settings["micro_batches"],
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    clocks: list[Clock] = []
    first_after_passes = PipelineEngine._INSTRUCTION_MAP[ReduceTiedGrads]

    def mark(self: PipelineEngine, *args: Any, **options: Any) -> Any:
        clocks[-1].passes_are_through()
        return first_after_passes(self, *args, **options)

    PipelineEngine._INSTRUCTION_MAP[ReduceTiedGrads] = mark

    def train(batches: Sequence[MicroBatch], clock: Clock) -> Taken:
        clocks[:] = [clock]
        return clock.taken(float(engine.train_batch(iter(batches))))

    return train


class _Stage(nn.Module):
    """As PipelineModule builds its layers: of a class, on the stage that they belong to."""

    def __init__(self, folder: str, number: int, stages: int) -> None:
        super().__init__()
        (self.chunk,) = chunks(folder, number, stages, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.chunk(x)


PEERS: dict[str, Callable[[str, int, dict[str, Any]], Train]] = {
    "DeepSpeed PipelineEngine": deepspeed_pipeline,
    "torch GPipe": torch_schedule("ScheduleGPipe"),
    "torch 1F1B": torch_schedule("Schedule1F1B"),
    "torch Interleaved1F1B": torch_schedule("ScheduleInterleaved1F1B"),
}
