"""Trains a byte-level language model on the Python standard library's source text, as a compiled plan says.

    parcompile examples/byte_llama.json -o out/byte-llama
    DS_ACCELERATOR=cpu deepspeed --num_gpus 4 examples/train.py --plan out/byte-llama

The same script runs on GPUs (compile the spec for their number) and, for a plan of one rank, with plain `python`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from corpus import StandardLibrary
from deepspeed.utils import logger
from tqdm import tqdm

from parcompile.plan import load_plan
from parcompile.runtime import RunError, StepMeter, Stopped, StopSignals, initialize, report_errors
from parcompile.runtime.checkpoint import load, save
from parcompile.runtime.run_log import RunLog


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json, or the folder that holds it")
    parser.add_argument("--steps", type=int, help="optimizer steps in all (default: the plan's train_steps)")
    parser.add_argument("--output", type=Path, help="folder for metrics, curve and checkpoints (default: the plan's)")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps between checkpoints; 0: none")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="last",
        choices=("last", "auto"),
        help="go on from the last checkpoint in the output folder; auto: if there is one",
    )
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    options = parser.parse_args()
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps {options.steps}: expected a number, 1 or more")
    if options.checkpoint_every < 0:
        parser.error(f"--checkpoint-every {options.checkpoint_every}: expected 0 (none) or more")
    return options


def train(options: argparse.Namespace) -> None:
    logger.setLevel("WARNING")
    # DeepSpeed calls collectives by names that newer torch deprecates; that is not the user's business.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    plan = load_plan(options.plan)
    training = plan.spec.training
    output = options.output or (options.plan if options.plan.is_dir() else options.plan.parent)
    checkpoints = output / "checkpoints"
    steps = training.train_steps if options.steps is None else options.steps
    if options.resume is None and (checkpoints / "latest").exists():
        raise RunError(
            f"{checkpoints} holds checkpoints of an earlier run, of which nothing would be read: go on with --resume, "
            "or name another --output",
            everywhere=True,
        )
    if steps is None:
        raise RunError("the plan has no train_steps: say how many with --steps", everywhere=True)

    text = StandardLibrary(training.sequence_length, training.seed)
    engine, _, loader, _ = initialize(plan=plan, training_data=text, measurements=output / "measurements.csv")
    resumes = options.resume == "last" or (options.resume == "auto" and (checkpoints / "latest").exists())
    first_step = load(engine, checkpoints) if resumes else 0
    # SIGTERM or SIGUSR1, as schedulers send them before they take a node away: finish the step, save, and end.
    stop = StopSignals()
    loader.step = first_step

    speaker = engine.mesh.rank == 0
    # A log file gets a line now and then, a terminal a moving bar.
    interval = 0.5 if sys.stderr.isatty() else 10.0
    progress = tqdm(total=steps, initial=first_step, unit="step", disable=not speaker, mininterval=interval)
    batches, meter = iter(loader), StepMeter(engine)
    with RunLog(output, first_step, writes=speaker, plan=plan) as log:
        for step in range(first_step + 1, steps + 1):
            row = meter.train_batch(batches)
            log.add(step, **row)
            said = f"loss {row['loss']:.3f}, norm {row['gradient_norm']:.2f}, {row['tokens_per_s']:,.0f} tokens/s"
            progress.set_postfix_str(said, refresh=False)
            progress.update()
            stops = stop.due(step)
            if stops or (options.checkpoint_every and (step % options.checkpoint_every == 0 or step == steps)):
                save(engine, checkpoints, step)
            if stops:
                progress.close()
                raise Stopped(f"stopped by {stop.signal}: step {step} is saved, --resume auto goes on from there")
    progress.close()
    if speaker:
        report(log, options, checkpoints)


def report(log: RunLog, options: argparse.Namespace, checkpoints: Path) -> None:
    rows = log.rows()
    print(f"\nloss {rows[0]['loss']:.3f} → {rows[-1]['loss']:.3f} nats per byte in {len(rows)} steps")
    print(f"metrics      {log.file}")
    print(f"loss curve   {log.file.with_name('loss.svg')}")
    if options.checkpoint_every:
        print(f"checkpoints  {checkpoints}")


if __name__ == "__main__":
    with report_errors():
        train(arguments())
