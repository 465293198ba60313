"""What an importer of another tool's files has to offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parcompile.plan import Plan
from parcompile.text import Document

from .reading import Account, Draft, Source


class RefusedError(ValueError):
    """A file that no spec can be made of. The message is meant for users."""


@dataclass(frozen=True, slots=True)
class Importer:
    """How files of one kind become specs.

    Attributes:
        tool: the tool, as people call it.
        tree: the values of a file out of its document.
        options: every option of a parsed file by its canonical name; `Undecided` where the file says no value.
        defaults: the tool's own value of each option, by the same names.
        read: takes the options over into a draft.
        written: what the same tool's exporter writes for a plan, by the same names. An import is checked against it:
            an option that comes out with another value was not carried.
        fate: what there is to say of an option that `read` does not look at; None when the tool does not know it.
        model_options: those options of a source that describe its model.
        meaning: what the tool makes of given options, where several of them say one thing. What comes out is compared
            with what came in by their meaning.
        stands_for: for an option that is another spelling of others, those others.
        changes: whether training becomes another one where an option comes out with another value.
        recognises: whether a parsed file, whose keys are no other tool's, is one of this. Only plug-ins need it.
    """

    tool: str
    options: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    defaults: Callable[[], Mapping[str, Any]]
    read: Callable[[Source, Draft], None]
    written: Callable[[Plan], Mapping[str, Any]]
    fate: Callable[[str, Any], Account | None] = lambda _name, _value: None
    tree: Callable[[Document], Mapping[str, Any]] = lambda document: document.tree  # type: ignore[assignment, return-value]
    model_options: Callable[[Source], list[str]] = lambda _source: []
    meaning: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda given: given
    stands_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    changes: Callable[[str], bool] = lambda _name: True
    recognises: Callable[[Mapping[str, Any]], bool] = lambda _tree: False
