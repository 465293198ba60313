"""Everything that is wrong with a gpt-neox file: its own keys, and DeepSpeed's in it as DeepSpeed gets them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from parcompile.backends.deepspeed.table import as_schema, find
from parcompile.backends.gpt_neox import ANY, DEEPSPEED_VERSION, REPLACED, VERSIONS, WORDS, Field, fields
from parcompile.backends.gpt_neox.beside import Beside, beside
from parcompile.backends.gpt_neox.read import Excerpt, for_deepspeed, whole
from parcompile.backends.kinds import DEEPSPEED, GPT_NEOX
from parcompile.diagnostics import Diagnostic, Path, Severity
from parcompile.lint.deepspeed import BARE, UsageContext, configuration
from parcompile.lint.registry import Settings, check_settings
from parcompile.schema.keys import choice, mismatch, unknown_key
from parcompile.schema.values import Findings, named
from parcompile.text import Document, Place

from .rules import NeoxSettings

_MADE_BY_GPT_NEOX = ("optimizer", "scheduler")
"""gpt-neox constructs these itself, from its own classes; DeepSpeed is handed what came of them."""
_BY_DEEPSPEED = "onebitadam"
"""The optimizer that DeepSpeed constructs for it."""
_READ_BY_GPT_NEOX = (("fp32_allreduce",),)
"""Keys that it hands to DeepSpeed, which does not look at them, and reads itself (megatron/mpu/mappings.py)."""
_TYPE = "K003"
"""What is still true of them: no class takes text for a number."""


def check_file(document: Document) -> list[Diagnostic]:
    """The diagnostics of a gpt-neox file, each mistake once. Files are meant to be combined: nothing is missing."""
    if not isinstance(document.tree, dict):
        return []
    own, fork = whole(document), beside(document.file)
    rules = check_settings(NeoxSettings(own.document.tree, own.document.invalid, fork), GPT_NEOX)
    found: dict[tuple[Any, ...], Diagnostic] = {}
    for one in (
        *_of_deepspeed(for_deepspeed(document)),
        *map(own.in_file, _of_keys(own.document, fork)),
        *(own.in_file(own.document.locate(one)) for one in rules),
    ):
        first = found.setdefault((one.code, one.path), one)
        if one.is_error and not first.is_error:
            found[one.code, one.path] = one  # gpt-neox refuses what DeepSpeed would take for another value
    return list(found.values())


def _of_deepspeed(part: Excerpt) -> Iterator[Diagnostic]:
    tree = part.document.tree
    assert isinstance(tree, dict)
    keys = configuration.check(part.document, DEEPSPEED_VERSION, needs_batch=False)
    made = () if _is_deepspeeds(tree.get("optimizer")) else _MADE_BY_GPT_NEOX
    passed = {key: value for key, value in keys.tree.items() if key not in made}
    rules = check_settings(
        Settings(passed, keys.invalid_paths, UsageContext(DEEPSPEED_VERSION, "gpt-neox's requirements", BARE)),
        DEEPSPEED,
    )
    for one in (*keys.diagnostics, *(part.document.locate(one) for one in rules if one.code[0] != "A")):
        top = one.path[0] if one.path else ""
        if (top in made and one.code != _TYPE) or (one.code == "K001" and one.path in _READ_BY_GPT_NEOX):
            continue
        if not (tree.get("autotuning") and top in TUNED):
            yield part.in_file(replace(one, severity=Severity.WARNING) if _is_ignored(one) else one)


def _is_ignored(one: Diagnostic) -> bool:
    """Whether DeepSpeed never looks at a key: gpt-neox's own files have such, and run."""
    holder = find(DEEPSPEED_VERSION, *one.path[:-1]) if one.code == "K001" and one.is_error else None
    return holder is not None and not holder.strict


def _is_deepspeeds(optimizer: object) -> bool:
    kind = optimizer.get("type") if isinstance(optimizer, dict) else None
    return isinstance(kind, str) and kind.lower() == _BY_DEEPSPEED


# What gpt-neox refuses of its own keys before it starts DeepSpeed: names, types and choices.

TUNED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization")
"""Keys that hold several values, or "auto", while DeepSpeed's autotuning looks for the best (AUTOTUNING_ARGS)."""
_EXPONENT = re.compile(r"[-+]?[0-9_.]+[eE]([-+]?)[0-9]+")


_NEEDED: Mapping[str, Sequence[str]] = WORDS["needed"]
"""Keys of sections that `validate_types` asks for; a section of one file takes the place of that of another."""
_ASKS = "must contain key"
_OF_ZERO: Mapping[str, str] = WORDS["of zero_optimization"]
"""Fields that gpt-neox fills from keys of zero_optimization before it looks at types."""
_SEVERAL = 2
"""From so many unknown keys on, a file may be one of a fork, which is not at hand."""


