"""Files of other tools: whose a file is, and what is wrong with it on its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .backends.deepspeed import configuration
from .backends.deepspeed.surroundings import LIGHTNING, Surroundings
from .backends.kinds import GPT_NEOX, MEGATRON, UNKNOWN, Certainty, Recognition, recognise, recognise_text
from .diagnostics import Diagnostic
from .text import Document, Result

if TYPE_CHECKING:
    from .backends.megatron.file import Call

_NOTHING = Recognition(UNKNOWN, Certainty.UNKNOWN)


def recognised(
    read: Result, kind: str | None = None, variables: Mapping[str, str] | None = None
) -> tuple[Result, Recognition]:
    """What a text is, and the document to check: of Megatron-LM's arguments, that of the flags.

    Args:
        read: the text, parsed where it is JSON or YAML.
        kind: what it is, where that need not be found out.
        variables: those of the environment that a script would find.
    """
    tree = read.document.tree if read.document else None
    is_script = not isinstance(tree, dict) and Path(read.source.file).suffix not in (".json", ".yaml", ".yml")
    if kind is not None:
        found = Recognition(kind, Certainty.CERTAIN)
    elif is_script and _is_shell_arguments(read.source.text):
        found = Recognition(MEGATRON, Certainty.CERTAIN)
    elif read.document is None:
        found = recognise_text(read.source.text)
    else:
        found = recognise(tree)
    if found.kind != MEGATRON:
        return read, found
    # Only here and below: most files are none of Megatron-LM's.
    from .backends.megatron.file import from_shell, from_tree, sourced_text

    if isinstance(tree, dict) and read.document is not None:
        return replace(read, document=from_tree(read.document)), found
    call = from_shell(read.source, variables, functools.partial(sourced_text, Path(read.source.file)))
    return (Result(read.source, call), found) if call is not None else (replace(read, document=None), _NOTHING)


def _is_shell_arguments(text: str) -> bool:
    from .backends.megatron.file import is_shell_arguments

    return is_shell_arguments(text)


def found_in_settings(document: Document, kind: str, around: Surroundings | None = None) -> list[Diagnostic]:
    """Everything that is wrong with a configuration of this kind; `around` belongs to one of DeepSpeed."""
    if kind == MEGATRON:
        from .backends.megatron.file import Call, from_tree

        return _in_calls(document if isinstance(document, Call) else from_tree(document))
    if kind == GPT_NEOX:
        from .rules.gpt_neox_settings import check_file as check_neox

        return check_neox(document)
    from .rules.file_registry import Settings, check_settings

    assert around is not None
    keys = configuration.check(document, around.version, needs_batch=around.filler != LIGHTNING)
    found = check_settings(Settings(keys.tree, keys.invalid_paths, around), kind)
    return [*keys.diagnostics, *(document.locate(one) for one in found)]


def _in_calls(first: Call) -> list[Diagnostic]:
    """What is wrong with the calls of a script, each time once."""
    from .backends.megatron.check import findings
    from .rules.file_registry import check_settings
    from .rules.megatron_settings import MegatronSettings

    found: dict[tuple[Any, ...], Diagnostic] = {}
    for call in (first, *first.others):
        rules = map(call.locate, check_settings(MegatronSettings(call), MEGATRON))
        for one in (*findings(call), *rules):
            found.setdefault((one.code, one.position, one.message), one)
    return list(found.values())
