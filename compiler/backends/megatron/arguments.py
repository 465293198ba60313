"""The options of Megatron-LM's parsers by version, and the arguments of one call, read as its parser reads them.

The facts stand in `options.json`, which `.ci/generate/megatron_options.py` writes by asking the parsers themselves.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parcompile.user_files import shipped

NVIDIA = "NVIDIA/Megatron-LM"


class Facts(NamedTuple):
    """What one parser says of an option. `since` and `until` are places in the versions of its line.

    `kind` is "on" or "off" for flags without a value, "either" for a pair of them (`--x`, `--no-x`), "list" for several
    values, else "value". `type` is that of one value: "int", "float", "str", "bool", or "other".
    """

    since: int
    until: int
    flags: Sequence[str]
    dest: str
    kind: str
    type: str
    choices: Sequence[Any] | None
    default: Any
    group: str

    @property
    def is_flag(self) -> bool:
        """Whether it stands without a value."""
        return self.kind in ("on", "off", "either")


class Option(NamedTuple):
    """An option, by the name of its first long flag with underscores; `facts` are those of one line, oldest first."""

    name: str
    facts: tuple[Facts, ...]

    @property
    def newest(self) -> Facts:
        """What the newest version says that has the option."""
        return self.facts[-1]

    @property
    def default(self) -> Any:
        """Its value when it is not given; False for a flag."""
        newest = self.newest
        return newest.default if newest.kind == "either" or not newest.is_flag else False


@dataclass(frozen=True, eq=False)
class Line:
    """The parsers of one project: its versions, oldest first, and every option that any of them had."""

    name: str
    versions: tuple[str, ...]
    options: Mapping[str, Option]

    @property
    def newest(self) -> int:
        """The place of the newest version."""
        return len(self.versions) - 1

    def has(self, name: str) -> bool:
        """Whether the newest version has the option."""
        return name in self.options and self.options[name].newest.until == self.newest

    @functools.cached_property
    def flags(self) -> tuple[str, ...]:
        """Every flag of any version."""
        facts = (one for option in self.options.values() for one in option.facts)
        return tuple(dict.fromkeys(flag for one in facts for flag in one.flags))

    @functools.cached_property
    def by_flag(self) -> Mapping[str, tuple[str, bool]]:
        """Names and what a flag alone says, by every spelling of it: without dashes in front, with underscores."""
        found: dict[str, tuple[str, bool]] = {}
        for name, option in sorted(self.options.items(), key=lambda one: not self.has(one[0])):
            for facts in reversed(option.facts):
                for flag in facts.flags:
                    spelled = spelling(flag)
                    turns_off = facts.kind == "either" and spelled.startswith("no_") and not name.startswith("no_")
                    found.setdefault(spelled, (name, not turns_off))
        return found

    @functools.cached_property
    def defaults(self) -> Mapping[str, Any]:
        """The value of every option of the newest version that is not given."""
        return {name: option.default for name, option in self.options.items() if self.has(name)}


def spelling(flag: str) -> str:
    """A flag as its name is written here."""
    return flag.lstrip("-").replace("-", "_")


@functools.cache
def line(name: str = NVIDIA) -> Line:
    """The parsers of a project.

    Raises:
        ValueError: there are no facts of it.
    """
    table = shipped(__package__, "options.json")
    number = lines().index(name)
    options = {
        key: Option(key, tuple(Facts(*row) for row in spans[str(number)]))
        for key, spans in table["options"].items()
        if str(number) in spans
    }
    return Line(name, tuple(table["lines"][number]["versions"]), options)


@functools.cache
def lines() -> tuple[str, ...]:
    """The projects of which there are facts."""
    return tuple(one["name"] for one in shipped(__package__, "options.json")["lines"])


@functools.cache
def elsewhere() -> Mapping[str, str]:
    """Flags that scripts and forks add to the parser, as names are written here, with where."""
    return {spelling(flag): where for flag, where in shipped(__package__, "options.json")["elsewhere"].items()}


_INTEGER = re.compile(r"\s*[+-]?\d+(_\d+)*\s*")
_NEGATIVE = re.compile(r"-\d|-\.\d")


class Unknown(str):
    """A value that the file does not decide, as it is written there; `names` are the variables that would."""

    __slots__ = ("names",)
    names: tuple[str, ...]

    def __new__(cls, text: str, names: tuple[str, ...]) -> Unknown:
        """A value with its variables."""
        made = super().__new__(cls, text)
        made.names = names
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """How it is copied."""
        return Unknown, (str(self), self.names)


Span = tuple[int, int]


class Word(NamedTuple):
    """A word of a command line: its text, or None with the variables that decide it; and where it stands."""

    text: str | None
    shown: str
    names: tuple[str, ...]
    span: Span | None
    many: bool = False
    """Several words, or none, may stand here."""


class Problem(NamedTuple):
    """A word that the parser does not take. `kind` is "unknown", "type", "choice", "missing" or "surplus"."""

    kind: str
    name: str
    flag: str
    value: str
    span: Span | None
    facts: Facts | None = None


@dataclass
class Arguments:
    """Values by the names of `options`, with everything else that a call says."""

    project: str
    values: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    """How the flag of each is written."""
    spans: dict[str, tuple[Span | None, Span | None]] = field(default_factory=dict)
    """Where the flag and the value of each stand."""
    problems: list[Problem] = field(default_factory=list)
    repeated: dict[str, list[Span | None]] = field(default_factory=dict)
    """Earlier places of options that are given more than once, with other values."""
    unknown: dict[str, Any] = field(default_factory=dict)
    """Options that the parser has not, by the name as it is spelled."""
    is_open: bool = False
    """Whether there may be further arguments, which the file does not show."""
    assumptions: tuple[tuple[str, int], ...] = ()

    @property
    def line(self) -> Line:
        """The parsers that these arguments are for."""
        return line(self.project)

    def versions_of(self, name: str) -> frozenset[int]:
        """The versions that have an option under the flag that is given."""
        spelled = spelling(self.flags[name])
        having = (one for one in self.line.options[name].facts if spelled in map(spelling, one.flags))
        return frozenset(version for one in having for version in range(one.since, one.until + 1))

    @property
    def versions(self) -> frozenset[int]:
        """The versions that have all options that are given."""
        found = (self.versions_of(name) for name in self.values)
        return frozenset(range(len(self.line.versions))).intersection(*(one for one in found if one))


def converted(facts: Facts, text: str) -> Any:
    """A value as the parser makes it.

    Raises:
        ValueError: the parser refuses it.
    """
    if facts.type == "int":
        if not _INTEGER.fullmatch(text):
            raise ValueError(text)
        return int(text)
    if facts.type == "float":
        return float(text)
    return bool(text) if facts.type == "bool" else text


def project_of(flags: Sequence[str]) -> str:
    """The project whose parsers know the most of these flags; NVIDIA's when several do."""
    spelled = {spelling(flag) for flag in flags}
    counts = {name: sum(flag in line(name).by_flag for flag in spelled) for name in lines()}
    return max(counts, key=lambda name: counts[name])


