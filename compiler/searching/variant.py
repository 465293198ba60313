"""A spec with some of its values replaced, and what the rules say of it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from parcompile.cost.workload import Workload
from parcompile.diagnostics import Severity, format_path
from parcompile.layout.groups import Axis
from parcompile.plan import REFUSAL_PREFIX
from parcompile.rules import DEFAULT_TARGETS, MEMORY_RULES, Rule, all_rules
from parcompile.spec import Provenance
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.spec.resolve.reader import SECTIONS
from parcompile.spec.values import workload_of


class Variant(NamedTuple):
    """A changed spec. `code` and `message` are those of the first error, or of what the runtime refuses."""

    tree: Mapping[str, Any]
    work: Workload | None
    code: str | None = None
    message: str = ""


def copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A spec of its own to change: values are never changed in place, sections are enough."""
    return {name: dict(section) if isinstance(section, dict) else section for name, section in tree.items()}


def changed(tree: Mapping[str, Any], changes: Mapping[str, object]) -> dict[str, Any]:
    """The spec with these values. dp and the accumulation steps follow from the others unless they are among them.

    Raises:
        ValueError: a name that is not in `SECTIONS`.
    """
    found = copied(tree)
    for name, value in changes.items():
        if name not in SECTIONS:
            raise ValueError(f"{name!r} cannot be varied; these can: {', '.join(SECTIONS)}")
        found.setdefault(SECTIONS[name], {})[name] = value
    parallelism, training = found.setdefault("parallelism", {}), found.setdefault("training", {})
    if Axis.DP not in changes:
        parallelism.pop(Axis.DP, None)
    if training.get("global_batch_size") is not None and "gradient_accumulation_steps" not in changes:
        training.pop("gradient_accumulation_steps", None)
    return found


def variant(tree: Mapping[str, Any], changes: Mapping[str, object], folder: Path, *, executable: bool) -> Variant:
    """The changed spec, checked by every rule; with `executable`, what the runtime refuses counts as an error."""
    found = changed(tree, changes)
    return _judged(found, Resolution(found, (), folder), _deciding(executable))


def _judged(tree: Mapping[str, Any], resolution: Resolution, rules: Iterable[Rule]) -> Variant:
    for rule in rules:
        try:
            for one in rule.check(resolution):
                if one.severity in (None, Severity.ERROR):
                    return Variant(tree, None, rule.code, one.message)
        except Unavailable:  # noqa: PERF203 -- another rule speaks of the value that is missing
            continue
    try:
        return Variant(tree, workload_of(resolution.spec()))
    except (Unavailable, ValueError) as error:
        return Variant(tree, None, "undecided", str(error))


@dataclass(slots=True)
class Variants:
    """A spec of which a search replaces values thousands of times; `having` answers as `variant` does, in less time.

    A rule that reads nothing of `SECTIONS` says the same of every variant: it is asked once. What the spec says outside
    of them is read once.
    """

    tree: Mapping[str, Any]
    folder: Path
    executable: bool
    _rules: tuple[Rule, ...] = ()
    """Those that may say something else of another variant, or refuse all."""
    _read: _Read | None = None
    _refusing: dict[str, Rule] = field(default_factory=dict)
    """Rules that refused a variant, by their codes."""

    def having(self, changes: Mapping[str, object], *, any_rule: bool = False) -> Variant:
        """The changed spec, checked. With `any_rule` a refusal may name another rule than the first that refuses."""
        tree = changed(self.tree, changes)
        if self._read is None:
            self._rules = tuple(one for one in _deciding(self.executable) if self._varies(one, tree))
            first = Resolution(tree, (), self.folder)
            found = _judged(tree, first, _deciding(self.executable))
            self._read = _Read.of(first)
        else:
            rules = (*self._refusing.values(), *self._rules) if any_rule else self._rules
            found = _judged(tree, self._read.resolution(tree, self.folder), rules)
        if found.work is None:
            self._refusing |= {one.code: one for one in self._rules if one.code == found.code}
        return found

    def _varies(self, rule: Rule, tree: Mapping[str, Any]) -> bool:
        watched = _Watched(tree, (), self.folder)
        return _refuses(rule, watched) or any(map(_may_change, watched.seen))


def _refuses(rule: Rule, resolution: Resolution) -> bool:
    try:
        return any(True for _ in rule.check(resolution))
    except Unavailable:
        return False


class _Watched(Resolution):
    """A resolution that remembers which places of the spec were read."""

    def __init__(self, tree: object, invalid: Collection[tuple[str, ...]], folder: Path) -> None:
        super().__init__(tree, invalid, folder)
        self.seen: set[tuple[str, ...]] = set()

    @property
    def tree(self) -> Mapping[str, Any]:
        self.seen.add(())
        return super().tree

    def lookup(self, path: tuple[str, ...]) -> object:
        self.seen.add(path)
        return super().lookup(path)


class _Read(NamedTuple):
    """What a resolution has read of places that no variant changes."""

    values: Mapping[tuple[str, ...], Any]
    provenance: Mapping[str, Provenance]
    of_model: Mapping[str, Any]

    @classmethod
    def of(cls, first: Resolution) -> _Read:
        """All that it has read of them."""
        values = {path: value for path, value in first.read.items() if not _may_change(path)}
        names = {*map(format_path, values), *(name for name in first.provenance if name.startswith("model."))}
        of_model = {name: first.__dict__[name] for name in _OF_MODEL if name in first.__dict__}
        return cls(values, {name: first.provenance[name] for name in names}, of_model)

    def resolution(self, tree: Mapping[str, Any], folder: Path) -> Resolution:
        """Of another variant."""
        other = Resolution(tree, (), folder)
        other.read.update(self.values)
        other.provenance.update(self.provenance)
        other.__dict__.update(self.of_model)
        return other


_OF_MODEL = ("whole_config", "model_config", "_read_shape", "shape", "parameters")
"""Attributes that follow from the section `model`, which no variant changes."""


@functools.cache
def _may_change(path: tuple[str, ...]) -> bool:
    """Whether a variant may change what a place of the spec holds."""
    places = ((section, name) for name, section in SECTIONS.items())
    return any(place[: len(path)] == path[:2] for place in places)


@functools.cache
def _deciding(executable: bool) -> tuple[Rule, ...]:
    """The rules that can refuse a layout."""
    return tuple(
        rule
        for rule in all_rules()
        if rule.concerns(DEFAULT_TARGETS)
        and rule.code not in MEMORY_RULES
        and (rule.severity is Severity.ERROR or (executable and rule.code.startswith(REFUSAL_PREFIX)))
    )
