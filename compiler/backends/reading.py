"""Another tool's options as they are read into a spec, and what became of each of them.

An importer reads a `Source`, which holds the options that a file gives and the tool's own defaults for all others, and
fills a `Draft`. The source remembers which options fed which value of the spec, so that no option goes unnoticed.
"""

from __future__ import annotations

import enum
import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parcompile.plan import Plan
from parcompile.schema import type_of
from parcompile.schema.keys import refused_optimizer
from parcompile.spec import OPTIMIZER_KEYS, Spec
from parcompile.text import Document, typed
from parcompile.user_files import shipped

from .artefacts import Loss, losses_of, option_names, tree_of
from .statements import Facts

SpecPath = tuple[str, ...]
"""Where a value stands in a spec."""
PRECISION, SUMS = ("training", "precision"), ("training", "gradient_accumulation_dtype")
OPTIMIZER, SCHEDULE, STEPS = ("training", "optimizer"), ("training", "lr_scheduler"), ("training", "train_steps")
RECOMPUTE, STAGE, DP = ("training", "activation_checkpointing"), ("zero", "stage"), ("parallelism", "dp")
DECAY, _LEFT_OUT = (*OPTIMIZER, "weight_decay"), (*OPTIMIZER, "no_weight_decay")
"""Values that several importers read."""


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

    def lose(self, names: str | Iterable[str], reason: str, *, changes: bool = False) -> None:
        """Says why options have no place in the spec; their values are not carried, which may change training."""
        self._settle(names, Outcome.LOST, reason, changes)

    def remark(self, name: str, said: str) -> None:
        """Carries an option and says what a user should know of it."""
        self._settle(name, Outcome.CARRIED, said, changes=True)

    def ignore(self, names: str | Iterable[str], reason: str) -> None:
        """Says why options change nothing."""
        self._settle(names, Outcome.NO_EFFECT, reason)

    def use(self, names: Iterable[str], *targets: SpecPath) -> None:
        """Those of the options that the file gives count as used for these values of the spec, and for no other."""
        self.used |= {name: set(targets) for name in names if name in self.given}

    def note(self, names: Iterable[str], target: SpecPath) -> None:
        """Those of the options that the file gives count as used for this value, too."""
        for name in filter(self.has, names):
            self.used.setdefault(name, set()).add(target)

    def settle(self, reasons: Mapping[str, Sequence[str]], if_on: Mapping[str, Sequence[str]], under: str = "") -> None:
        """Says why options that nobody has spoken of are lost: those whose names fit a pattern behind a reason.

        Args:
            reasons: the patterns by the reason; "*" stands for anything.
            if_on: the same of options that are without effect where the file does not use them either.
            under: begins the names of all options that are meant.
        """
        for name in [one for one in self.unread() if one.startswith(under)]:
            key = name.removeprefix(under)
            why = next((why for why, patterns in {**if_on, **reasons}.items() if is_among(key, patterns)), None)
            if why in if_on and self.given[name] in (None, False, [], {}, "no", "NO"):
                self.ignore(name, "off")
            elif why is not None:
                self.lose(name, why)

    def _settle(self, names: str | Iterable[str], outcome: Outcome, reason: str, changes: bool = False) -> None:
        for name in filter(self.has, [names] if isinstance(names, str) else names):
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

    def fill(self, path: SpecPath, values: Mapping[str, Any]) -> None:
        """Sets values of a section, which the source says."""
        for key, value in values.items():
            self.set((*path, key), value, said=True)

    def take(self, source: Source, names: Iterable[str], values: Mapping[SpecPath, Any]) -> None:
        """Sets values that these options together stand for, of which none counts for another value."""
        for path, value in values.items():
            self.set(path, value, said=True)
        source.use(names, *values)

    def ask(self, path: SpecPath, why: str) -> None:
        """A value that is left open, unless the user has settled it, its section or a part of it."""
        if not any(given[: len(path)] == path or path[: len(given)] == given for given in self.answers):
            self.questions.setdefault(path, Question(path, why))

    def carry(self, source: Source, name: str, path: SpecPath, convert: Callable[[Any, str], Any] | None = None) -> Any:
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

    def carry_decay(self, source: Source, name: str, left_out: str) -> None:
        """Takes over the weight decay of a tool that leaves something out of it, as `left_out` says."""
        self.carry(source, name, DECAY, typed.number)
        self.leave_out_of_decay(left_out, said=source.has(name))

    def leave_out_of_decay(self, left_out: str, *, said: bool) -> None:
        """Says what is not decayed, unless nothing is."""
        self.values.pop(_LEFT_OUT, None)
        if self.values.get(DECAY, 1.0):
            self.set(_LEFT_OUT, left_out, said=said)

    def leave_open(self, source: Source, error: UndecidedError, path: SpecPath) -> None:
        """Asks for a value of the spec that hangs on an option which the file does not decide."""
        said = f' is "{error.value.text}"' if error.value.text else ""
        self.ask(path, f"{error.option}{said}: {error.value.decided_by} sets it")
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


