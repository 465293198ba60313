"""`parcompile init`, `plan` and `new`: a first spec from a model and a cluster, the plan of it, and a project."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click

from parcompile.cli import save, say, told, writing
from parcompile.cli.compile import command as compile_command
from parcompile.cli.options import (
    FiniteRange,
    accelerator_name,
    cluster_options,
    no_estimate_option,
    refuse_unwritable,
    seen_from,
    token_count,
)
from parcompile.cli.search import progress_bar
from parcompile.diagnostics import closest
from parcompile.diagnostics.reporters import Style, hanging
from parcompile.machines import named_accelerator
from parcompile.model.hf_config import ModelConfigError
from parcompile.model.presets import find_preset, near_presets, preset_alike, presets
from parcompile.project import EXECUTABLE, project_files, small_spec
from parcompile.project.rows import DataError, MissingPackageError, holds_answers
from parcompile.searching.first import Offer, batch_of, first_spec, sequence_length_of
from parcompile.spec.resolve.model import config_file, read_config
from parcompile.user_files import read_text


class Chosen(NamedTuple):
    """A model as a spec names it, its configuration, and the name that a run of it gets."""

    section: dict[str, Any]
    config: dict[str, Any]
    name: str


@click.command("init")
@click.argument("name", required=False, metavar="[MODEL]")
@click.option("--model", help="The same as MODEL.")
@cluster_options
@no_estimate_option("Count weights, gradients and optimizer state only, which are exact.")
@click.option("-y", "--yes", is_flag=True, help="Take the fastest layout without asking.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="New file. Default: print it.")
def command(
    name: str | None,
    model: str | None,
    hf_config: Path | None,
    sequence_length: int | None,
    output: Path | None,
    *,
    no_estimate: bool,
    yes: bool,
    **cluster: Any,
) -> None:
    """Write a first spec for a model and a cluster.

    MODEL is a preset, as in `parcompile init llama-3-70b`, the name of such a model on the Hugging Face Hub, or the
    path of a Hugging Face config.json or of its folder. The command searches tp, cp, ep, pp, the micro-batch,
    recomputation and the ZeRO stage, as `parcompile search` does, and offers the fastest layout that fits, the one
    that needs least memory, and the simplest one. In a terminal it asks which to write; with --yes, and elsewhere,
    it writes the fastest. If none fits, it says what would. In a terminal, without a model, it lists the presets
    and asks for the values.
    """
    if name is not None:
        if model is not None or hf_config is not None:
            raise click.UsageError(f"{name} and {'--model' if model else '--hf-config'} both name a model: give one")
        model = name
    if model is None and hf_config is None:
        if not sys.stdin.isatty():
            raise click.UsageError("name the model, as in parcompile init llama-3-8b, or with --hf-config PATH")
        model = _asked_model()
        machines, ranks = click.IntRange(1, 65536), click.IntRange(1, 256)
        cluster["nodes"] = click.prompt("Machines", default=cluster["nodes"], type=machines, err=True)
        cluster["gpus_per_node"] = click.prompt("Ranks on each", default=cluster["gpus_per_node"], type=ranks, err=True)
        cluster["accelerator"] = click.prompt(
            "Accelerator", default=cluster["accelerator"], value_proc=accelerator_name, err=True
        )
    folder = output.parent if output else Path()
    if output is not None:
        _refuse_to_write(output)
    chosen = chosen_model(model, hf_config, folder)
    if sequence_length is None:
        sequence_length = sequence_length_of(chosen.config)
    offers = offered(chosen, cluster, sequence_length, folder, estimate=not no_estimate)
    for line in offer_lines(offers, Style.of(sys.stderr)):
        say(line, err=True)
    taken = offers[0] if yes or len(offers) == 1 else _asked_offer(offers)
    text = spec_text(taken)
    if output is None:
        say(text, nl=False)
        return
    _refuse_to_write(output)  # a person may have thought for long
    save(output, text)
    say(f"wrote {output} ({taken.word}); compile it with: parcompile {output} -o plan")


def _refuse_to_write(*files: Path) -> None:
    """Before a search, which may take long.

    Raises:
        ClickException: one exists, or cannot be written.
    """
    for file in files:
        if os.path.lexists(file):
            raise click.ClickException(f"{file} exists already: name another with -o")
        refuse_unwritable(file)


def _asked_offer(offers: tuple[Offer, ...]) -> Offer:
    """The one that a person takes; the first where nobody can be asked."""
    if not sys.stdin.isatty():
        return offers[0]
    words = [one.word for one in offers]
    chosen = click.prompt("Which one", default=words[0], type=click.Choice(words), err=True)
    return offers[words.index(chosen)]


def _asked_model() -> str:
    """The model that a user names: a preset, or a path."""
    say(hanging("Presets: ", ", ".join(presets()), Style.of(sys.stderr).width), err=True)
    return str(click.prompt("Model (a preset, or the path of a Hugging Face config.json)", err=True))


def chosen_model(model: str | None, hf_config: Path | None, folder: Path) -> Chosen:
    """The model that the options name; a path is written relative to `folder`, where the spec will be.

    `model` is a preset, or the path of a file or folder that exists.

    Raises:
        UsageError: both or none is given, or there is no such preset.
        ClickException: the configuration cannot be read.
    """
    if (model is None) == (hf_config is None):
        raise click.UsageError("give one of --model and --hf-config")
    if hf_config is None:
        assert model is not None
        preset = find_preset(model)
        if preset is None and Path(model).exists():
            return chosen_model(None, Path(model), folder)
        if preset is None and (preset := preset_alike(model)) is not None:
            said = f"{model} is read as the preset {preset.name} ({preset.hf_name}): where its config.json differs, "
            say(hanging("", f"{said}name that file", Style.of(sys.stderr).width), err=True)
        if preset is None:
            near = near_presets(model) or tuple(filter(None, [closest(model, list(presets()))]))
            hint = f"did you mean {', '.join(near)}?" if near else "`parcompile init` in a terminal lists them."
            raise click.UsageError(
                f"there is no preset and no file {model!r}; {hint} For another model, download its config.json and "
                "name that file"
            )
        return Chosen({"preset": preset.name}, dict(preset.config), preset.name)
    file = config_file(hf_config)
    with told(ModelConfigError):
        config = read_config(file)
    return Chosen(
        {"hf_config": seen_from(folder, file)}, config, str(config.get("model_type") or file.resolve().parent.name)
    )


def offered(
    chosen: Chosen,
    cluster: dict[str, Any],
    length: int,
    folder: Path,
    precision: str = "bf16",
    *,
    training: dict[str, Any] | None = None,
    estimate: bool = True,
) -> tuple[Offer, ...]:
    """Layouts to choose from, the fastest first.

    Raises:
        UsageError: the schema refuses a value.
        ClickException: no layout fits.
    """
    in_order = {key: cluster[key] for key in ("nodes", "gpus_per_node", "accelerator")}  # however they were given
    try:
        found = first_spec(
            chosen.name,
            chosen.section,
            in_order,
            length,
            folder,
            precision,
            training=training,
            estimate=estimate,
            progress=progress_bar,
        )
    except ModelConfigError as error:
        raise click.UsageError(f"{chosen.section.get('hf_config', chosen.name)}: {error}") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not found.offers:
        nodes, width = cluster["nodes"], Style.of(sys.stderr).width
        where = f"{nodes} node{'s' * (nodes > 1)} of {cluster['gpus_per_node']} {cluster['accelerator']}"
        # click writes "Error: " in front of the first line.
        lines = [hanging("", f"no layout of {chosen.name} fits on {where}: {found.reason}", width - len("Error: "))]
        lines += ["what would fit:", *(hanging("  ", one, width) for one in found.remedies)] if found.remedies else []
        raise click.ClickException("\n".join(lines))
    return found.offers


def offer_lines(offers: tuple[Offer, ...], style: Style) -> list[str]:
    """Each offer with its reason, and what speaks against it."""
    wide = max(len(one.word) for one in offers)
    lines = []
    for one in offers:
        lines.append(hanging(f"{one.word:<{wide}}  ", one.reason, style.width))
        lines += [hanging(f"{'':<{wide}}  warning: ", said, style.width) for said in one.warnings]
    return lines


def spec_text(offer: Offer) -> str:
    """The file of an offer."""
    return json.dumps(offer.spec, indent=2, ensure_ascii=False) + "\n"


# `parcompile plan MODEL 2x8xH100 128k`: a spec and its plan in one line.

_CLUSTER = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<ranks>\d+)x(?P<accelerator>[a-z].*)", re.IGNORECASE)
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
@click.argument("length", metavar="[LENGTH]", type=token_count, required=False)
@click.option("--finetune", is_flag=True, help="Learning rate, schedule and batch of fine-tuning, not of pre-training.")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder. Default: MODEL's name.")
def plan_command(model: str, cluster: str, length: int | None, output: Path | None, *, finetune: bool) -> None:
    """Write a spec and its plan in one line.

    As in `parcompile plan llama-3.1-8b 2x8xH100 128k`. MODEL is as for `parcompile init`. CLUSTER is nodes x GPUs of a
    node x accelerator; of one node, 8xH100 is enough. LENGTH are the tokens of a sequence, as 4096, 128k or 1M; left
    out, up to 8192. The fastest layout that fits is taken; `parcompile init` offers others. The spec is written beside
    the folder of the plan.
    """
    nodes, ranks, accelerator = cluster_of(cluster)
    if output is not None and output.name not in ("", ".."):
        _refuse_to_write(output, output.with_name(f"{output.name}.json"))
    chosen = chosen_model(model, None, Path() if output is None else output.parent)
    tokens = length or sequence_length_of(chosen.config)
    folder = output or Path(chosen.name)
    if folder.name in ("", ".."):
        raise click.UsageError(f"-o {folder}: the spec gets the name of the plan's folder: name a new one")
    file = folder.with_name(f"{folder.name}.json")
    _refuse_to_write(folder, file)
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
    save(file, spec_text(offer))
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
    with told(ValueError, by=click.UsageError):
        name = named_accelerator(found["accelerator"])
    nodes, ranks = int(found["nodes"] or 1), int(found["ranks"])
    if not nodes or not ranks:
        raise click.UsageError(f"{text!r} is an empty cluster")
    return nodes, ranks, name


_EXISTING = click.Path(exists=True, path_type=Path)


@click.command("new")
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--model", help="A preset, or the path of a config.json. Default: a tiny model for a laptop.")
@cluster_options
@click.option("--weights", type=_EXISTING, help="Folder of safetensors to start from; its config.json is the model.")
@click.option("--tokenizer", type=_EXISTING, help="Folder of a tokenizer. Default: that of the weights, or bytes.")
@click.option("--data", type=_EXISTING, help="Text, JSON lines, parquet, Megatron's .bin, or a folder of one of them.")
@click.option("--finetune", is_flag=True, help="Learning rate, schedule and batch of fine-tuning, not of pre-training.")
@click.option("--lr", type=FiniteRange(min=0, min_open=True), help="Learning rate, in place of the usual one.")
@click.option("--batch", type=click.IntRange(min=1), help="Sequences of an optimizer step, in place of the usual.")
def new_command(
    directory: Path,
    model: str | None,
    hf_config: Path | None,
    sequence_length: int | None,
    weights: Path | None,
    tokenizer: Path | None,
    data: Path | None,
    lr: float | None,
    batch: int | None,
    *,
    finetune: bool,
    **cluster: Any,
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
    if data is not None:
        _check_data(data, needs_tokenizer=tokenizer is None)
    lines: list[str] = []
    extra = {}
    if model is None and hf_config is None:
        spec = small_spec()
        if lr is not None or batch is not None or finetune:
            raise click.UsageError("--lr, --batch and --finetune go with a model: name it, or its --weights")
    else:
        chosen = chosen_model(model, hf_config, Path())
        length = sequence_length or sequence_length_of(chosen.config)
        training = fine_tuning(cluster["nodes"] * cluster["gpus_per_node"], length) if finetune else {}
        if lr is not None:
            training["optimizer"] = {"type": "adamw", **training.get("optimizer", {}), "lr": lr}
            if "lr_scheduler" in training:
                training["lr_scheduler"] = {**training["lr_scheduler"], "min_lr": lr / 10}
        if batch is not None:
            training["global_batch_size"] = batch
        precision = "fp32" if cluster["accelerator"] == "cpu" else "bf16"
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
    with writing(directory, below=True):
        _write_files(directory, files)
    for name in files:
        say(f"wrote {directory / name}")
    for line in lines:
        say(line)
    say(f"next: cd {directory} && ./run.sh --steps 20")


def _check_data(data: Path, *, needs_tokenizer: bool) -> None:
    """Reads the first row as training will.

    Raises:
        ClickException: it cannot be read.
        UsageError: it holds prompts and answers, which need a tokenizer that is not there.
    """
    try:
        answers = holds_answers(data)
    except MissingPackageError as error:  # training may run elsewhere
        say(f"{data} is not looked into: {error}", err=True)
        return
    except DataError as error:
        raise click.ClickException(str(error)) from None
    if answers is not None and needs_tokenizer:
        raise click.UsageError(
            f"{answers} holds prompts and answers, which a tokenizer's chat template writes: name its folder with "
            "--tokenizer, or with --weights"
        )


def _write_files(directory: Path, files: dict[str, str]) -> None:
    """All files, or none: a folder that could not be filled is removed."""
    existed = directory.exists()
    try:
        for name, text in files.items():
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            if name in EXECUTABLE:
                file.chmod(0o755)
    except BaseException:
        for name in files:
            (directory / name).unlink(missing_ok=True)
        if not existed:
            shutil.rmtree(directory, ignore_errors=True)
        raise