_ARRAY = re.compile(r"\[[@*]\]")


def parsed(words: Sequence[Word], project: str | None = None) -> Arguments:
    """The words after the name of a program."""
    flags = [word.text.partition("=")[0] for word in words if word.text is not None and _is_flag(word)]
    found = Arguments(project or project_of(flags))
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _is_flag(word):
            if word.text is None and word.many:
                found.is_open = True
            continue
        following = at
        while following < len(words) and not _is_flag(words[following]):
            following += 1
        at += _take(found, word, words[at:following])
    return found


def _is_flag(word: Word) -> bool:
    text = word.shown if word.text is None else word.text
    return text.startswith("--") and len(text) > 2 and not _NEGATIVE.match(text)


def _take(found: Arguments, word: Word, following: Sequence[Word]) -> int:
    """Reads one flag; returns how many of the words after it are its values."""
    text = word.shown if word.text is None else word.text
    flag, equals, inline = text.partition("=")
    spelled = spelling(flag)
    span = None if word.span is None else (word.span[0], word.span[0] + len(flag))
    values = list(following)
    if equals:
        begin = None if word.span is None else (word.span[0] + len(flag) + 1, word.span[1])
        values = [Word(None if word.text is None else inline, inline, word.names, begin)]
    if flag != f"--{spelled}" and spelled not in found.line.by_flag:
        spelled = flag[2:]
    if spelled not in found.line.by_flag:
        _unknown(found, flag, spelled, values, span)
        # Its values are what follows, which may be several words. An array may hold options too.
        found.is_open |= any(one.many for one in values[1:]) or any(_ARRAY.search(one.shown) for one in values[:1])
        return 0 if equals else len(following)
    name, turns_on = found.line.by_flag[spelled]
    facts = found.line.options[name].newest
    if facts.is_flag:
        value: Any = turns_on
        used: Sequence[Word] = ()
        if values and (equals or (values[0].text is not None and not values[0].many)):
            found.problems.append(Problem("surplus", name, flag, values[0].shown, values[0].span, facts))
    elif facts.kind == "list":
        used = values
        if not used:
            found.problems.append(Problem("missing", name, flag, "", span, facts))
        value = [_value(found, name, flag, facts, one) for one in used if not one.many]
        if any(one.many for one in used) or (len(value) == 1 and isinstance(value[0], Unknown)):
            value = Unknown(" ".join(one.shown for one in used), tuple(n for one in used for n in one.names))
    else:
        used = values[:1]
        value = _value(found, name, flag, facts, used[0]) if used else None
        if not used and facts.kind == "value":
            found.problems.append(Problem("missing", name, flag, "", span, facts))
        if len(values) > 1 and values[1].text is not None and not equals:
            found.problems.append(Problem("surplus", name, flag, values[1].shown, values[1].span, facts))
    _keep(found, name, flag, value, (span, used[0].span if used else None))
    return 0 if equals else len(used)


def _keep(found: Arguments, name: str, flag: str, value: Any, spans: tuple[Span | None, Span | None]) -> None:
    if name in found.values and found.values[name] != value:
        found.repeated.setdefault(name, []).append(found.spans[name][1] or found.spans[name][0])
    found.values[name], found.flags[name], found.spans[name] = value, flag, spans


def _unknown(found: Arguments, flag: str, spelled: str, values: Sequence[Word], span: Span | None) -> None:
    texts = [one.shown for one in values]
    found.unknown[spelled] = True if not texts else texts[0] if len(texts) == 1 else texts
    if spelling(flag) not in elsewhere():
        found.problems.append(Problem("unknown", spelled, flag, " ".join(texts), span))


def _value(found: Arguments, name: str, flag: str, facts: Facts, word: Word) -> Any:
    """One value; one that the parser refuses is kept as text, with a problem."""
    if word.text is None:
        return Unknown(word.shown, word.names)
    try:
        value = converted(facts, word.text)
    except (ValueError, OverflowError):
        found.problems.append(Problem("type", name, flag, word.text, word.span, facts))
        return word.text
    if facts.choices is not None and value not in facts.choices:
        found.problems.append(Problem("choice", name, flag, word.text, word.span, facts))
    return value
