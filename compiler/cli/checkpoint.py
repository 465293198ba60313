"""`parcompile checkpoint …`: looks into checkpoints, verifies, converts, exports, imports them; and `parcompile data`.

The work is the runtime's, which is imported only when a command runs: the compiler itself needs no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import click

from parcompile.backends.artefacts import to_text
from parcompile.layout.groups import DENSE_AXES

from . import needing, say, told
from .options import form_option, read_plan

_FOLDER = click.argument("folder", type=click.Path(path_type=Path))


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Errors of the runtime as messages; and what to install where it is missing."""
    with needing("runtime,hf"):
        from parcompile.runtime.errors import RunError
    with told(RunError):
        yield


@click.group("checkpoint")
def command() -> None:
    """Inspect, verify, convert, export and import checkpoints.

    FOLDER is a checkpoint, or the folder of a run's checkpoints, whose last one is meant.
    """


@command.command()
@_FOLDER
@form_option()
def inspect(folder: Path, form: str) -> None:
    """Show the model, step and layout of a checkpoint."""
    with _explained():
        from parcompile.runtime.checkpoint import read_note

        note = read_note(folder)
    parallelism, shape = note.plan.spec.parallelism, note.plan.spec.model.shape
    found = {
        "checkpoint": str(note.folder),
        "step": note.step,
        "plan": note.plan.spec.name,
        "model_type": shape.model_type,
        "parameters": note.plan.parameters.numel,
        "precision": note.plan.spec.training.precision.value,
        **{axis.value: parallelism.size(axis) for axis in DENSE_AXES},
        "optimizer_shards": parallelism.zero_shards,
        "files": len(note.files),
        "bytes": sum(size for size, _ in note.files.values()),
    }
    if form == "json":
        say(to_text(found), nl=False)
        return
    for name, value in found.items():
        say(f"{name.replace('_', ' '):<18}{value:,}" if isinstance(value, int) else f"{name:<18}{value}")


@command.command()
@_FOLDER
@click.pass_context
def verify(context: click.Context, folder: Path) -> None:
    """Compare every file with its saved size and hash.

    The exit code is 1 when something is wrong.
    """
    with _explained():
        from parcompile.runtime.checkpoint import verify as verified

        found = verified(folder)
    for sentence in found:
        say(sentence)
    if found:
        context.exit(1)
    say(f"{folder}: every file has the size and hash that it was saved with")


@command.command()
@_FOLDER
@click.option("--to", "plan", metavar="PATH", required=True, help="The plan of the new layout, or its spec.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder of the new checkpoint.")
def convert(folder: Path, plan: str, output: Path) -> None:
    """Convert a checkpoint to another layout.

    Resuming does that by itself; this saves the time at the start of each of many runs.
    """
    with _explained():
        from parcompile.runtime.checkpoint.adapting import convert as converted

        say(str(converted(folder, read_plan(plan)[0], output)))


@command.command()
@_FOLDER
@click.option("--hf", "output", type=click.Path(path_type=Path), required=True, help="Folder of the exported model.")
@click.option(
    "--max-file-bytes", type=click.IntRange(1), default=2 * 10**9, show_default=True, help="When to begin a new file."
)
@click.option("--adapter", is_flag=True, help="Write the LoRA adapters alone, as peft does.")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    help="Folder of the multimodal model whose text part was trained: write all of it, the rest as it is there.",
)
def export(folder: Path, output: Path, max_file_bytes: int, adapter: bool, into: Path | None) -> None:
    """Export the weights as a Hugging Face model.

    `from_pretrained` loads the folder. LoRA adapters are merged.
    """
    if adapter and into is not None:
        raise click.UsageError("--adapter writes adapters alone and --into a whole model: give one of them")
    with _explained():
        from parcompile.runtime.checkpoint import export as exported
        from parcompile.runtime.checkpoint import export_adapter

        if adapter:
            files = export_adapter(folder, output)
        else:
            files = exported(folder, output, shard_bytes=max_file_bytes, into=into)
        for file in files:
            say(str(file))


@command.command("import")
@click.option("--hf", "folder", type=click.Path(path_type=Path), required=True, help="Folder of the model's weights.")
@click.option("--plan", metavar="PATH", required=True, help="The plan of the run, or its spec.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder of the new checkpoint.")
def import_(folder: Path, plan: str, output: Path) -> None:
    """Create a first checkpoint from Hugging Face weights."""
    with _explained():
        from parcompile.runtime.checkpoint.adapting import import_pretrained

        say(str(import_pretrained(folder, read_plan(plan)[0], output)))


@click.command("data")
@click.argument("plan")
@click.argument("data", nargs=-1, required=True)
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), help="Folder of the tokenizer. Default: a token is a byte."
)
@click.option("--step", type=click.IntRange(min=1), help="List the samples of this step, counted from 1.")
@click.option("--run", type=click.Path(path_type=Path), help="Folder of a run that changed its batch size (run.json).")
@click.option("--write", metavar="PREFIX", help="Write text and tokens as Megatron's PREFIX.bin and PREFIX.idx.")
@form_option()
def data_command(
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