def leaving_open(path: SpecPath) -> Callable[[Reader], Reader]:
    """Readers that ask for a value of the spec where the file does not decide an option that they need."""

    def of(read: Reader) -> Reader:
        @functools.wraps(read)
        def reading(source: Source, draft: Draft) -> None:
            try:
                read(source, draft)
            except UndecidedError as error:
                draft.leave_open(source, error, path)

        return reading

    return of


Reader = Callable[[Source, Draft], None]
_TYPED: Mapping[str | None, Callable[[object, str], Any]] = {
    "integer": typed.integer,
    "number": typed.number,
    "numbers": lambda value, name: typed.list_of(typed.number, value, name),
}


def _of_spec(path: SpecPath, value: Any, name: str) -> Any:
    """A value of an option as the spec has it at this path; what is no number there is left to the spec's schema."""
    kind = type_of("spec", path)
    read = _TYPED.get(kind)
    if read is None or (kind == "number" and isinstance(value, int) and not isinstance(value, bool)):
        return value
    return read(value, name)


def refuse_optimizer(
    source: Source, draft: Draft, option: str, kind: object, settings: Iterable[str] = (), *, whole: bool = True
) -> None:
    """Asks for an optimizer in place of one that a spec does not have, and says why it has not.

    Args:
        source: the options of the file.
        draft: the spec.
        option: names the optimizer.
        kind: its name.
        settings: further options that are lost with it.
        whole: whether its settings are open, too, and not its type alone.
    """
    *has, last = OPTIMIZER_KEYS
    known = refused_optimizer(str(kind))
    why = f"a spec has {', '.join(has)} and {last}, and no {kind}" + (f": {known}" if known else "")
    why = f"{kind} of this tool is not read" if str(kind).lower() in OPTIMIZER_KEYS else why
    draft.ask(OPTIMIZER if whole else (*OPTIMIZER, "type"), f"{option} is {kind!r}: {why}")
    source.lose((option, *settings), why, changes=True)


