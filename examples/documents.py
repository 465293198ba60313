"""Trains a Hugging Face model on packed documents, and exports it: from its first weights, or those of a local folder.

    parcompile examples/byte_llama.json -o out/first
    parcompile examples/byte_finetune.json -o out/longer
    export DS_ACCELERATOR=cpu
    deepspeed --num_gpus 4 examples/documents.py --plan out/first
    deepspeed --hostfile hosts examples/documents.py --plan out/longer --model out/first/exported
    deepspeed --hostfile hosts examples/documents.py --plan out/longer --model out/first/exported --lora 8

The first is pre-training. The second goes on with sequences four times as long, cut over two nodes; every rank reads
its own slices of the weights. The third trains LoRA adapters instead. The documents are the files of Python's standard
library, as bytes; several lie in one sequence, and none sees another. What is trained is saved, resumed with --resume,
and at the end written to OUTPUT/exported, which `from_pretrained` loads; adapters alone to OUTPUT/adapter.
"""

from __future__ import annotations

import argparse
import math
import warnings
from pathlib import Path

import torch
from corpus import PackedSources
from deepspeed.utils import logger

from parcompile.plan import load_plan
from parcompile.runtime import Plan, RunError, decay_groups, evaluate, initialize, load_pretrained, report_errors
from parcompile.runtime.checkpoint import export, export_adapter, load, save

HELD_OUT = 4
"""Sequences that are evaluated, not trained on."""
WARMUP_STEPS = 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json, or the folder that holds it")
    parser.add_argument("--model", type=Path, help="folder with config.json and safetensors (default: drawn weights)")
    parser.add_argument(
        "--differs", nargs="+", default=(), metavar="KEY", help="keys of --model's config.json that the plan changes"
    )
    parser.add_argument("--lora", type=int, metavar="R", help="train adapters of rank R for --model, not its weights")
    parser.add_argument("--steps", type=int, help="optimizer steps in all (default: the plan's train_steps)")
    parser.add_argument("--output", type=Path, help="folder for checkpoints and the export (default: the plan's)")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    options = parser.parse_args()
    if options.lora and not options.model:
        parser.error("--lora needs --model")
    return options


def schedule(steps: int) -> object:
    """Warm-up, then a cosine down to a tenth; made when the optimizer is there."""

    def factor(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def model_of(options: argparse.Namespace, plan: Plan) -> torch.nn.Module | None:
    """This rank's part of the model, with adapters where they are wanted; None: as the plan's seed draws it."""
    if options.model is None:
        return None
    if not options.lora:
        return load_pretrained(options.model, plan, differs=options.differs)
    from peft import LoraConfig

    config = LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    return load_pretrained(options.model, plan, adapter=config, differs=options.differs)


def train(options: argparse.Namespace) -> None:
    logger.setLevel("WARNING")
    # DeepSpeed calls collectives by names that newer torch deprecates; that is not the user's business.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    plan = load_plan(options.plan)
    training = plan.spec.training
    output = options.output or (options.plan if options.plan.is_dir() else options.plan.parent)
    checkpoints = output / "checkpoints"
    steps = options.steps or training.train_steps
    if not steps:
        raise RunError("the plan has no train_steps: say how many with --steps", everywhere=True)

    sources = PackedSources(training.sequence_length, steps * training.global_batch_size + HELD_OUT)
    held_out = [sources[index] for index in range(len(sources) - HELD_OUT, len(sources))]
    engine, _, loader, _ = initialize(
        plan=plan,
        model=model_of(options, plan),
        model_parameters=lambda model: decay_groups(model, training.optimizer.weight_decay),
        training_data=sources,
        lr_scheduler=schedule(steps),
    )
    loader.step = load(engine, checkpoints) if options.resume else 0
    speaker, batches = engine.mesh.rank == 0, iter(loader)
    for step in range(loader.step, steps + 1):
        if step == steps or step % options.checkpoint_every == 0:
            loss = evaluate(engine, held_out)
            if speaker:
                print(f"step {step}: held-out loss {loss:.4f} nats per byte", flush=True)
            save(engine, checkpoints, step, keep=2)
        if step == steps:
            break
        engine.train_batch(batches)
    if speaker:
        print(f"exported to {export(checkpoints, output / 'exported')[0].parent}", flush=True)
        if options.lora:
            print(f"adapters in {export_adapter(checkpoints, output / 'adapter')[0].parent}", flush=True)


if __name__ == "__main__":
    with report_errors():
        train(arguments())
