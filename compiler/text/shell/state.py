"""The variables of a script at one place of it, what gives them other values, words and arithmetic under them."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from parcompile.text.typed import decimal

from .parse import Assignment
from .syntax import MAX_MATCHED, Arithmetic, Expansion, Literal, Substitution, Word, Work, bounded
from .words import Array, Hole, Part, Piece, Value, fields, joined, known, missing

# What `#SBATCH` lines say of the variables that Slurm sets.

_SLURM = re.compile(
    r"^#SBATCH[ \t]+(?:--(nodes|ntasks-per-node|gpus-per-node|gpus-per-task|ntasks|gres)[= \t]+|-(N|n)[ \t]*)(\S+)",
    re.M,
)
_SLURM_NAMES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "n": ("SLURM_NTASKS", "SLURM_NPROCS"),
}


def variables(text: str) -> Iterable[tuple[str, Value]]:
    """What Slurm sets by the directives at the head of a script."""
    for match in _SLURM.finditer(text):
        value = match[3]
        if value.isdigit():
            for name in _SLURM_NAMES.get(match[1] or match[2], ()):
                yield name, (Piece(value, match.start(3)),)


# Whole-number arithmetic of the shell.

_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: _quotient(left, right),
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
    ast.Pow: operator.pow,
    ast.Lt: lambda left, right: int(left < right),
    ast.Gt: lambda left, right: int(left > right),
    ast.LtE: lambda left, right: int(left <= right),
    ast.GtE: lambda left, right: int(left >= right),
    ast.Eq: lambda left, right: int(left == right),
    ast.NotEq: lambda left, right: int(left != right),
}
LARGEST = 2**63
LONGEST = 2000
"""Characters of an expression that is read."""


def _quotient(left: int, right: int) -> int:
    """Whole division that rounds to zero."""
    found = abs(left) // abs(right)
    return found if (left < 0) == (right < 0) else -found


class UnknownError(Exception):
    """An expression hangs on something that is not known, or cannot be read."""


def evaluate(expression: str, lookup: Callable[[str], int | None]) -> int:
    """The value of `$((expression))`.

    Raises:
        UnknownError: a name in it has no known value, or it is not plain arithmetic.
    """
    if len(expression) > LONGEST:
        raise UnknownError("a long expression")
    text = _NAME.sub(r"\1", expression).strip()
    text = re.sub(r"(?<!/)/(?!/)", "//", text).replace("&&", " and ").replace("||", " or ")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's compiler, about what stands in the script
            tree = ast.parse(text.replace("\n", " "), mode="eval").body
        return _value(tree, lookup)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise UnknownError(expression) from error


def _value(node: ast.expr, lookup: Callable[[str], int | None]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.Name):
        found = lookup(node.id)
        if found is None:
            raise UnknownError(node.id)
        return found
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand, lookup)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, lookup), _value(node.right, lookup)
        if isinstance(node.op, ast.Pow) and not 0 <= right < 64:
            raise UnknownError("power")
        found = _OPERATORS[type(node.op)](left, right)
        if abs(found) > LARGEST:
            raise UnknownError("too large")
        return found
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        return _OPERATORS[type(node.ops[0])](_value(node.left, lookup), _value(node.comparators[0], lookup))
    if isinstance(node, ast.BoolOp):
        values = [_value(one, lookup) != 0 for one in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, lookup) else node.orelse, lookup)
    raise UnknownError(ast.dump(node))


# The variables of a script at one place of it, and words under them.

_WORD = 160
"""Characters that take as long as one word more of a command, which several modules look at."""


@dataclass
class State:
    """What the script has said so far.

    `assumptions` are the conditions under which a script comes here, as they are written. A variable that is not set
    has the value of the environment, which is not known.
    """

    variables: dict[str, Value | Array] = field(default_factory=dict)
    arrays: set[str] = field(default_factory=set)
    arguments: Array | None = None
    """The positional parameters; None for those of the script itself."""
    assumptions: tuple[tuple[str, int], ...] = ()
    ended: bool = False
    work: Work = field(default_factory=Work)
    """Shared by all ways through a script."""

    def copy(self) -> State:
        """One that can go another way."""
        return State(dict(self.variables), set(self.arrays), self.arguments, self.assumptions, self.ended, self.work)

    def set(self, name: str, value: Value) -> None:
        """Gives a variable a string.

        Raises:
            ShellLimitError: it is too long.
        """
        self._set(name, value, sum(len(part.text) + 1 for part in value))
        self.arrays.discard(name)

    def set_array(self, name: str, values: Array) -> None:
        """Gives a variable a list.

        Raises:
            ShellLimitError: it is too long.
        """
        self._set(name, values, sum(len(part.text) + 1 for value in values for part in value) + len(values))
        self.arrays.add(name)

    def _set(self, name: str, value: Value | Array, length: int) -> None:
        self.work.spend(bounded(length, f"variable {name}"))
        self.variables[name] = value

    def string(self, name: str) -> Value | None:
        """A variable's string, which is the first of a list; None when it is not set."""
        if self.arguments is not None and (place := decimal(name)):
            return self.arguments[place - 1] if place <= len(self.arguments) else ()
        found = self.variables.get(name)
        if found is None or name not in self.arrays:
            return found  # type: ignore[return-value]  # arrays are told apart by their names
        return found[0] if found else ()  # type: ignore[return-value]

    def array(self, name: str) -> Array | None:
        """A variable's list; None when it is not set."""
        found = self.variables.get(name)
        if found is None:
            return None
        return found if name in self.arrays else (found,)  # type: ignore[return-value]

    def number(self, name: str) -> int | None:
        """A variable's whole number, when it is known and one."""
        value = self.string(name)
        text = None if value is None else known(value)
        return int(text) if text is not None and re.fullmatch(r"\s*-?\d{1,18}\s*", text) else None

    def words(self, words: tuple[Word, ...]) -> tuple[Value, ...]:
        """The words of a command after expansion.

        Raises:
            ShellLimitError: they are too long.
        """
        found = []
        for word in words:
            for one in self.expand(word):
                self.work.spend(_WORD)
                found.append(one)
        return tuple(found)

    def expand(self, word: Word) -> Iterator[Value]:
        """The words that one word becomes."""
        yield from fields(self._parts(word, splits=True))

    def value(self, word: Word) -> Value:
        """The string that a word becomes where it is not split, as after `=`; elements of a list are spaced."""
        parts = (Piece(" ", None) if part is None else part for part in self._parts(word, splits=False))
        return tuple(part for part in parts if part.text)

    def _parts(self, word: Word, *, splits: bool) -> Iterator[Part | None]:
        length = 0
        for part in self._unbounded(word, splits=splits):
            length = bounded(length + (1 if part is None else len(part.text) + 1), "a word")
            self.work.spend(0 if part is None else len(part.text))
            yield part

    def _unbounded(self, word: Word, *, splits: bool) -> Iterator[Part | None]:
        for part in word:
            if isinstance(part, Literal):
                yield Piece(part.text, part.start, is_quoted=part.quoted)
            elif isinstance(part, Arithmetic):
                yield self._computed(part)
            elif isinstance(part, Substitution):
                yield Hole(part.text, (part.text,), part.start, part.end, can_be_words=not part.quoted)
            else:
                yield from self._parameter(part, splits=splits and not part.quoted)

    def _computed(self, part: Arithmetic) -> Part:
        text = f"$(({part.expression}))"
        try:
            return Piece(str(evaluate(part.expression, self.number)), part.start)
        except UnknownError:
            unknown = [name for name in re.findall(r"[A-Za-z_]\w*", part.expression) if self.number(name) is None]
            return Hole(text, tuple(dict.fromkeys(unknown)) or (text,), part.start, part.end)

    def _parameter(self, part: Expansion, *, splits: bool) -> Iterator[Part | None]:
        whole = part.index in ("@", "*") or part.name in ("@", "*")
        if whole and not part.operator:
            yield from self._all(part, splits=splits)
            return
        value = self._element(part)
        if part.operator:
            value = self._operated(part, value)
        if value is None:
            yield Hole(_text(part), (part.name,), part.start, part.end, can_be_words=splits)
            return
        if not value and part.quoted:
            yield Piece("", part.start, is_quoted=True)
        yield from _again(value, splits=splits, is_quoted=part.quoted)

    def _all(self, part: Expansion, *, splits: bool) -> Iterator[Part | None]:
        """Every element of a list: quoted, each is a word."""
        if part.name in ("@", "*"):
            found: Array | None = self.arguments or ()
        else:
            found = self.array(part.name)
        if found is None:
            text = f"${{{part.name}[{part.index}]}}"
            yield Hole(text, (part.name,), part.start, part.end, can_be_words=True)
            return
        if part.quoted and (part.index or part.name) == "*":
            if not found:
                yield Piece("", part.start, is_quoted=True)
            yield from _again(joined(found), splits=False, is_quoted=True)
            return
        for number, value in enumerate(found):
            if number:
                yield None
            yield from _again(value, splits=splits, is_quoted=not splits)

    def _element(self, part: Expansion) -> Value | None:
        if part.index is None:
            return self.string(part.name)
        values = self.array(part.name)
        if values is None:
            return None
        if part.name in self.arrays:
            try:
                index = evaluate(part.index.strip("'\""), self.number)
            except UnknownError:
                return (Hole(_text(part), (part.name,), part.start, part.end),)
            return values[index] if -len(values) <= index < len(values) else ()
        return values[0]

    def _operated(self, part: Expansion, value: Value | None) -> Value | None:
        how, argument = part.operator, part.argument
        if how in (":-", "-", ":=", "="):
            # Where the environment could say it too, the script's own default is what the script says.
            if value is None or (how.startswith(":") and not value):
                value = self.value(argument)
                if how.endswith("="):
                    self.set(part.name, value)
            return value
        if how in (":+", "+"):
            if value is None:
                return None
            return self.value(argument) if value or how == "+" else ()
        if how in (":?", "?"):
            return value
        text, pattern = (None if value is None else known(value)), known(self.value(argument))
        changed = None if text is None or pattern is None else _changed(text, how, pattern)
        if changed is None:
            return (Hole(_text(part), missing(value or ()) or (part.name,), part.start, part.end),)
        return (Piece(changed, part.start),)