def leaves(tree: Mapping[str, Any], path: tuple[str, ...] = (), *, auto: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a file by their dotted names; with `auto`, which says what decides it, "auto" is `Undecided`."""
    for key, value in tree.items():
        where = (*path, str(key))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, where, auto=auto)
        else:
            yield ".".join(where), Undecided("auto", auto) if auto and value == "auto" else value


def as_switch(value: Any) -> Any:
    """A value of a tool that writes true and false as text."""
    return {"true": True, "false": False}.get(str(value).lower(), value)


# What an option of another tool does that has no place in a spec. The texts are the reasons that an import gives.


class Effect(enum.Enum):
    """What such an option does."""

    NUMBERS = "it changes the numbers of a run, and is not supported"
    MEMORY = "it changes memory, time or placement, not numbers; a plan decides this itself"
    SPEED = "it chooses between implementations of the same computation"
    DATA = "data belongs to the training script"
    TOKENIZER = "the tokenizer belongs to the training script"
    CHECKPOINTS = "checkpoints belong to the training script"
    REPORTS = "logs, profiles and tests of the run belong to the training script"
    OTHER_RUN = "it belongs to inference, reinforcement learning or another kind of run"
    OTHER_MODEL = "it belongs to a model of another kind, which a spec cannot express"
    JOB = "how the job is started, watched and restarted belongs to the launcher"

    def account(self, option: str) -> Account:
        """What to say of an option that does this."""
        outcome = Outcome.NO_EFFECT if self in _NO_LOSS else Outcome.LOST
        return Account(option, outcome, self.value, changes=self is Effect.NUMBERS)


CARRIED_VERBATIM = frozenset({Effect.NUMBERS, Effect.MEMORY, Effect.SPEED})
"""What an import keeps for the backend that it came from."""
_NO_LOSS = frozenset({Effect.SPEED, Effect.DATA, Effect.TOKENIZER, Effect.CHECKPOINTS, Effect.REPORTS, Effect.JOB})
"""A plan loses nothing without such an option: it stays with what runs the plan."""


def effect_of(name: str, tool: str) -> Effect | None:
    """What an option of a tool does, by the first pattern of `effects.json` that it fits; "*" ends one for anything."""
    stored: Mapping[str, Sequence[str]] = shipped("parcompile.backends", "effects.json")[tool]
    return next((Effect[effect.upper()] for effect, patterns in stored.items() if is_among(name, patterns)), None)


def fate_of(name: str, tool: str) -> Account | None:
    """What there is to say of an option that does one of these."""
    effect = effect_of(name, tool)
    return None if effect is None else effect.account(name)


def is_among(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of these, in which "*" stands for anything."""
    return any(fnmatch.fnmatchcase(name, one) for one in patterns)


# One table for a tool: its options, and the values of a spec that they stand for. Both directions follow from it.

Arguments = dict[str, Any]
"""Options with their values, by the name that the tool gives them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An option that stands for one value of the spec.

    `write` and `read` turn one into the other; what `write` gives None for is not written. Without `read` an option is
    read by the type that the spec has there.
    """

    option: str
    path: SpecPath
    write: Callable[[Any], Any] = lambda value: value
    read: Callable[[Any, str], Any] | None = None


@dataclass(frozen=True, slots=True)
class Bundle:
    """Options that stand for values of the spec only together, and what of those values they cannot say."""

    options: tuple[str, ...]
    read: Reader
    write: Callable[[Spec], Arguments] = lambda _spec: {}
    losses: Callable[[Spec], Iterable[Loss]] = lambda _spec: ()


Row = Entry | Bundle


def carried(name: str) -> tuple[Entry, ...]:
    """The options that `carried.json` has by this name, each with the path of its value, and a type to read it by."""
    rows: Mapping[str, str] = shipped("parcompile.backends", "carried.json")[name]
    found = ((option, *said.partition(" ")) for option, said in rows.items())
    return tuple(Entry(option, tuple(path.split(".")), read=_TYPED.get(kind)) for option, path, _, kind in found)


def stored_bundle(name: str, read: Reader, *others: str, facts: Facts | None = None) -> Bundle:
    """Options that `files.json` has by this name, with losses that `losses.json` may have; `others` are only read."""
    known, options = facts or {}, (*option_names(name), *others)
    write = functools.partial(tree_of, name, facts=known)
    if name in shipped("parcompile.backends", "losses.json"):
        return Bundle(options, read, write, functools.partial(losses_of, name, facts=known))
    return Bundle(options, read, write)


def write(rows: Sequence[Row], spec: Spec) -> Arguments:
    """What a spec is in the tool's options."""
    found: Arguments = {}
    for row in rows:
        if isinstance(row, Bundle):
            found |= row.write(spec)
            continue
        value: Any = functools.reduce(getattr, row.path, spec)  # a path that is wrong is an error
        value = value.value if isinstance(value, enum.Enum) else list(value) if isinstance(value, tuple) else value
        written = None if value is None else row.write(value)
        if written is not None:
            found[row.option] = written
    return found


def read(rows: Sequence[Row], source: Source, draft: Draft) -> None:
    """Takes the options over into a draft, in the order of the table."""
    for row in rows:
        if isinstance(row, Bundle):
            row.read(source, draft)
        else:
            draft.carry(source, row.option, row.path, row.read)


def losses(rows: Sequence[Row], spec: Spec) -> Iterator[Loss]:
    """What the tool cannot say of a spec."""
    for row in rows:
        if isinstance(row, Bundle):
            yield from row.losses(spec)


def names(rows: Sequence[Row]) -> frozenset[str]:
    """The options that the table speaks of."""
    return frozenset(name for row in rows for name in (row.options if isinstance(row, Bundle) else (row.option,)))


# What an importer of another tool's files has to offer.


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
            an option that comes out with another value was not carried. By default nothing: the tool has no exporter.
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
    written: Callable[[Plan], Mapping[str, Any]] = lambda _plan: {}
    fate: Callable[[str, Any], Account | None] = lambda _name, _value: None
    tree: Callable[[Document], Mapping[str, Any]] = lambda document: document.tree  # type: ignore[assignment, return-value]
    model_options: Callable[[Source], list[str]] = lambda _source: []
    meaning: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda given: given
    stands_for: Mapping[str, Sequence[str]] = field(default_factory=dict)
    changes: Callable[[str], bool] = lambda _name: True
    recognises: Callable[[Mapping[str, Any]], bool] = lambda _tree: False