@functools.cache
def _current() -> Mapping[str, Field]:
    return {name: field for name, field in fields().items() if field.is_current}


def _of_keys(document: Document, fork: Beside | None) -> list[Diagnostic]:
    """Everything of the kind in a file whose top-level keys are named as fields are."""
    tree = document.tree
    assert isinstance(tree, dict)
    found = Findings(tree, document.invalid)
    current, past = (_current(), fields()) if fork is None else (fork.fields, fork.fields)
    replaced = REPLACED if fork is None else fork.replaced
    places = configuration.KeyPlaces(GPT_NEOX, tuple((name,) for name in current))
    unguessed = Severity.WARNING if fork is None else Severity.ERROR
    consequence = f": {'gpt-neox' if fork is None else 'the gpt-neox of this file'} refuses it"
    strange = [name for name in tree if name not in past]
    for name, value in tree.items():
        field = past.get(name)
        if field is None:
            unknown_key((name,), current, tree, found, places, consequence=consequence, unguessed=unguessed)
        elif not field.is_current:
            message = (
                f"{name} was a key of gpt-neox up to version {field.versions[-1]}: version {VERSIONS[-1]} refuses it"
            )
            help_ = "remove it, or run the file with that version"  # which the file does not say
            found.say("K010", (name,), message, help_, at_key=True, severity=Severity.WARNING)
        elif not (tree.get("autotuning") and (value == "auto" or name in TUNED)):
            _value((name,), value, field, found)
    for name, field in current.items() if fork is not None and tree else ():
        if name not in tree and field.default is not None and not _is_of(field.default, field):
            message = f"the gpt-neox of this file refuses its own {field.default!r} for {name}"
            help_ = f"write {name}, {' or '.join(field.types)}, unless another file of the run does"
            found.say("K003", (next(iter(tree)),), message, help_, at_key=True, severity=Severity.WARNING)
    section = tree.get("zero_optimization")
    zero: Mapping[str, Any] = section if isinstance(section, dict) and not tree.get("autotuning") else {}
    for key, name in _OF_ZERO.items():
        if key in zero and name in current:
            _value(("zero_optimization", key), zero[key], current[name], found)
    for section, keys in _NEEDED.items():
        holder = tree.get(section)
        for key in keys if fork is None or _ASKS in fork.checks else ():
            if isinstance(holder, dict) and key not in holder:
                message = f"{section} has no {key!r}{consequence}"
                found.say("K002", (section, key), message, f"add {key} to {section}")
    for path, literal in _texts(tree, document.root, document.text, ()):
        _no_number(path, literal, found)
    said = [
        replace(one, severity=Severity.WARNING) if one.code == "K003" and one.path[0] in replaced else one
        for one in found.diagnostics()
    ]
    if fork is None and len(strange) >= _SEVERAL:
        said = [replace(one, severity=Severity.WARNING) if one.path[0] in strange else one for one in said]
    return [document.locate(one, key=(one.code, one.path) in found.at_key) for one in said]


def _value(path: Path, value: Any, field: Field, found: Findings) -> None:
    if value is None or ANY in field.types:
        return
    if field.choices:
        known = [str(one).lower() for one in field.choices if isinstance(one, str)]
        if value not in field.choices and not (isinstance(value, str) and value.lower() in known):
            choice(path, value, list(field.choices), [{"enum": list(field.choices)}], found)
    elif not _is_of(value, field):
        schemas = (as_schema({"type": one}) for one in field.types)
        mismatch(path, value, [one for one in schemas if one], found)


def _is_of(value: Any, field: Field) -> bool:
    """Whether a value is of the very type of a field."""
    is_any = bool(field.choices) or ANY in field.types
    return is_any or type(value).__name__ in field.types or (type(value) is int and "float" in field.types)


def _texts(tree: Any, place: Place, text: str, path: Path) -> Iterator[tuple[Path, str]]:
    """Numbers with an exponent that PyYAML takes for text: it wants a point before it and a sign in it."""
    if isinstance(tree, (dict, list)) and place.children is not None:
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _texts(inner, place.children[key], text, (*path, key))  # type: ignore[index]
    elif isinstance(tree, float):
        literal = text[place.start : place.end]
        match = _EXPONENT.fullmatch(literal)
        if match is not None and not ("." in literal and match[1]):
            yield path, literal


def _no_number(path: Path, literal: str, found: Findings) -> None:
    digits, exponent = re.split("[eE]", literal)
    digits = digits if "." in digits else f"{digits}.0"
    better = f"{digits}e{exponent if exponent[0] in '+-' else '+' + exponent}"
    message = f"{named(path)}: gpt-neox reads its files with PyYAML, which takes {literal} for text"
    found.say("K003", path, message, f"write {better}")