def _again(value: Value, *, splits: bool, is_quoted: bool) -> Iterator[Part]:
    """The parts of a variable's value where it is written without or within quotes."""
    return (one if isinstance(one, Hole) else Piece(one.text, one.start, splits, is_quoted) for one in value)


def _unknown(name: str) -> Value:
    """What nobody knows of a variable."""
    return (Hole(f"${name}", (name,), None, None, can_be_words=True),)


def _text(part: Expansion) -> str:
    return f"${{{part.name}}}" if part.operator or part.index or len(part.name) > 1 else f"${part.name}"


def _changed(text: str, how: str, pattern: str) -> str | None:
    """`${name%pattern}` and its kin."""
    if how in ("%", "%%", "#", "##"):
        return _trimmed(text, how, pattern) if len(text) <= MAX_MATCHED else None
    if how in ("/", "//"):
        old, _, new = pattern.partition("/")
        if not old or any(one in old for one in "*?[\\"):
            return None
        bounded(len(text) + text.count(old) * len(new), "a word")
        return text.replace(old, new) if how == "//" else text.replace(old, new, 1)
    if how in ("^^", ",,"):
        return text.upper() if how == "^^" else text.lower()
    if how == ":":
        numbers = pattern.split(":")
        if all(re.fullmatch(r"\s*\d+\s*", one) for one in numbers) and len(numbers) <= 2:
            start = int(numbers[0])
            return text[start : start + int(numbers[1])] if len(numbers) == 2 else text[start:]
    return None


