"""`parcompile prove --engine NAME`: small drawn runs of an engine beside one plain process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parcompile.backends.artefacts import to_text
from parcompile.backends.kinds import DEEPSPEED, UNKNOWN, recognise
from parcompile.diagnostics import Diagnostic
from parcompile.schema import validate
from parcompile.text import Document, SourceError, read_file

from . import needing, say, told, writing
from .options import SECONDS, form_option, json_or_word

if TYPE_CHECKING:
    from parcompile.runtime.prove import Certificate, Engine


@click.command("prove")
@click.option(
    "--engine",
    help="deepspeed, transformers, accelerate, megatron, torchtitan, parcompile, or the path of an adapter (.py).",
)
@click.option("--cells", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many to draw.")
@click.option("--cell", "chosen", multiple=True, metavar="TEXT", help="This cell, as it is printed, or NAME=VALUE,…")
@click.option("--config", type=click.Path(path_type=Path), help="Run DeepSpeed with the other keys of this file.")
@click.option("--plan", type=click.Path(path_type=Path), help="Prove the layout of this plan, for a small model.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of what is drawn.")
@click.option("--ranks", type=click.IntRange(1, 8), default=4, show_default=True, help="At most so many.")
@click.option("--python", default=sys.executable, metavar="PATH", help="The interpreter that has the engine.")
@click.option("--timeout", type=SECONDS, default=180.0, show_default=True, help="Seconds for a cell.")
@click.option("--no-shrink", is_flag=True, help="Do not shrink and explain red cells.")
@click.option("--verify", "certificate", type=click.Path(path_type=Path), help="Run the cells of a certificate again.")
@click.option("--scripts", type=click.Path(path_type=Path), help="Write scripts that show red cells to this folder.")
@form_option("text", "json", "junit")
@click.pass_context
def command(
    context: click.Context,
    /,
    engine: str | None,
    cells: int,
    chosen: tuple[str, ...],
    config: Path | None,
    plan: Path | None,
    seed: int,
    ranks: int,
    python: str,
    timeout: float,
    no_shrink: bool,
    certificate: Path | None,
    scripts: Path | None,
    form: str,
) -> None:
    """Compare an engine's training steps with those of one process.

    Draws tiny models, layouts and options, runs each on gloo ranks of this machine, and compares the loss, the
    gradient norm before clipping, and every parameter relative to its update, with plain transformers and torch.
    A cell is equal; rounding, where the last bits of the weights do as much to one process; red; or not runnable.
    Exit code 1 when one is red, or when none ran. Needs the extras [runtime] and [hf].
    """
    with needing("runtime,hf"):
        from parcompile.runtime.prove import Certificate, Engine, EngineError, Proved, prove, undrawn

    def tell(number: int, one: Proved) -> None:
        say(f"{number:>4}  " + shown.line(one).replace("\n", "\n      "), err=form != "text")

    with told(EngineError, ValueError):
        if certificate is not None and (config or plan or chosen or scripts or form != "text"):
            raise click.UsageError(
                "--verify runs the cells of its certificate: leave --config, --plan, --cell, --scripts and --format out"
            )
        again = None if certificate is None else _certificate(certificate)
        if scripts is not None:
            with writing(scripts):
                scripts.mkdir(parents=True, exist_ok=True)
        if config is not None and plan is not None:
            raise click.UsageError("--config is a DeepSpeed configuration and --plan a plan: give one of them")
        decided = None if config is None else _decided(config)
        decided = decided if plan is None else _of_plan(plan, ranks)
        name = engine or (again.engine if again else None) or ("parcompile" if plan else None)
        if name is None:
            raise click.UsageError("--engine says which engine; --verify FILE and --plan PLAN alone run without it")
        with Engine(name, python, timeout) as running:
            if again is not None:
                context.exit(_verified(running, again, str(certificate), ranks))
            if config is not None and "config" not in running.features:
                raise click.ClickException("--config is read by --engine deepspeed alone")
            if plan is not None and "plan" not in running.features:
                raise click.ClickException("--plan is executed by --engine parcompile alone")
            shown = Certificate(name, running.versions, {}, "", seed, (), running.features)
            asked = [_cell(one, running.features, decided or {}) for one in chosen]
            if not asked:
                asked = running.draw(cells, seed, ranks, decided and {"pp": 1, **decided})
                if 0 < len(asked) < cells:
                    said = f"{len(asked)} of {cells} cells: {name} supports nothing that was drawn for the others"
                    say(said, err=True)
                drawn_of = {**running.features, **{feature: (one,) for feature, one in (decided or {}).items()}}
                if asked and (never := undrawn(drawn_of, asked)):
                    said = ", ".join(f"{feature} {value}" for feature, value in never)
                    say(f"no cell has {said}: {len(asked)} cells of at most {ranks} ranks leave no room", err=True)
                asked = asked or [{}]  # none of these is supported: the simplest says why
            found = prove(running, asked, seed=seed, most_ranks=ranks, shrinks=not no_shrink, each=tell)
    for number, one in enumerate(found.cells, 1):
        if scripts is not None and "script" in one.answer:
            (scripts / f"{Path(name).stem}_{number}.py").write_text(one.answer["script"], encoding="utf-8")
            if name.endswith(".py"):
                with suppress(shutil.SameFileError):
                    shutil.copy(name, scripts)  # beside the script that imports it
    if scripts is not None:
        with suppress(OSError):
            scripts.rmdir()  # empty where no script was written
    if form == "text":
        say(found.summary())
    else:
        say(to_text(found.to_json()) if form == "json" else found.to_junit(), nl=form == "junit")
    if not found.proves:
        context.exit(1)


def _verified(running: Engine, certificate: Certificate, file: str, ranks: int) -> int:
    from parcompile.runtime.prove import verify

    differing = verify(running, certificate, ranks)
    say("\n".join(differing) or f"{file}: every cell is as it says")
    return 1 if differing else 0


def _cell(text: str, features: Mapping[str, tuple[Any, ...]], decided: Mapping[str, Any]) -> dict[str, Any]:
    """The features of `qwen3 tp 2 clipping 0.5 tied`, or of `family=qwen3,tp=2,clipping=0.5,tied=true`."""
    from parcompile.runtime.prove import cell_of

    found = {} if "=" in text else cell_of(text, features, decided)
    for part in filter(None, text.split(",") if "=" in text else ()):
        name, given, value = part.partition("=")
        if not given:
            raise click.BadParameter(f"{part!r} has no value: write NAME=VALUE", param_hint="--cell")
        found[name.strip()] = json_or_word(value.strip())
    for name, value in decided.items():
        if found.setdefault(name, value) != value:
            raise ValueError(f"{name} {found[name]}: the file decides that it is {value}")
    return found


def _decided(path: Path) -> dict[str, Any]:
    """The features that a DeepSpeed configuration decides, and which of its keys cells do not carry."""
    from parcompile.runtime.prove import GivenError, given

    document = _read(path)
    if (kind := recognise(document.tree).kind) not in (DEEPSPEED, UNKNOWN):
        raise click.ClickException(f"{path} is of kind {kind}: --config is a DeepSpeed configuration")
    try:
        found = given(document.tree)
    except GivenError as error:
        line = document.position(error.path, key=True).line
        raise click.ClickException(f"{path}:{line}: {error}") from None
    said = [(document.position(key, key=True).line, ".".join(key), why) for key, why in found.left_out.items()]
    for line, name, why in sorted(said):
        say(f"{path}:{line}: {name} is not carried: {why}", err=True)
    return dict(found.cell)


def _of_plan(path: Path, ranks: int) -> dict[str, Any]:
    """The features that a plan decides, and what of it cells do not carry."""
    from parcompile.plan import load_plan
    from parcompile.runtime.prove import GivenError, of_plan

    try:
        found = of_plan(load_plan(path), ranks)
    except GivenError as error:
        raise click.ClickException(f"{path}: {error}") from None
    for key, why in found.left_out.items():
        say(f"{path}: {'.'.join(key)} is not carried: {why}", err=True)
    return dict(found.cell)


def _certificate(path: Path) -> Certificate:
    from parcompile.runtime.prove import Certificate

    document = _read(path)
    _refuse_wrong(path, validate(document, "certificate").diagnostics)
    return Certificate.from_json(document.tree)


def _read(path: Path) -> Document:
    with told(SourceError):
        read = read_file(path)
    _refuse_wrong(path, [one for one in read.diagnostics if one.is_error])
    assert read.document is not None
    return read.document


def _refuse_wrong(path: Path, wrong: Sequence[Diagnostic]) -> None:
    if wrong:
        line = wrong[0].position.line if wrong[0].position else 1
        raise click.ClickException(f"{path}:{line}: {wrong[0].message}")
