"""`parcompile prove --engine NAME`: small drawn runs of an engine beside one plain process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from parcompile.backends.writing import to_text
from parcompile.user_files import read_text

from .numbers import positive_number

_MAX_BYTES = 16 << 20


@click.command("prove")
@click.option("--engine", required=True, help="deepspeed, transformers, parcompile, or the path of an adapter (.py).")
@click.option("--cells", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many to draw.")
@click.option("--cell", "chosen", multiple=True, metavar="NAME=VALUE,…", help="This cell, instead of drawn ones.")
@click.option("--config", type=click.Path(path_type=Path), help="Run DeepSpeed with the other keys of this file.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of what is drawn.")
@click.option("--ranks", type=click.IntRange(1, 8), default=4, show_default=True, help="At most so many.")
@click.option("--python", default=sys.executable, metavar="PATH", help="The interpreter that has the engine.")
@click.option("--timeout", type=positive_number, default=180.0, show_default=True, help="Seconds for a cell.")
@click.option("--no-shrink", is_flag=True, help="Do not look for the fewest features of a red cell.")
@click.option("--verify", "certificate", type=click.Path(path_type=Path), help="Run the cells of a certificate again.")
@click.option("--format", "form", type=click.Choice(["text", "json", "junit"]), default="text", show_default=True)
@click.pass_context
def command(
    context: click.Context,
    /,
    engine: str,
    cells: int,
    chosen: tuple[str, ...],
    config: Path | None,
    seed: int,
    ranks: int,
    python: str,
    timeout: float,
    no_shrink: bool,
    certificate: Path | None,
    form: str,
) -> None:
    """Compare an engine's training steps with those of one process.

    Draws tiny models, layouts and options, runs each on gloo ranks of this machine, and compares the loss, the
    gradient norm before clipping, and every parameter relative to its update, with plain transformers and torch.
    A cell is equal; rounding, where the last bits of the weights do as much to one process; red; or not runnable.
    Exit code 1 when one is red, or when none ran. Needs the extras [runtime] and [hf].
    """
    try:
        # Only here: the compiler itself works without torch.
        from parcompile.runtime.prove import Certificate, Engine, EngineError, Proved, prove, verify
    except ImportError as error:
        raise click.ClickException(f"{error}; pip install 'parcompile[runtime,hf]'") from None

    def tell(number: int, one: Proved) -> None:
        if form == "text":
            click.echo(f"{number:>4}  " + shown.line(one).replace("\n", "\n      "))

    try:
        with Engine(engine, python, timeout) as running:
            shown = Certificate(engine, running.versions, "", seed, (), running.features)
            if certificate is not None:
                differing = verify(running, Certificate.from_json(_json(certificate)))
                click.echo("\n".join(differing) or f"{certificate}: every cell is as it says")
                if differing:
                    context.exit(1)
                return
            asked = [_cell(one) for one in chosen] or running.draw(cells, seed, ranks)
            if config is not None:
                asked = [{**one, **_of_config(config, running.features)} for one in asked]
            found = prove(running, asked, seed=seed, shrinks=not no_shrink, each=tell)
    except (EngineError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if form == "text":
        click.echo(found.summary())
    else:
        click.echo(to_text(found.to_json()) if form == "json" else found.to_junit(), nl=form == "junit")
    if not found.proves:
        context.exit(1)


def _cell(text: str) -> dict[str, Any]:
    """The features of `tp=2,clipping=0.5,tied=true`."""
    found = {}
    for part in filter(None, text.split(",")):
        name, given, value = part.partition("=")
        if not given:
            raise click.BadParameter(f"{part!r} has no value: write NAME=VALUE", param_hint="--cell")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value.strip()  # a word
    return found


def _of_config(path: Path, features: dict[str, Any]) -> dict[str, Any]:
    """The file, and the features that it decides.

    Raises:
        ValueError: it is no configuration, or asks for what the adapter has not.
    """
    if "config" not in features:
        raise ValueError("--config is read by --engine deepspeed alone")
    tree = _json(path)
    if not isinstance(tree, dict):
        raise click.ClickException(f"{path} is not a mapping of DeepSpeed's keys")
    zero, low = tree.get("zero_optimization") or {}, tree.get("bf16") or {}
    found: dict[str, Any] = {"config": json.dumps(tree), "stage": zero.get("stage", 0)}
    if low.get("enabled"):
        found["dtype"] = "bf16"
    if tree.get("gradient_clipping"):
        found["clipping"] = 0.5  # low enough to be active on a tiny model
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(read_text(path, _MAX_BYTES))
    except OSError as error:
        raise click.ClickException(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise click.ClickException(f"{path} is not JSON: {error}") from None
