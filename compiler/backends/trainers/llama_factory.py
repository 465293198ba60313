"""LLaMA-Factory's YAML. Source: LLaMA-Factory at 2026-08-18, `hparams/`, and transformers' `TrainingArguments`."""

from __future__ import annotations

from parcompile.backends.kinds import LLAMA_FACTORY, TRAINER
from parcompile.backends.reading import Draft, Importer, Source

from . import METHOD, options, stored_tool
from .read import reader, with_deepspeed

TOOL = stored_tool("LLaMA-Factory")


def read(source: Source, draft: Draft) -> None:
    """What a spec has a place for."""
    if source.given.get("stage") in ("pt", "sft"):
        source.ignore("stage", "both train on the next token; your program masks the labels")
    elif "stage" in source.given:
        source.lose("stage", METHOD)
    if source.given.get("finetuning_type") == "full":
        source.ignore("finetuning_type", "all weights are trained")
    # Its patches switch recomputation on unless they are told not to.
    off = source.given.get("disable_gradient_checkpointing") is True
    draft.set(("training", "activation_checkpointing"), "none" if off else "full", said=True)
    if "disable_gradient_checkpointing" in source.given:
        source.used["disable_gradient_checkpointing"] = {("training", "activation_checkpointing")}
    reader(TOOL)(source, draft)


IMPORTER = Importer(
    tool="LLaMA-Factory",
    options=options,
    defaults=lambda: {**TOOL.all_defaults(), "cutoff_len": 2048},
    read=read,
    tree=lambda document: with_deepspeed(document, LLAMA_FACTORY),
)

_TRAINER = stored_tool("transformers' Trainer")
TRAINER_IMPORTER = Importer(
    tool="transformers",
    options=options,
    defaults=_TRAINER.all_defaults,
    read=reader(_TRAINER),
    tree=lambda document: with_deepspeed(document, TRAINER),
)
"""Reads `TrainingArguments` that are given as a file."""
