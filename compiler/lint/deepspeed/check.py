"""Everything that is wrong with a DeepSpeed configuration: a file, or the section of a spec with further keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path as FilePath

from parcompile.backends.deepspeed.facts import refusal
from parcompile.backends.deepspeed.table import newest
from parcompile.backends.kinds import DEEPSPEED
from parcompile.diagnostics import Diagnostic, Path
from parcompile.lint.registry import Settings, check_settings
from parcompile.text import Document, Result

from . import configuration
from .usage import LIGHTNING, UsageOptions, text_diagnostics, usage_context


def checker(
    read: Result, file: FilePath | None, options: UsageOptions | None
) -> tuple[Result, Callable[[Document], list[Diagnostic]]]:
    """A text with what is wrong with it for those who read it, and what finds everything else in a document."""
    usage = usage_context(read.document.tree if read.document else None, file, options or UsageOptions())

    def check(document: Document) -> list[Diagnostic]:
        needs_batch = usage.filler != LIGHTNING and not usage.is_template
        keys = configuration.check(document, usage.version, needs_batch=needs_batch)
        found = check_settings(Settings(keys.tree, keys.invalid_paths, usage), DEEPSPEED)
        return [*keys.diagnostics, *(document.locate(one) for one in found)]

    return replace(read, diagnostics=text_diagnostics(read.diagnostics, usage)), check


def check_further(spec: Document, prefix: Path) -> tuple[list[Diagnostic], frozenset[Path]]:
    """What DeepSpeed would not take of the keys under `prefix` of a spec, with paths from the spec's root."""
    place = spec.place(prefix)
    assert place is not None
    part = replace(
        spec,
        tree=spec.get(prefix),
        root=place,
        invalid=frozenset(path[1:] for path in spec.invalid if path[:1] == prefix),
        duplicates=frozenset(path[1:] for path in spec.duplicates if path[:1] == prefix),
    )
    found = configuration.check(part, newest(), needs_batch=False)

    def counts(path: Path) -> bool:
        # What the plan decides has rules of its own.
        return bool(path) and refusal(path) is None

    diagnostics = [_under(prefix, one) for one in found.diagnostics if counts(one.path)]
    return diagnostics, frozenset((*prefix, *path) for path in found.invalid_paths if counts(path))


def _under(prefix: Path, one: Diagnostic) -> Diagnostic:
    """A diagnostic of a part of a document, as one of the whole."""
    fixes = tuple(
        replace(fix, edits=tuple(replace(edit, path=(*prefix, *edit.path)) for edit in fix.edits)) for fix in one.fixes
    )
    related = tuple(replace(other, path=(*prefix, *other.path)) for other in one.related)
    return replace(one, path=(*prefix, *one.path), fixes=fixes, related=related)
