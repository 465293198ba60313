"""What a condition of a script comes to: true, false, or not known; and what follows for a variable in either case."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .parse import AndOr, Block, Simple
from .state import State, UnknownError, evaluate
from .syntax import Expansion, Word
from .words import Piece, Value, known

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`holds` is None when it is not known. Then a variable `name` has `value` exactly if the condition holds."""

    holds: bool | None
    name: str = ""
    value: str = ""

    def negated(self) -> Verdict:
        """That of the opposite."""
        return Verdict(not self.holds) if self.holds is not None else Verdict(None)


UNKNOWN = Verdict(None)


def test(command: Simple, state: State) -> Verdict | None:
    """The verdict of a command that is a condition; None when it is another command."""
    if not command.words:
        return None
    first = known(state.value(command.words[0]))
    if first in ("true", ":"):
        return Verdict(holds=True)
    if first == "false":
        return Verdict(holds=False)
    if first == "((":
        return _arithmetic(command, state)
    if first not in ("[", "[[", "test"):
        return None
    words = list(command.words[1:])
    if first != "test" and words:
        words.pop()
    return _any(words, state, double=first == "[[")


def _arithmetic(command: Simple, state: State) -> Verdict:
    expression = known(state.value(command.words[1])) or ""
    try:
        return Verdict(evaluate(expression, state.number) != 0)
    except UnknownError:
        return UNKNOWN


_ALTERNATIVES, _PARTS = ("||", "-o"), ("&&", "-a")


def _any(words: Sequence[Word], state: State, *, double: bool) -> Verdict:
    """Of alternatives, each of parts that all have to hold."""
    alternatives = [
        _together([_single(one, state, double=double) for one in _split(parts, _PARTS)], decisive=False)
        for parts in _split(words, _ALTERNATIVES)
    ]
    return _together(alternatives, decisive=True)


def _split(words: Sequence[Word], marks: tuple[str, str]) -> list[list[Word]]:
    parts: list[list[Word]] = [[]]
    for word in words:
        if _literal(word) in marks:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _together(verdicts: Sequence[Verdict], *, decisive: bool) -> Verdict:
    """That of conditions of which one that comes to `decisive` decides."""
    if len(verdicts) == 1:
        return verdicts[0]
    results = [one.holds for one in verdicts]
    if decisive in results:
        return Verdict(decisive)
    return UNKNOWN if None in results else Verdict(not decisive)


def _literal(word: Word) -> str:
    return "".join(part.text for part in word if hasattr(part, "text") and not getattr(part, "quoted", True))


def _single(words: list[Word], state: State, *, double: bool) -> Verdict:
    if words and _literal(words[0]) == "!":
        return _single(words[1:], state, double=double).negated()
    if len(words) == 1:
        text = known(state.value(words[0]))
        return UNKNOWN if text is None else Verdict(bool(text))
    if len(words) == 2:
        operator, value = _literal(words[0]), state.value(words[1])
        text = known(value)
        if operator in ("-z", "-n"):
            if text is not None:
                return Verdict((text == "") == (operator == "-z"))
            name = _alone(words[1], value)
            return Verdict(None, name, "") if name and operator == "-z" else UNKNOWN
        return UNKNOWN
    if len(words) != 3:
        return UNKNOWN
    return _compared(words, _literal(words[1]), state, double=double)


def _compared(words: list[Word], operator: str, state: State, *, double: bool) -> Verdict:
    left, right = state.value(words[0]), state.value(words[2])
    texts = known(left), known(right)
    if operator in _NUMBERS:
        try:
            numbers = [int(text) for text in texts if text is not None]
        except ValueError:
            return UNKNOWN
        return UNKNOWN if len(numbers) < 2 else Verdict(_NUMBERS[operator](*numbers))
    if operator not in ("=", "==", "!="):
        return UNKNOWN
    found = _equal(left, right, words, texts, double=double)
    return found.negated() if operator == "!=" else found


def _equal(
    left: Value, right: Value, words: list[Word], texts: tuple[str | None, str | None], *, double: bool
) -> Verdict:
    if texts[0] is not None and texts[1] is not None:
        is_pattern = double and not any(getattr(part, "quoted", True) for part in words[2])
        return Verdict(fnmatchcase(texts[0], texts[1]) if is_pattern else texts[0] == texts[1])
    for word, value, text in ((words[0], left, texts[1]), (words[2], right, texts[0])):
        name = _alone(word, value)
        if name and text is not None and not any(one in text for one in "*?["):
            return Verdict(None, name, text)
    return UNKNOWN


def _alone(word: Word, value: Value) -> str:
    """The variable whose unknown value a word is, and nothing else."""
    parts = [part for part in word if not (hasattr(part, "text") and getattr(part, "text", "") == "")]
    if len(parts) != 1 or not isinstance(parts[0], Expansion) or known(value) is not None:
        return ""
    part = parts[0]
    return part.name if not part.operator and part.index is None and not part.name.isdigit() else ""


def matches(word: Word, patterns: Sequence[Word], state: State) -> Verdict:
    """Whether one of the patterns of a case matches."""
    value = state.value(word)
    text = known(value)
    texts = [known(state.value(pattern)) for pattern in patterns]
    if text is not None:
        found = [
            None
            if one is None
            else (one == text if any(getattr(part, "quoted", False) for part in pattern) else fnmatchcase(text, one))
            for one, pattern in zip(texts, patterns, strict=True)
        ]
        return Verdict(holds=True) if True in found else UNKNOWN if None in found else Verdict(holds=False)
    name = _alone(word, value)
    if texts == ["*"]:
        return UNKNOWN
    if name and len(texts) == 1 and texts[0] is not None and not any(one in texts[0] for one in "*?["):
        return Verdict(None, name, texts[0])
    return UNKNOWN


def assumed(state: State, verdict: Verdict, *, holds: bool) -> None:
    """Lets a variable have the value that a condition says, where it is taken to hold."""
    if holds and verdict.name:
        state.set(verdict.name, (Piece(verdict.value, None),) if verdict.value else ())


def judged(condition: Block, state: State) -> Verdict | None:
    """What a condition comes to; None when it is no test."""
    if len(condition) != 1:
        return None
    node = condition[0]
    if isinstance(node, Simple):
        return test(node, state)
    if isinstance(node, AndOr):
        left, right = judged((node.left,), state), judged((node.right,), state)
        if left is None or right is None:
            return None
        return _together((left, right), decisive=node.operator == "||")
    return None
