"""What one version of DeepSpeed would not take in a configuration, or would take without using it.

A pydantic section refuses an unknown key and a value that it cannot convert. From plain dictionaries DeepSpeed takes
the keys that it knows and whatever stands there: a misspelt one is never looked at, and a value of a wrong type fails
later or means its opposite ("false" is true).

`check` finds everything that is wrong with a file, or with the section of a spec with further keys.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from parcompile.backends.deepspeed import refusal
from parcompile.backends.deepspeed import table as words
from parcompile.backends.deepspeed.lax import How, Read, as_written, read
from parcompile.backends.deepspeed.table import (
    ANY,
    BOUNDS,
    ENTRY,
    Key,
    as_schema,
    at,
    broken,
    ended,
    facts,
    newest,
    order,
    since,
    table,
)
from parcompile.backends.kinds import DEEPSPEED
from parcompile.diagnostics import Diagnostic, Edit, Fix, Path, Related, Safety, Severity
from parcompile.lint.registry import Settings, check_settings
from parcompile.schema.keys import choice, mismatch, out_of_range, unknown_key, wrong_count
from parcompile.schema.values import Findings, Violation, named, quoted
from parcompile.text import Document, Result
from parcompile.text.json_text import FILL_IN, a_template

from . import LIGHTNING, UsageOptions, text_diagnostics, usage_context
from .constructors import wrong_parameters, wrong_paths, wrong_type

AUTO = "auto"
_REMARKS = frozenset({"comment", "comments", "note", "notes", "readme", "description", "$schema"})
_FOREIGN = {"msamp": "MS-AMP reads it"}
_PLACEHOLDER = re.compile(r"<[\w ./|:-]+>|\$?\{\{?[^}]*\}\}?|\$[A-Za-z_]\w*|[A-Z][A-Z0-9]*_\w*")
"""What templates write for a value."""
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu")
_CONSTRUCTED = ("optimizer", "params"), ("scheduler", "params")
_TYPED: dict[Path, str] = {("optimizer",): "AdamW", ("scheduler",): "WarmupLR"}
_VALUES_ARE_READ_BY_TRAINERS = frozenset(
    {"zero_optimization.stage", "bf16.enabled", "fp16.enabled", "zero_optimization.offload_param.device"}
)
"""Keys whose values transformers and accelerate compare themselves, without DeepSpeed's conversion of text."""


class Configuration(NamedTuple):
    """What is wrong, located, and the paths whose values no rule should build on.

    `tree` holds true and false where DeepSpeed reads a text or a number as one of them.
    """

    diagnostics: tuple[Diagnostic, ...]
    invalid_paths: frozenset[Path]
    tree: Any


class KeyPlaces(NamedTuple):
    """Where keys stand, for guesses at misspelt ones."""

    name: str
    places: tuple[tuple[str, ...], ...]


@functools.cache
def _places(version: str) -> KeyPlaces:
    found = (tuple(key.path.split(".")) for key in table(version).walk() if not key.refused and not key.deprecated)
    return KeyPlaces("ds_config", tuple(path for path in found if len(path) < 4 and path[-1] not in (ANY, ENTRY)))


def check(document: Document, version: str, *, needs_batch: bool = True) -> Configuration:
    """Everything in a configuration that a known version of DeepSpeed refuses or does not use.

    `needs_batch` says that nobody adds a batch size before DeepSpeed starts.
    """
    tree = document.tree
    findings = Findings(tree, document.invalid)
    walk = _Walk(findings, version)
    if isinstance(tree, dict):
        walk.section(tree, table(version), ())
        walk.template()
        if needs_batch and not any(name in tree for name in _BATCH):
            walk.missing_batch()
    elif () not in document.invalid:
        findings.say("K003", (), f"a configuration is an object, found {quoted(tree)}", "start with {")
    found = [document.locate(one, key=(one.code, one.path) in findings.at_key) for one in findings.diagnostics()]
    wrong = document.invalid | document.duplicates | findings.unusable
    for path, value in walk.switches.items():
        tree = _with(tree, path, value)
    return Configuration(tuple(found), wrong, tree)


def _with(tree: Any, path: Path, value: Any) -> Any:
    """A copy of the objects and lists on the way to `path`, with `value` at its end; all others are shared."""
    if not path:
        return value
    changed = copy.copy(tree)
    changed[path[0]] = _with(tree[path[0]], path[1:], value)
    return changed


