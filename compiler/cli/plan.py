"""`parcompile plan MODEL 2x8xH100 128k`: a spec and its plan in one line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click

from parcompile.atomic import write_file
from parcompile.diagnostics.reporters.dispatch import Style, hanging
from parcompile.machines.accelerator import named_accelerator
from parcompile.searching.first import batch_of, sequence_length_of

from .compile import command as compile_command
from .init import chosen_model, offer_lines, offered, spec_text
from .saying import say

_CLUSTER = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<ranks>\d+)x(?P<accelerator>[a-z].*)", re.IGNORECASE)
_LENGTH = re.compile(r"(?P<count>\d+(?:\.\d+)?)(?P<unit>[km]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 1024, "m": 1024**2}
USUAL_RANKS = 8
"""GPUs of a node, of most machines that are sold: of more, a user may have meant the GPUs of several nodes."""
FINE_TUNING_TOKENS = 2**19
"""Of a step of fine-tuning, about."""
FINE_TUNING: dict[str, Any] = {
    "train_steps": 1000,
    "optimizer": {"type": "adamw", "lr": 1e-5, "weight_decay": 0.0},
    "lr_scheduler": {"type": "cosine", "warmup_steps": 30, "min_lr": 1e-6},
}
"""What full fine-tuning of a language model usually has; a run changes it to its data."""


@click.command("plan")
@click.argument("model", metavar="MODEL")
@click.argument("cluster", metavar="CLUSTER")
@click.argument("length", metavar="[LENGTH]", required=False)
@click.option("--finetune", is_flag=True, help="Learning rate, schedule and batch of fine-tuning, not of pre-training.")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder. Default: MODEL's name.")
def command(model: str, cluster: str, length: str | None, output: Path | None, *, finetune: bool) -> None:
    """Write a spec and its plan in one line.

    As in `parcompile plan llama-3.1-8b 2x8xH100 128k`. MODEL is as for `parcompile init`. CLUSTER is nodes x GPUs of a
    node x accelerator; of one node, 8xH100 is enough. LENGTH are the tokens of a sequence, as 4096, 128k or 1M; left
    out, up to 8192. The fastest layout that fits is taken; `parcompile init` offers others. The spec is written beside
    the folder of the plan.
    """
    nodes, ranks, accelerator = cluster_of(cluster)
    chosen = chosen_model(model, None, Path() if output is None else output.parent)
    tokens = sequence_length_of(chosen.config) if length is None else length_of(length)
    folder = output or Path(chosen.name)
    if folder.name in ("", ".."):
        raise click.UsageError(f"-o {folder}: the spec gets the name of the plan's folder: name a new one")
    file = folder.with_name(f"{folder.name}.json")
    for one in (folder, file):
        if one.exists():
            raise click.ClickException(f"{one} exists already: name another folder with -o")
    training = fine_tuning(nodes * ranks, tokens) if finetune else None
    section = {"nodes": nodes, "gpus_per_node": ranks, "accelerator": accelerator}
    offer = offered(chosen, section, tokens, file.parent, training=training)[0]
    style = Style.of(sys.stderr)
    if ranks > USUAL_RANKS and ranks % USUAL_RANKS == 0:
        other = f"{nodes * ranks // USUAL_RANKS}x{USUAL_RANKS}x{accelerator}"
        nodes_said = "one node" if nodes == 1 else f"{nodes} nodes"
        say(f"{cluster} is {nodes_said} of {ranks} GPUs; for nodes of {USUAL_RANKS} write {other}", err=True)
    for line in offer_lines((offer,), style):
        say(line, err=True)
    if training is not None:
        say(fine_tuning_line(training, tokens, file, style), err=True)
    write_file(file, spec_text(offer))
    say(f"wrote {file}")
    click.get_current_context().invoke(compile_command, spec=str(file), output=folder)


def fine_tuning(world: int, tokens: int) -> dict[str, Any]:
    """`FINE_TUNING`, and the batch of a step for so many ranks and tokens of a sequence."""
    return dict(FINE_TUNING, global_batch_size=batch_of(world, tokens, FINE_TUNING_TOKENS))


def fine_tuning_line(training: dict[str, Any], tokens: int, file: Path, style: Style) -> str:
    """What `--finetune` has set in a spec."""
    rates, schedule = training["optimizer"], training["lr_scheduler"]
    said = (
        f"lr {rates['lr']:g}, {schedule['type']} to {schedule['min_lr']:g} over {training['train_steps']} steps "
        f"with {schedule['warmup_steps']} of warm-up, {training['global_batch_size']} sequences "
        f"({training['global_batch_size'] * tokens:,} tokens) a step: change them in {file}"
    )
    return hanging("fine-tuning: ", said, style.width)


def cluster_of(text: str) -> tuple[int, int, str]:
    """Nodes, ranks of a node and the name of the accelerator: `2x8xH100` is (2, 8, "h100-sxm").

    Raises:
        UsageError: it is written otherwise, or there is no such accelerator.
    """
    found = _CLUSTER.fullmatch(text)
    if found is None:
        raise click.UsageError(f"{text!r} is no cluster: write nodes x GPUs of a node x accelerator, as 2x8xH100")
    try:
        name = named_accelerator(found["accelerator"])
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    nodes, ranks = int(found["nodes"] or 1), int(found["ranks"])
    if not nodes or not ranks:
        raise click.UsageError(f"{text!r} is an empty cluster")
    return nodes, ranks, name


def length_of(text: str) -> int:
    """Tokens: `128k` is 131072, `1M` is 1048576.

    Raises:
        UsageError: it is written otherwise.
    """
    found = _LENGTH.fullmatch(text)
    tokens = float(found["count"]) * _UNITS[found["unit"].lower()] if found is not None else 0
    if not tokens or tokens != int(tokens):
        raise click.UsageError(f"{text!r} is no number of tokens: write 4096, 128k or 1M")
    return int(tokens)
