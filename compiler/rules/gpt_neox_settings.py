"""Everything that is wrong with a gpt-neox file: its own keys, and DeepSpeed's in it as DeepSpeed gets them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parcompile.backends.deepspeed import configuration
from parcompile.backends.deepspeed.surroundings import BARE, Surroundings
from parcompile.backends.deepspeed.table import find
from parcompile.backends.gpt_neox.check import TUNED, deepspeed, findings
from parcompile.backends.gpt_neox.read import Excerpt, for_deepspeed, whole
from parcompile.diagnostics import Diagnostic, Severity
from parcompile.text import Document

from .file_registry import DEEPSPEED, GPT_NEOX, Settings, check_settings

_MADE_BY_GPT_NEOX = ("optimizer", "scheduler")
"""gpt-neox constructs these itself, from its own classes; DeepSpeed is handed what came of them."""
_BY_DEEPSPEED = "onebitadam"
"""The optimizer that DeepSpeed constructs for it."""
_TYPE = "K003"
"""What is still true of them: no class takes text for a number."""


def check_file(document: Document) -> list[Diagnostic]:
    """The diagnostics of a gpt-neox file, each mistake once. Files are meant to be combined: nothing is missing."""
    if not isinstance(document.tree, dict):
        return []
    own = whole(document)
    rules = check_settings(Settings(own.document.tree, own.document.invalid), GPT_NEOX)
    found: dict[tuple[Any, ...], Diagnostic] = {}
    for one in (
        *_of_deepspeed(for_deepspeed(document)),
        *map(own.in_file, findings(own.document)),
        *(own.in_file(own.document.locate(one)) for one in rules),
    ):
        found.setdefault((one.code, one.path), one)
    return list(found.values())


def _of_deepspeed(part: Excerpt) -> Iterator[Diagnostic]:
    tree = part.document.tree
    assert isinstance(tree, dict)
    keys = configuration.check(part.document, deepspeed(), needs_batch=False)
    made = () if _is_deepspeeds(tree.get("optimizer")) else _MADE_BY_GPT_NEOX
    passed = {key: value for key, value in keys.tree.items() if key not in made}
    rules = check_settings(
        Settings(passed, keys.invalid_paths, Surroundings(deepspeed(), "gpt-neox's requirements", BARE)), DEEPSPEED
    )
    for one in (*keys.diagnostics, *(part.document.locate(one) for one in rules if one.code[0] != "A")):
        top = one.path[0] if one.path else ""
        if top in made and one.code != _TYPE:
            continue
        if not (tree.get("autotuning") and top in TUNED):
            yield part.in_file(replace(one, severity=Severity.WARNING) if _is_ignored(one) else one)


def _is_ignored(one: Diagnostic) -> bool:
    """Whether DeepSpeed never looks at a key: gpt-neox's own files have such, and run."""
    holder = find(deepspeed(), *one.path[:-1]) if one.code == "K001" and one.is_error else None
    return holder is not None and not holder.strict


def _is_deepspeeds(optimizer: object) -> bool:
    kind = optimizer.get("type") if isinstance(optimizer, dict) else None
    return isinstance(kind, str) and kind.lower() == _BY_DEEPSPEED
