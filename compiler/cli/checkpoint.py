"""`parcompile checkpoint …`: looks into checkpoints, verifies, converts, exports and imports them.

The work is the runtime's, which is imported only when a command runs: the compiler itself needs no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import click

from parcompile.backends.artefacts import to_text
from parcompile.layout.groups import DENSE_AXES
from parcompile.plan import PlanError, load_plan

from . import needing, say, told

_FOLDER = click.argument("folder", type=click.Path(path_type=Path))


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Errors of the runtime as messages; and what to install where it is missing."""
    with needing("runtime,hf"):
        from parcompile.runtime.errors import RunError
    with told(RunError, PlanError):
        yield


@click.group("checkpoint")
def command() -> None:
    """Inspect, verify, convert, export and import checkpoints.

    FOLDER is a checkpoint, or the folder of a run's checkpoints, whose last one is meant.
    """


@command.command()
@_FOLDER
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
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
@click.option("--to", "plan", type=click.Path(path_type=Path), required=True, help="The plan of the new layout.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder of the new checkpoint.")
def convert(folder: Path, plan: Path, output: Path) -> None:
    """Convert a checkpoint to another layout.

    Resuming does that by itself; this saves the time at the start of each of many runs.
    """
    with _explained():
        from parcompile.runtime.checkpoint.adapting import convert as converted

        say(str(converted(folder, load_plan(plan), output)))


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
@click.option("--plan", type=click.Path(path_type=Path), required=True, help="The plan of the run.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder of the new checkpoint.")
def import_(folder: Path, plan: Path, output: Path) -> None:
    """Create a first checkpoint from Hugging Face weights."""
    with _explained():
        from parcompile.runtime.checkpoint.adapting import import_pretrained

        say(str(import_pretrained(folder, load_plan(plan), output)))
