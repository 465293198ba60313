"""What gives a variable another value: assignments, `export` and the like, `let`, `read` and `unset`."""

from __future__ import annotations

import re

from . import arithmetic
from .state import State
from .syntax import Assignment, Literal, Word
from .values import Array, Hole, Piece


def assign(state: State, one: Assignment) -> None:
    """`name=value`, `name+=value` and `name=(…)`."""
    if one.is_array:
        words: Array = tuple(value for word in one.value for value in state.expand(word))  # type: ignore[arg-type]
        before = state.array(one.name) if one.append else ()
        if before is None:
            before = ((Hole(f"${one.name}", (one.name,), None, None, can_be_words=True),),)
        state.set_array(one.name, (*before, *words))
        return
    value = state.value(one.value)  # type: ignore[arg-type]  # a list is told by is_array
    if one.index is not None:
        return
    if one.append:
        old = state.string(one.name)
        value = (*(old if old is not None else (Hole(f"${one.name}", (one.name,), None, None, True),)), *value)
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
    name, operator, rest = match[1], match[2], match[3]
    text = f"{name} {operator} ({rest})" if operator else rest
    try:
        state.set(name, (Piece(str(arithmetic.evaluate(text, state.number)), None),))
    except arithmetic.UnknownError:
        state.set(name, (Hole(f"${name}", (name,), None, None),))


def forget(command: str, name: str, state: State) -> None:
    """What `unset`, `read` and the like make of a variable: nothing, or what nobody knows."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        return
    state.variables.pop(name, None)
    state.arrays.discard(name)
    if command == "unset":
        state.set(name, ())
