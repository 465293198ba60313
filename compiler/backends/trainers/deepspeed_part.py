"""The DeepSpeed configuration inside of a trainer's file, or named by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from parcompile.backends.deepspeed import facts
from parcompile.backends.deepspeed.read import IMPORTER
from parcompile.backends.following import named_files
from parcompile.backends.importer import RefusedError
from parcompile.backends.kinds import ACCELERATE
from parcompile.backends.reading import Draft, Source
from parcompile.text import Document, SourceError, read_file

PREFIX = "deepspeed."
_BUFFERS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Sizes that transformers computes from the hidden size, and that change no numbers."""


def with_deepspeed(document: Document, kind: str) -> dict[str, Any]:
    """The values of a trainer's file, with those of the DeepSpeed configuration that it names in its place.

    Raises:
        RefusedError: that file is not there, or cannot be read.
    """
    tree: dict[str, Any] = dict(document.tree) if isinstance(document.tree, Mapping) else {}
    nested = tree.get("deepspeed_config") if kind == ACCELERATE else None
    name = nested.get("deepspeed_config_file") if isinstance(nested, Mapping) else tree.get("deepspeed")
    if not isinstance(name, str):
        return tree
    if kind == ACCELERATE and not named_files(kind, tree, Path(document.file).resolve()):
        return tree  # what it would say is asked for
    if name.lstrip().startswith("{"):
        try:
            return {**tree, "deepspeed": json.loads(name)}
        except ValueError as error:
            raise RefusedError(f"deepspeed holds text that is not JSON: {error}") from error
    found = named_files(kind, tree, Path(document.file).resolve())
    if not found:
        raise RefusedError(f"deepspeed names {name}, which is not there: put it beside the file, or remove the key")
    try:
        read = read_file(found[0])
    except SourceError as error:
        raise RefusedError(str(error)) from error
    if read.document is None or not isinstance(read.document.tree, Mapping):
        why = read.why_unread or "a configuration is an object of keys and values"
        raise RefusedError(f"{found[0]} cannot be read: {why}")
    return {**tree, "deepspeed": dict(read.document.tree)}


def read_deepspeed(source: Source, draft: Draft) -> Draft | None:
    """Reads the DeepSpeed options of a source into a draft of their own; None when there are none.

    Values "auto" are those of the trainer, which it writes in their place: they are carried by its own options.
    """
    names = [name for name in source.given if name.startswith(PREFIX)]
    if not names:
        return None
    own: dict[str, Any] = {}
    for name in names:
        key = name.removeprefix(PREFIX)
        if source.given[name] != "auto":
            own[key] = source.given[name]
        elif key.rpartition(".")[2] in _BUFFERS:
            source.ignore(name, "the size of a buffer, which the plan writes itself")
        else:
            source.ignore(name, "the options beside it decide it")
    inner, found = Source(own, facts.DEFAULTS), Draft(draft.answers)
    IMPORTER.read(inner, found)
    for name, paths in inner.used.items():
        source.used[PREFIX + name] = paths
    for name, account in inner.reasons.items():
        source.reasons[PREFIX + name] = replace(account, option=PREFIX + name)
    # What the file leaves to the trainer is no default of DeepSpeed's.
    found.questions.pop(("training", "optimizer"), None)
    return found
