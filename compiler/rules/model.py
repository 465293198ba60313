"""The model can be read, and its positions reach as far as the sequence."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.presets import presets
from parcompile.resolve import Resolution
from parcompile.suggest import closest

from .registry import Finding, rule


@rule(
    "S003",
    "the model cannot be read",
    """The model is a preset, a Hugging Face config.json, or dimensions written out; its dimensions have to be complete and of a known
    family.""",
)
def model_can_be_read(spec: Resolution) -> Iterator[Finding]:
    """Fires on unknown presets, missing files, missing or impossible dimensions."""
    try:
        config = spec.model_config
        shape_from_config(config)
    except ModelConfigError as error:
        given = spec.get("model")
        path: tuple[str, ...] = ("model",)
        if error.key in given:
            path = ("model", str(error.key))
        elif "hf_config" in given:
            path = ("model", "hf_config")
        hint, fixes = None, ()
        if "preset" in given:
            known = closest(given["preset"], list(presets()))
            hint = f"did you mean {known}?" if known else f"known presets: {', '.join(presets())}"
            if known:
                edit = Edit(("model", "preset"), known)
                fixes = (Fix(f"use {known}", Safety.CHANGES_NUMERICS, (edit,)),)
        yield Finding(str(error), path, help=hint, fixes=fixes)


@rule(
    "S001",
    "the sequence is longer than the model's positions",
    """A learned position table has max_position_embeddings rows and cannot be read beyond them. Rotary positions can be computed for any
    length, but the model was not made for more than max_position_embeddings.""",
    sources=("Megatron-LM arguments.py",),
)
def learned_positions_reach(spec: Resolution) -> Iterator[Finding]:
    """Fires for learned positions; S004 warns for rotary ones."""
    length, limit = spec.sequence_length, spec.shape.max_position_embeddings
    if not spec.shape.rotary and length > limit:
        yield Finding(
            f"sequence_length {length} > max_position_embeddings {limit}, and the positions are a table of {limit} rows",
            ("training", "sequence_length"),
            help=f"write {limit} or less",
        )


@rule(
    "S004",
    "the sequence is longer than the model's rotary positions were made for",
    """Rotary positions beyond max_position_embeddings are computed, but pre-trained weights have never seen them; long-context training
    changes the base (rope_theta) or scales the positions.""",
    severity=Severity.WARNING,
)
def rotary_positions_reach(spec: Resolution) -> Iterator[Finding]:
    """Fires for rotary positions."""
    length, limit = spec.sequence_length, spec.shape.max_position_embeddings
    if spec.shape.rotary and length > limit:
        yield Finding(
            f"sequence_length {length} > max_position_embeddings {limit}",
            ("training", "sequence_length"),
            help="for long-context training use a config with a larger rope_theta and max_position_embeddings",
        )


@rule(
    "L001",
    "the layers do not divide into stages",
    """Every pipeline stage holds the same number of layers; a layer is never dropped.""",
    sources=("Megatron-LM arguments.py; Megatron-LM#1304",),
)
def layers_divide_into_stages(spec: Resolution) -> Iterator[Finding]:
    """Fires when num_hidden_layers % pp is not 0."""
    layers, pp = spec.shape.num_hidden_layers, spec.axis("pp")
    if layers % pp:
        legal = ", ".join(str(stages) for stages in range(1, layers + 1) if layers % stages == 0)
        yield Finding(
            f"{layers} layers on pp {pp}: {layers} / {pp} is not whole",
            ("parallelism", "pp"),
            help=f"pp can be {legal}",
        )
