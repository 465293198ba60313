"""Fine-tunes a Hugging Face model from a local folder on packed documents, and exports it again.

    parcompile examples/byte_finetune.json -o out/finetune
    DS_ACCELERATOR=cpu deepspeed --hostfile hosts examples/finetune.py --plan out/finetune --model path/to/model

The documents are the files of Python's standard library, as bytes; several lie in one sequence, and none sees another.
Every rank reads its own slices of the weights. What is trained is saved, resumed with --resume, and at the end written
to OUTPUT/exported, which `from_pretrained` loads.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from deepspeed.utils import logger
from torch import Tensor

from parcompile.runtime import (
    Plan,
    RunError,
    decay_groups,
    initialize,
    load_pretrained,
    reduce_loss,
    report_errors,
    split_batch,
)
from parcompile.runtime.checkpoint import export, load, save

HELD_OUT = 4
"""Sequences that are evaluated, not trained on."""
WARMUP_STEPS = 5


class PackedSources:
    """Sequences of `length` bytes, filled with source files one after the other; positions begin anew with each."""

    def __init__(self, length: int, count: int) -> None:
        stream = self._tokens()
        self._samples = [self._sample(stream, length) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._samples[index]

    def _tokens(self) -> Iterator[tuple[int, int]]:
        """Bytes with their positions in their file."""
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            for position, byte in enumerate(file.read_bytes()[:2000]):
                yield byte, position

    def _sample(self, stream: Iterator[tuple[int, int]], length: int) -> dict[str, Tensor]:
        ids, positions = zip(*(next(stream) for _ in range(length)), strict=True)
        # A document that goes on from the sequence before begins anew here.
        places = torch.tensor(positions)
        first = int((places == 0).nonzero()[0]) if bool((places == 0).any()) else length
        places[:first] = torch.arange(first)
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids), "position_ids": places}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json, or the folder that holds it")
    parser.add_argument("--model", required=True, type=Path, help="folder with config.json and safetensors")
    parser.add_argument("--steps", type=int, help="optimizer steps in all (default: the plan's train_steps)")
    parser.add_argument("--output", type=Path, help="folder for checkpoints and the export (default: the plan's)")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    return parser.parse_args()


def schedule(steps: int) -> object:
    """Warm-up, then a cosine down to a tenth; made when the optimizer is there."""

    def factor(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def evaluate(engine: object, held_out: list[dict[str, Tensor]]) -> float:
    """Mean loss of the held-out sequences; every rank evaluates them, so that dp sees the same."""
    engine.eval()
    losses = []
    with torch.no_grad():
        for sample in held_out:
            batch = {name: tensor[None] for name, tensor in sample.items()}
            losses.append(reduce_loss(engine(**split_batch(batch, engine.mesh)).loss, engine.mesh))
    engine.train()
    return sum(losses) / len(losses)


def finetune(options: argparse.Namespace) -> None:
    logger.setLevel("WARNING")
    # DeepSpeed calls collectives by names that newer torch deprecates; that is not the user's business.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    plan = Plan.load(options.plan)
    training = plan.spec.training
    output = options.output or (options.plan if options.plan.is_dir() else options.plan.parent)
    steps = options.steps or training.train_steps
    if not steps:
        raise RunError("the plan has no train_steps: say how many with --steps", everywhere=True)

    sources = PackedSources(training.sequence_length, steps * training.global_batch_size + HELD_OUT)
    held_out = [sources[index] for index in range(len(sources) - HELD_OUT, len(sources))]
    engine, _, loader, _ = initialize(
        plan=plan,
        model=load_pretrained(options.model, plan),
        model_parameters=lambda model: decay_groups(model, training.optimizer.weight_decay),
        training_data=sources,
        lr_scheduler=schedule(steps),
    )
    loader.step = load(engine, output / "checkpoints") if options.resume else 0
    speaker, batches = engine.mesh.rank == 0, iter(loader)
    for step in range(loader.step, steps + 1):
        if step == steps or step % options.checkpoint_every == 0:
            loss = evaluate(engine, held_out)
            if speaker:
                print(f"step {step}: held-out loss {loss:.4f} nats per byte", flush=True)
            save(engine, output / "checkpoints", step, keep=2)
        if step == steps:
            break
        for _ in range(training.gradient_accumulation_steps):
            engine.backward(engine(**next(batches)).loss)
            engine.step()
    if speaker:
        print(f"exported to {export(output / 'checkpoints', output / 'exported')[0].parent}", flush=True)


if __name__ == "__main__":
    with report_errors():
        finetune(arguments())
