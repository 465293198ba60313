"""`parcompile data`: what training data hold, which of it a step has, and the data as Megatron's files."""

from __future__ import annotations

from pathlib import Path

import click

from parcompile.backends.artefacts import to_text

from . import needing, say, told
from .options import read_plan


@click.command("data")
@click.argument("plan")
@click.argument("data", nargs=-1, required=True)
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), help="Folder of the tokenizer. Default: a token is a byte."
)
@click.option("--step", type=click.IntRange(min=1), help="List the samples of this step, counted from 1.")
@click.option("--run", type=click.Path(path_type=Path), help="Folder of a run that changed its batch size (run.json).")
@click.option("--write", metavar="PREFIX", help="Write text and tokens as Megatron's PREFIX.bin and PREFIX.idx.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    plan: str,
    data: tuple[str, ...],
    tokenizer: Path | None,
    step: int | None,
    run: Path | None,
    write: str | None,
    form: str,
) -> None:
    """Say which samples of the training data a step has.

    PLAN is a spec, a plan.json, or the folder that holds one. DATA is what `train.py --data` takes: a file or a folder,
    or several of them, each behind its weight (0.3 code 0.7 books.jsonl). The samples of a step are the same in every
    layout. Without --step and --write, says how many sequences the data have. Needs the extras [runtime] and [hf].
    """
    if step is not None and write is not None:
        raise click.UsageError("--step and --write do different things: give one of them")
    if run is not None and step is None:
        raise click.UsageError("--run says which samples came before a step: give --step too")
    if write is not None and len(data) > 1:
        raise click.UsageError("--write takes one file or folder: weights have no place in Megatron's files")
    loaded = read_plan(plan)[0]
    with needing("runtime,hf"):
        from parcompile.runtime import RunError
        from parcompile.runtime.data.megatron_files import write_megatron
        from parcompile.runtime.data.training_files import (
            documents_of,
            ledger,
            read_training_data,
            samples_before,
            text,
        )
    with told(RunError):
        if write is not None:
            vocab_size = loaded.spec.model.shape.vocab_size
            said = write_megatron(documents_of(data[0], tokenizer), write, vocab_size)
            say(f"wrote {write}.bin and {write}.idx: {said}")
            return
        before = 0 if step is None else samples_before(step, loaded, run)
        sequences = read_training_data(data, loaded, tokenizer)
        if step is None:
            steps = len(sequences) / loaded.spec.training.global_batch_size
            found = {"format": 1, "summary": sequences.summary, "sequences": len(sequences), "steps": steps}
            say(
                to_text(found) if form == "json" else f"{sequences.summary}; {steps:.1f} steps an epoch",
                nl=form == "text",
            )
            return
        rows = ledger(step, loaded, sequences, before)
    say(to_text(rows) if form == "json" else text(rows), nl=form == "text")
