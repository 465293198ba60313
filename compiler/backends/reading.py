"""Another tool's options as they are read into a spec, and what became of each of them.

An importer reads a `Source`, which holds the options that a file gives and the tool's own defaults for all others, and
fills a `Draft`. The source remembers which options fed which value of the spec, so that no option goes unnoticed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parcompile.schema import type_of
from parcompile.text import typed

SpecPath = tuple[str, ...]
"""Where a value stands in a spec."""


@dataclass(frozen=True, slots=True)
class Undecided:
    """A value that the file leaves to something else. `decided_by` names it: "the Trainer", "variable NNODES"."""

    text: str
    decided_by: str


class UndecidedError(Exception):
    """An importer needs the value of an option that the file does not decide."""

    def __init__(self, option: str, value: Undecided) -> None:
        super().__init__(option)
        self.option = option
        self.value = value


class Outcome(enum.Enum):
    """What became of an option of the source."""

    CARRIED = "carried"
    NO_EFFECT = "without effect"
    LOST = "lost"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Account:
    """What became of one option. `detail` is a path of the spec, a reason, or what decides the value."""

    option: str
    outcome: Outcome
    detail: str
    changes: bool = False
    """Whether training becomes another one: other losses or weights than the source gives."""


@dataclass(frozen=True, slots=True)
class Question:
    """A value of the spec that the source does not say, and why the import does not guess it."""

    path: SpecPath
    why: str


class Source:
    """The options of a file.

    Args:
        given: the options that the file gives, by their canonical name; `Undecided` where the file does not say the
            value.
        defaults: the tool's own value of each option that is left out.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.given = dict(given)
        self.defaults = defaults
        self.used: dict[str, set[SpecPath]] = {}
        self.reasons: dict[str, Account] = {}

    def has(self, name: str) -> bool:
        """Whether the file gives the option, with or without a value that can be used."""
        return name in self.given

    def value(self, name: str, *targets: SpecPath) -> Any:
        """What the tool uses: the file's value, else the tool's default. The option then counts as used for `targets`.

        Raises:
            UndecidedError: the file leaves the value to something else.
        """
        if name in self.given:
            value = self.given[name]
            if isinstance(value, Undecided):
                raise UndecidedError(name, value)
            self.used.setdefault(name, set()).update(targets)
            return value
        return self.defaults.get(name)

    def integer(self, name: str, *targets: SpecPath, least: int = 0) -> int | None:
        """As `value`: a whole number.

        Raises:
            UndecidedError: the file leaves the value to something else.
            WrongValueError: it is something else.
        """
        value = self.value(name, *targets)
        return None if value is None else typed.integer(value, name, least=least)

    def number(self, name: str, *targets: SpecPath) -> float | None:
        """As `integer`: a finite number."""
        value = self.value(name, *targets)
        return None if value is None else typed.number(value, name)

    def lose(self, name: str, reason: str, *, changes: bool = False) -> None:
        """Says why an option has no place in the spec; its value is not carried, which may change training."""
        self._settle(name, Outcome.LOST, reason, changes)

    def ignore(self, name: str, reason: str) -> None:
        """Says why an option changes nothing."""
        self._settle(name, Outcome.NO_EFFECT, reason)

    def _settle(self, name: str, outcome: Outcome, reason: str, changes: bool = False) -> None:
        if name in self.given:
            self.reasons[name] = Account(name, outcome, reason, changes)
            self.used.pop(name, None)

    def under(self, prefix: str) -> list[str]:
        """The options of the file with this dotted prefix, and the one of that name."""
        return [name for name in self.given if name == prefix or name.startswith(f"{prefix}.")]

    def unread(self) -> Iterator[str]:
        """The options of the file that nobody has read or spoken of."""
        return (name for name in self.given if name not in self.used and name not in self.reasons)


@dataclass
class Draft:
    """A spec under construction: its values with whether the source says them, and what stays open.

    `answers` are the user's: what they settle is not asked for.
    """

    answers: Mapping[SpecPath, Any] = field(default_factory=dict)
    values: dict[SpecPath, Any] = field(default_factory=dict)
    said: set[SpecPath] = field(default_factory=set)
    questions: dict[SpecPath, Question] = field(default_factory=dict)

    def set(self, path: SpecPath, value: Any, *, said: bool) -> None:
        """A value; `said` is False for one that is a default of the source."""
        self.values[path] = value
        if said:
            self.said.add(path)

    def ask(self, path: SpecPath, why: str) -> None:
        """A value that is left open, unless the user has settled it, its section or a part of it."""
        if not any(given[: len(path)] == path or path[: len(given)] == given for given in self.answers):
            self.questions.setdefault(path, Question(path, why))

    def carry(
        self,
        source: Source,
        name: str,
        path: SpecPath,
        convert: Callable[[Any, str], Any] | None = None,
    ) -> Any:
        """Takes an option over to a path of the spec; a value that the file does not decide is asked for.

        Args:
            source: the options of the file.
            name: the option.
            path: where its value goes.
            convert: makes the spec's value of the option's value and its name. Without it the value is read by the
                type that the spec has there.

        Returns:
            The value in the spec's terms; None when it is open or when neither file nor tool has one.

        Raises:
            WrongValueError: the value is not of the option's type.
        """
        try:
            value = source.value(name, path)
        except UndecidedError as error:
            self.leave_open(source, error, path)
            return None
        if value is None:
            return None
        value = _of_spec(path, value, name) if convert is None else convert(value, name)
        self.set(path, value, said=source.has(name))
        return value

    def leave_open(self, source: Source, error: UndecidedError, path: SpecPath) -> None:
        """Asks for a value of the spec that hangs on an option which the file does not decide."""
        self.ask(path, f'{error.option} is "{error.value.text}": {error.value.decided_by} decides it')
        source.used.setdefault(error.option, set()).add(path)

    def tree(self) -> dict[str, Any]:
        """The values as a spec's tree."""
        found: dict[str, Any] = {}
        for path, value in self.values.items():
            node = found
            for step in path[:-1]:
                node = node.setdefault(step, {})
            node[path[-1]] = value
        return found


_TYPED: Mapping[str | None, Callable[[object, str], Any]] = {"integer": typed.integer, "number": typed.number}


def _of_spec(path: SpecPath, value: Any, name: str) -> Any:
    """A value of an option as the spec has it at this path; what is no number there is left to the spec's schema."""
    kind = type_of("spec", path)
    read = _TYPED.get(kind)
    if read is None or (kind == "number" and isinstance(value, int) and not isinstance(value, bool)):
        return value
    return read(value, name)