class _Walk:
    """Goes through a configuration beside the keys of a version."""

    def __init__(self, findings: Findings, version: str) -> None:
        self.findings = findings
        self.version = version
        self.pydantic = at(facts()["pydantic"], version)
        self.placeholders: list[Path] = []
        self.switches: dict[Path, bool] = {}

    # -- sections -----------------------------------------------------------------------------------------------------

    def section(self, value: Mapping[str, Any], section: Key, path: Path) -> None:
        """Every key of an object."""
        for name, inner in value.items():
            key = section.keys.get(name) or section.keys.get(ANY)
            if key is None:
                self._unknown((*path, name), value, section)
            elif key.refused:
                self._removed((*path, name), key)
            else:
                self._twice((*path, name), key, value)
                self.value(inner, key, (*path, name))
        if path in _CONSTRUCTED:
            wrong_parameters(self.findings, self.version, path, _places(self.version))
        elif path in _TYPED:
            self._constructed(value, path)
        elif path == ("torch_autocast",) and value.get("enabled") is True:
            wrong_paths(self.findings, (*path, "lower_precision_safe_modules"))

    def _constructed(self, value: Mapping[str, Any], path: Path) -> None:
        """The section of an optimizer or a schedule: without a type nothing is made of it."""
        kind = value.get("type")
        if kind is None:
            message = f"{path[0]} has no type: DeepSpeed makes nothing of the section"
            self.findings.say("K002", (*path, "type"), message, f'add "type": "{_TYPED[path]}", say')
        elif isinstance(kind, str) and kind != AUTO:
            wrong_type(self.findings, self.version, (*path, "type"), kind)
            if path[0] == "scheduler" and "params" not in value:
                message = f"scheduler has no params: DeepSpeed {self.version} cannot construct {kind} without"
                self.findings.say("K002", (*path, "params"), message, 'add "params": {}')

    def _unknown(self, path: Path, holder: Mapping[str, Any], section: Key) -> None:
        name = str(path[-1])
        dotted = f"{section.path}.{name}" if section.path else name
        entry = facts()["keys"].get(dotted)
        if entry is not None:
            self._of_another_version(path, dotted, entry, strict=section.strict)
        elif (advice := words.instead(dotted)) is not None and section.strict:
            message = f"unknown key {quoted(name)} in {section.path}: DeepSpeed {self.version} refuses it"
            fix = Fix(f"remove {name}", Safety.SAFE, (Edit(path, remove=True),))
            self.findings.say("K001", path, message, advice, at_key=True, fixes=(fix,))
        elif section.strict:
            consequence = f": DeepSpeed {self.version} refuses it"
            unknown_key(path, section.known, holder, self.findings, _places(self.version), consequence=consequence)
        elif tuple(section.path.split(".")) not in _CONSTRUCTED and not self._is_open(section):
            self._ignored(path, holder, section)

    def _ignored(self, path: Path, holder: Mapping[str, Any], section: Key) -> None:
        name = str(path[-1])
        if name.lower() in _REMARKS or not name[:1].isalpha():
            return  # a remark to the reader
        if name in _FOREIGN:
            message = f"{quoted(name)} is no key of DeepSpeed: {_FOREIGN[name]}"
            self.findings.say("K001", path, message, at_key=True, severity=Severity.INFO)
            return
        unknown_key(
            path,
            section.known,
            holder,
            self.findings,
            _places(self.version),
            consequence=": DeepSpeed ignores it without a word",
            unguessed=Severity.WARNING,
        )

    def _is_open(self, section: Key) -> bool:
        """Whether a section takes keys that only its user knows, or is one whose keys nobody wrote down."""
        return section.path in words.OPEN or (bool(section.path) and not section.is_section)

    def _twice(self, path: Path, key: Key, holder: Mapping[str, Any]) -> None:
        """Alias and field name side by side: pydantic takes the alias, and the other one is unknown then."""
        if len(key.names) == 1:
            return
        first = next((name for name in key.names if name in holder), None)
        if first != path[-1]:
            message = f"{quoted(path[-1])} is another name of {quoted(first)}, which is set too: DeepSpeed refuses this"
            self.findings.say("K008", path, message, "keep one of the two", at_key=True)

    def _removed(self, path: Path, key: Key) -> None:
        gone = ended(facts()["keys"][key.path])
        message = f"{quoted(path[-1])} was removed in DeepSpeed {gone}, which refuses the file"
        fix = Fix.removing(path, Safety.CHANGES_NUMERICS)
        self.findings.say("K010", path, message, words.instead(key.path), at_key=True, fixes=(fix,))

    def _of_another_version(self, path: Path, dotted: str, entry: Any, *, strict: bool) -> None:
        first, last = since(entry), ended(entry)
        does = "refuses it" if strict else "ignores it without a word"
        if first is not None and order(self.version) < order(first):
            message = f"{quoted(path[-1])} is read since DeepSpeed {first}: {self.version} {does}"
            advice = f"use DeepSpeed {first} or newer, or remove the key"
        else:
            message = f"{quoted(path[-1])} was removed in DeepSpeed {last}: {self.version} {does}"
            advice = words.instead(dotted) or "remove it"
        fix = Fix.removing(path, Safety.CHANGES_COST)
        self.findings.say("K010", path, message, advice, at_key=True, fixes=(fix,))

    def template(self) -> None:
        """Text that stands for values, all in one finding."""
        if not self.placeholders:
            return
        message = a_template(str(self.findings.value(path)) for path in self.placeholders)
        related = tuple(Related("and here", path) for path in self.placeholders[1:20])
        self.findings.say("J017", self.placeholders[0], message, FILL_IN, related=related)
        self.findings.unusable.update(self.placeholders)

    def missing_batch(self) -> None:
        """Neither of the batch sizes from which DeepSpeed derives the others."""
        message = 'neither "train_batch_size" nor "train_micro_batch_size_per_gpu" is given: DeepSpeed refuses the file'
        self.findings.say("K002", (), message, 'add "train_micro_batch_size_per_gpu": 1, say')

    # -- values -------------------------------------------------------------------------------------------------------

    def value(self, value: Any, key: Key, path: Path) -> None:
        """One value; what is "auto", and the old way to switch ZeRO on, have rules of their own."""
        if value == AUTO or (path == ("zero_optimization",) and isinstance(value, bool)):
            return
        loose = key.loose or (key.facts.get("type") == "section" and not key.strict)
        found = as_written(value, key.facts) if loose else read(value, key.facts, self.pydantic)
        if found.how is How.REFUSED:
            self._refused(value, key, path, found)
        elif isinstance(value, dict) and key.is_section:
            self.section(value, key, path)
        elif isinstance(value, list) and ENTRY in key.keys:
            for index, entry in enumerate(value):
                self.value(entry, key.keys[ENTRY], (*path, index))
        elif found.how is How.CONVERTED:
            self._converted(value, key, path, found)

    def _refused(self, value: Any, key: Key, path: Path, found: Read) -> None:
        if isinstance(value, str) and _PLACEHOLDER.fullmatch(value.strip()):
            self.placeholders.append(path)
            return
        schema = {**as_schema(key.facts), **words.example(key.path)}
        if "default" in key.facts and key.facts["default"] is not None:
            schema["default"] = key.facts["default"]
        if key.facts.get("type") == "class":
            message = f"{named(path)} cannot be written in a file: DeepSpeed wants a {key.facts['class']}"
            self.findings.say("K003", path, message, "remove it")
        elif found.why == "choice":
            choice(path, value, key.facts["in"], [schema], self.findings)
        elif found.why == "bound":
            keyword, _ = BOUNDS[next(broken(float(value), key.facts))]
            out_of_range(_violation(keyword, path, value, schema), self.findings)
        elif found.why == "length":
            wrong_count(_violation("minItems", path, value, schema), self.findings)
        elif found.why == "entry":
            part = {"type": "any", **key.facts["of"]}
            for index, entry in enumerate(value):
                self.value(entry, Key(f"{key.path}.{ENTRY}", {**part, "loose": key.loose}), (*path, index))
        else:
            mismatch(path, value, schema.get("anyOf", [schema]), self.findings)

    def _converted(self, value: Any, key: Key, path: Path, found: Read) -> None:
        """A value that DeepSpeed reads as another one: right for DeepSpeed, a trap for whoever compares it."""
        if isinstance(found.value, bool):
            self.switches[path] = found.value
        if not isinstance(value, str) and isinstance(found.value, type(value)):
            return
        trainers = key.path in _VALUES_ARE_READ_BY_TRAINERS
        message = f"{named(path)}: DeepSpeed reads {quoted(value)} as {quoted(found.value)}"
        if trainers:
            message += "; transformers and accelerate compare it as it stands"
        fix = Fix(f"write {quoted(found.value)}", Safety.SAFE, (Edit(path, found.value),))
        severity = Severity.WARNING if trainers or key.loose else Severity.INFO
        self.findings.say("K003", path, message, f"write {quoted(found.value)}", fixes=(fix,), severity=severity)


