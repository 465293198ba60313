"""Files of other tools: whose a file is, and what is wrong with it on its own, as its tool would take it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from parcompile.backends.kinds import (
    DEEPSPEED,
    GPT_NEOX,
    MEGATRON,
    UNKNOWN,
    Certainty,
    Recognition,
    recognise,
    recognise_text,
)
from parcompile.diagnostics import Diagnostic, Severity
from parcompile.diagnostics import Path as KeyPath
from parcompile.text import Document, Result

if TYPE_CHECKING:
    from .deepspeed import UsageOptions

Check = Callable[[Document], list[Diagnostic]]

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
    from parcompile.backends.megatron.file import from_shell, from_tree, sourced_text

    if isinstance(tree, dict) and read.document is not None:
        return replace(read, document=from_tree(read.document)), found
    call = from_shell(read.source, variables, functools.partial(sourced_text, Path(read.source.file)))
    return (Result(read.source, call), found) if call is not None else (replace(read, document=None), _NOTHING)


def _is_shell_arguments(text: str) -> bool:
    from parcompile.backends.megatron.file import is_shell_arguments

    return is_shell_arguments(text)


def checker(read: Result, kind: str, file: Path | None, usage: UsageOptions | None = None) -> tuple[Result, Check]:
    """A text of this kind with what is wrong with it for its readers, and what finds everything else in a document.

    Args:
        read: the text.
        kind: what it is.
        file: where it stands, None for standard input; files near it say who reads it.
        usage: how it is used, where the user says so.
    """
    # A spec needs none of these, and a file of one tool nothing of the others.
    if kind == MEGATRON:
        from .megatron.check import check_file

        return readers_take_the_last(read), check_file
    if kind == GPT_NEOX:
        from .gpt_neox import check_file

        return readers_take_the_last(read), check_file
    assert kind == DEEPSPEED, kind
    from parcompile.lint.deepspeed.configuration import checker as deepspeed_checker

    return deepspeed_checker(read, file, usage)


def readers_take_the_last(read: Result) -> Result:
    """A key written twice becomes a warning, as an option given twice is."""
    return replace(
        read,
        diagnostics=tuple(
            replace(one, severity=Severity.WARNING) if one.code == "J009" else one for one in read.diagnostics
        ),
    )


_FURTHER = ("deepspeed",)
"""The section of a spec that holds further DeepSpeed keys."""


def check_sections(spec: Document) -> tuple[list[Diagnostic], frozenset[KeyPath]]:
    """What tools would not take of those sections of a spec that hold keys of theirs, and the paths of these keys."""
    further = spec.get(_FURTHER)
    if not isinstance(further, dict) or not further:
        return [], frozenset()
    from parcompile.lint.deepspeed.configuration import check_further

    return check_further(spec, _FURTHER)
