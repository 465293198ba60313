"""`parcompile new DIR`: a project that trains as it stands."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import click

from parcompile.cli.init import fine_tuning, fine_tuning_line
from parcompile.diagnostics.reporters import Style, hanging
from parcompile.project import EXECUTABLE, project_files, small_spec
from parcompile.searching.first import sequence_length_of
from parcompile.user_files import read_text

from . import say
from .init import chosen_model, offer_lines, offered, spec_text
from .options import accelerator_option, sequence_length_option

_EXISTING = click.Path(exists=True, path_type=Path)


@click.command("new")
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--model", help="A preset, or the path of a config.json. Default: a tiny model for a laptop.")
@click.option("--hf-config", type=click.Path(path_type=Path), help="A Hugging Face config.json, or its folder.")
@click.option("--nodes", type=click.IntRange(1, 65536), default=1, show_default=True, help="Machines.")
@click.option("--gpus-per-node", type=click.IntRange(1, 256), default=8, show_default=True, help="Ranks on each.")
@accelerator_option(default="h100-sxm", show_default=True)
@sequence_length_option("Tokens of a sequence, as 4096, 128k or 1M. Default: up to 8192.")
@click.option("--weights", type=_EXISTING, help="Folder of safetensors to start from; its config.json is the model.")
@click.option("--tokenizer", type=_EXISTING, help="Folder of a tokenizer. Default: that of the weights, or bytes.")
@click.option("--data", type=_EXISTING, help="Text, JSON lines, parquet, Megatron's .bin, or a folder of one of them.")
@click.option("--finetune", is_flag=True, help="Learning rate, schedule and batch of fine-tuning, not of pre-training.")
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), help="Learning rate, in place of the usual one.")
@click.option("--batch", type=click.IntRange(min=1), help="Sequences of an optimizer step, in place of the usual.")
def command(
    directory: Path,
    model: str | None,
    hf_config: Path | None,
    nodes: int,
    gpus_per_node: int,
    accelerator: str,
    sequence_length: int | None,
    weights: Path | None,
    tokenizer: Path | None,
    data: Path | None,
    lr: float | None,
    batch: int | None,
    *,
    finetune: bool,
) -> None:
    """Create a project that trains as it stands.

    DIR gets a spec, a training script with data loading, evaluation, checkpoints, resume and export, launch scripts
    and a CI workflow. Without --model, --hf-config and --weights the spec has a tiny model for two processes of a CPU.
    A Hugging Face config.json is copied into the project; --weights, --tokenizer and --data are written to its
    train.args.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise click.ClickException(f"{directory} exists already and is not an empty folder")
    if weights is not None and model is None and hf_config is None:
        hf_config = weights
    if tokenizer is None and weights is not None and any(weights.glob("tokenizer*")):
        tokenizer = weights
    named = {"weights": weights, "tokenizer": tokenizer, "data": data}
    arguments = {key: os.path.realpath(path) for key, path in named.items() if path is not None}
    where = os.path.realpath(directory)
    for word, path in {"DIR": where, **{f"--{key}": path for key, path in arguments.items()}}.items():
        if re.search("[\x00-\x1f\x7f\ud800-\udfff]", path):  # control characters, and bytes that are no text
            raise click.UsageError(f"{word}: the files of a project cannot name {path!r}: rename it")
    lines: list[str] = []
    extra = {}
    if model is None and hf_config is None:
        spec = small_spec()
        if lr is not None or batch is not None or finetune:
            raise click.UsageError("--lr, --batch and --finetune go with a model: name it, or its --weights")
    else:
        chosen = chosen_model(model, hf_config, Path())
        length = sequence_length or sequence_length_of(chosen.config)
        cluster = {"nodes": nodes, "gpus_per_node": gpus_per_node, "accelerator": accelerator}
        training = fine_tuning(nodes * gpus_per_node, length) if finetune else {}
        if lr is not None:
            training["optimizer"] = {"type": "adamw", **training.get("optimizer", {}), "lr": lr}
            if "lr_scheduler" in training:
                training["lr_scheduler"] = {**training["lr_scheduler"], "min_lr": lr / 10}
        if batch is not None:
            training["global_batch_size"] = batch
        precision = "fp32" if accelerator == "cpu" else "bf16"
        offer = offered(chosen, cluster, length, Path(), precision, training=training or None)[0]
        style = Style.of(sys.stdout)
        spec, lines = spec_text(offer), offer_lines((offer,), style)
        if finetune:
            lines.append(fine_tuning_line(training, length, directory / "spec.json", style))
            if weights is None:
                said = "random weights: name the model's folder with --weights when you run it"
                lines.append(hanging("starts from: ", said, style.width))
        if (file := chosen.section.get("hf_config")) is not None:
            extra["config.json"] = read_text(file)
            spec = spec.replace(json.dumps(file), '"config.json"')
    files = project_files(Path(where).name, spec, arguments) | extra
    try:
        _write(directory, files)
    except OSError as error:
        raise click.ClickException(f"{error.filename or directory} cannot be written: {error.strerror}") from None
    for name in files:
        say(f"wrote {directory / name}")
    for line in lines:
        say(line)
    say(f"next: cd {directory} && ./run.sh --steps 20")


def _write(directory: Path, files: dict[str, str]) -> None:
    """All files, or none: a folder that could not be filled is removed."""
    existed = directory.exists()
    try:
        for name, text in files.items():
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            if name in EXECUTABLE:
                file.chmod(0o755)
    except OSError:
        for name in files:
            (directory / name).unlink(missing_ok=True)
        if not existed:
            shutil.rmtree(directory, ignore_errors=True)
        raise