def _violation(keyword: str, path: Path, value: Any, schema: dict[str, Any]) -> Violation:
    return Violation(keyword, schema.get(keyword), path, value, schema, 0, 0, is_key=False, context=())


def checker(
    read: Result, file: FilePath | None, options: UsageOptions | None
) -> tuple[Result, Callable[[Document], list[Diagnostic]]]:
    """A text with what is wrong with it for those who read it, and what finds everything else in a document."""
    usage = usage_context(read.document.tree if read.document else None, file, options or UsageOptions())

    def checked(document: Document) -> list[Diagnostic]:
        needs_batch = usage.filler != LIGHTNING and not usage.is_template
        keys = check(document, usage.version, needs_batch=needs_batch)
        found = check_settings(Settings(keys.tree, keys.invalid_paths, usage), DEEPSPEED)
        return [*keys.diagnostics, *(document.locate(one) for one in found)]

    return replace(read, diagnostics=text_diagnostics(read.diagnostics, usage)), checked


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
    found = check(part, newest(), needs_batch=False)

    def counts(path: Path) -> bool:
        # What the plan decides has rules of its own.
        return bool(path) and refusal(path) is None

    def under(path: Path) -> Path:
        return (*prefix, *path)

    diagnostics = [one.moved(under) for one in found.diagnostics if counts(one.path)]
    return diagnostics, frozenset(under(path) for path in found.invalid_paths if counts(path))
