"""`parcompile init`: a first spec from a model and a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from parcompile.diagnostics import has_errors
from parcompile.diagnostics.suggest import closest
from parcompile.model.presets import find_preset, presets
from parcompile.rules import check
from parcompile.spec.resolve import Resolution

_MICRO_BATCHES = 8


@click.command("init")
@click.option("--model", required=True, help="A preset, by its short or Hugging Face name.")
@click.option("--nodes", type=click.IntRange(1, 65536), default=1, show_default=True, help="Machines.")
@click.option("--gpus-per-node", type=click.IntRange(1, 256), default=8, show_default=True, help="Ranks on each.")
@click.option("--accelerator", default="h100-sxm", show_default=True, help="What a rank runs on.")
@click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens of a sequence; default: up to 8192.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="New file; default: print it.")
def command(
    model: str, nodes: int, gpus_per_node: int, accelerator: str, sequence_length: int | None, output: Path | None
) -> None:
    """Write a first spec for a model and a cluster.

    Chooses the smallest pp, then the smallest tp, for which the weights and the optimizer state fit and every rule
    passes.
    """
    preset = find_preset(model)
    if preset is None:
        near = closest(model, list(presets()))
        raise click.UsageError(f"there is no preset {model!r}" + (f"; did you mean {near}?" if near else ""))
    known = preset.config.get("max_position_embeddings", preset.config.get("n_positions", 1024))
    length = sequence_length or min(int(known), 8192)
    cluster = {"nodes": nodes, "gpus_per_node": gpus_per_node, "accelerator": accelerator}
    spec = _first_that_fits(preset.name, cluster, length)
    if spec is None:
        raise click.ClickException(
            f"no tp and pp were found with which {preset.name} fits on {nodes} · {gpus_per_node} {accelerator}: "
            "add nodes, or write a spec and read what `parcompile check` says"
        )
    text = json.dumps(spec, indent=2, ensure_ascii=False) + "\n"
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise click.ClickException(f"{output} exists already") from None
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written: {error.strerror}") from None
    click.echo(f"wrote {output}; compile it with: parcompile {output} -o plan")


def _first_that_fits(preset: str, cluster: dict[str, Any], length: int) -> dict[str, Any] | None:
    from parcompile import schema
    from parcompile.rules.arithmetic import divisors

    world = cluster["nodes"] * cluster["gpus_per_node"]
    for pp in (size for size in divisors(world) if size <= 128):
        for tp in divisors(cluster["gpus_per_node"]):
            if world % (tp * pp):
                continue
            dp = world // (tp * pp)
            training = {
                "sequence_length": length,
                "global_batch_size": dp * max(_MICRO_BATCHES, pp),
                "micro_batch_size": 1,
                "precision": "bf16",
                **({"gradient_accumulation_dtype": "fp32"} if pp > 1 else {}),
            }
            spec = {
                "version": 1,
                "name": preset,
                "model": {"preset": preset},
                "cluster": cluster,
                "parallelism": {"tp": tp, "cp": 1, "pp": pp, "dp": "auto", "sequence_parallel": tp > 1},
                "training": training,
                "zero": {"stage": 1},
            }
            validation = schema.validate(spec, "spec")
            if not validation.valid:
                raise click.UsageError(validation.diagnostics[0].message)
            if not has_errors(check(Resolution(spec))):
                return spec
    return None
