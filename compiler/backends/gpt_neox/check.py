"""What gpt-neox does not take of a configuration: names, types and choices (NeoXArgs.validate_types)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from parcompile.diagnostics import Diagnostic, Severity
from parcompile.diagnostics.suggest import closest, misspelt
from parcompile.schema import load
from parcompile.text import Document

from .options import Facts, is_current, options, spelling, versions

_SAID = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "list": "a list"}
_SAID |= {"dict": "a mapping"}


def findings(document: Document) -> Iterator[Diagnostic]:
    """What is wrong with the keys and values of a file; keys in DeepSpeed's sections are DeepSpeed's to check."""
    tree: Mapping[str, Any] = document.tree if isinstance(document.tree, dict) else {}
    for key, value in tree.items():
        name, path = spelling(str(key)), (key,)
        if name not in options():
            yield document.locate(_unknown(str(key), name), key=True)
            continue
        if not is_current(name):
            last = versions()[options()[name][-1].until]
            message = f"gpt-neox has {name} up to {last} and not in {versions()[-1]}"
            yield document.locate(Diagnostic("K001", Severity.INFO, message, path), key=True)
        problem = None if name in load("ds_config")["properties"] else wrong(name, value)
        if problem is not None:
            code = "K003" if not _of_type(options()[name][-1], value) else "K004"
            yield document.locate(Diagnostic(code, Severity.ERROR, problem, path))


def _unknown(key: str, name: str) -> Diagnostic:
    near = misspelt(name, options())
    path, error = (key,), Severity.ERROR
    if near is None and name in load("ds_config")["properties"]:
        message = f"gpt-neox refuses DeepSpeed's {key} at this place"
        return Diagnostic("K001", error, message, path, help="write it under deepspeed_extra_args")
    message = f"gpt-neox has no {key}"
    # A fork may have options of its own: only what looks like a known one is certain to be a mistake.
    hint = f"did you mean {near}?" if near else "a fork may have it; gpt-neox itself stops at it"
    return Diagnostic("K001", error if near else Severity.WARNING, message, path, help=hint)


def wrong(name: str, value: Any) -> str | None:
    """Why no version takes a value; None when one does."""
    facts = options().get(name)
    if facts is None or value is None or value == "auto" or any(_takes(one, value) for one in facts):
        return None
    newest = facts[-1]
    if not _of_type(newest, value):
        return f"{name} takes {' or '.join(_SAID.get(one, one) for one in newest.types)}, not {value!r}"
    near = closest(str(value), [str(one) for one in newest.choices or ()])
    hint = f"; did you mean {near}?" if near else ""
    return f"{name} is one of {', '.join(map(str, newest.choices or ()))}, not {value!r}{hint}"


def _takes(facts: Facts, value: Any) -> bool:
    if not _of_type(facts, value):
        return False
    return facts.choices is None or str(value).lower() in [str(one).lower() for one in facts.choices]


def _of_type(facts: Facts, value: Any) -> bool:
    kind = type(value).__name__
    return "any" in facts.types or kind in facts.types or (kind == "int" and "float" in facts.types)