def _trimmed(text: str, how: str, pattern: str) -> str:
    cuts = range(len(text) + 1)
    if how[0] == "%":
        order = cuts if how == "%%" else reversed(cuts)
        return next((text[:at] for at in order if fnmatch.fnmatchcase(text[at:], pattern)), text)
    order = reversed(cuts) if how == "##" else cuts
    return next((text[at:] for at in order if fnmatch.fnmatchcase(text[:at], pattern)), text)


def distinct(states: list[State], limit: int) -> list[State]:
    """The states without repetitions; beyond the limit they become one, in which what differs is unknown."""
    found: list[State] = []
    for state in states:
        if state.ended:
            continue
        same = next(
            (one for one in found if one.variables == state.variables and one.arguments == state.arguments), None
        )
        if same is None:
            found.append(state)
        else:
            same.assumptions = _common(same.assumptions, state.assumptions)
    return found if len(found) <= limit else [_joined(found)]


def _common(left: tuple[tuple[str, int], ...], right: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    return tuple(one for one in left if one in right)


def _joined(states: list[State]) -> State:
    whole = states[0].copy()
    for other in states[1:]:
        whole.assumptions = _common(whole.assumptions, other.assumptions)
        for name in {*whole.variables, *other.variables}:
            if whole.variables.get(name) != other.variables.get(name):
                whole.set(name, _unknown(name))
    return whole


# What gives a variable another value: assignments, `export` and the like, `let`, `read` and `unset`.


def assign(state: State, one: Assignment) -> None:
    """`name=value`, `name+=value` and `name=(…)`."""
    if one.is_array:
        words: Array = tuple(value for word in one.value for value in state.expand(word))  # type: ignore[arg-type]
        before = state.array(one.name) if one.append else ()
        state.set_array(one.name, (*((_unknown(one.name),) if before is None else before), *words))
        return
    value = state.value(one.value)  # type: ignore[arg-type]  # a list is told by is_array
    if one.index is not None:
        return
    if one.append:
        old = state.string(one.name)
        value = (*(_unknown(one.name) if old is None else old), *value)
    state.set(one.name, value)


def declare(state: State, word: Word) -> None:
    """A word of `export` and the like: `name=value`, or a list that the parser has marked."""
    if not word or not isinstance(word[0], Literal):
        return
    match = re.match(r"([A-Za-z_]\w*)(\+?)=(\(?)", word[0].text)
    if not match:
        return
    if match[3] and word[0].text == match[0]:
        parts: list[Word] = [()]
        for part in word[1:]:
            if isinstance(part, Literal) and part.text == "\0":
                parts.append(())
            else:
                parts[-1] = (*parts[-1], part)
        state.set_array(match[1], tuple(value for one in parts if one for value in state.expand(one)))
        return
    length = match.end() - len(match[3])
    rest = Literal(word[0].text[length:], word[0].start + length, word[0].quoted)
    assign(state, Assignment(match[1], (rest, *word[1:]) if rest.text else word[1:], append=bool(match[2])))


def let(expression: str | None, state: State) -> None:
    """The assignment of `let` and of `((…))`."""
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", expression or "", re.S)
    counted = re.fullmatch(r"\s*([A-Za-z_]\w*)(\+\+|--)\s*", expression or "")
    if counted:
        match = re.fullmatch(r"(\w+)([-+])=(1)", f"{counted[1]}{counted[2][0]}=1")
    if not match:
        return
    name, how, rest = match[1], match[2], match[3]
    text = f"{name} {how} ({rest})" if how else rest
    try:
        state.set(name, (Piece(str(evaluate(text, state.number)), None),))
    except UnknownError:
        state.set(name, (Hole(f"${name}", (name,), None, None),))


def forget(command: str, name: str, state: State) -> None:
    """What `unset`, `read` and the like make of a variable: nothing, or what nobody knows."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        return
    state.variables.pop(name, None)
    state.arrays.discard(name)
    if command == "unset":
        state.set(name, ())
