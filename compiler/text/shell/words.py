"""Strings under the variables of a script: pieces of known text with their places, and holes between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Known text. `start` is where it stands in the script; None for text that was computed or read elsewhere.

    `splits` says whether white space in it separates words; `is_quoted` keeps an empty word.
    """

    text: str
    start: int | None
    splits: bool = False
    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class Hole:
    """Text that the script does not decide, as `$NAME` is written, with the variables that would.

    `can_be_words` says whether several words, or none, may stand there.
    """

    text: str
    names: tuple[str, ...]
    start: int | None
    end: int | None
    can_be_words: bool = False


Part = Piece | Hole
Value = tuple[Part, ...]
"""One string: what a variable holds, or one word of a command."""
Array = tuple[Value, ...]


def known(value: Value) -> str | None:
    """The text, when all of it is known."""
    return None if any(isinstance(part, Hole) for part in value) else shown(value)


def shown(value: Value) -> str:
    """The text, with holes as they are written."""
    return "".join(part.text for part in value)


def missing(value: Value) -> tuple[str, ...]:
    """The variables that decide what is not known."""
    return tuple(dict.fromkeys(name for part in value if isinstance(part, Hole) for name in part.names))


def span(value: Value) -> tuple[int, int] | None:
    """Where the text stands, from the start of its first part to the end of the last that follows it there."""
    start: int | None = None
    end = 0
    for part in value:
        if part.start is None:
            continue
        stop = part.start + len(part.text) if isinstance(part, Piece) else part.end or part.start
        if start is None:
            start, end = part.start, stop
        elif end <= part.start <= end + 2:
            end = stop
    return None if start is None else (start, end)


def fields(parts: Iterable[Part | None]) -> Iterator[Value]:
    """Words out of expanded parts; None stands between two words."""
    current: list[Part] = []
    for part in parts:
        if part is None:
            if current:
                yield tuple(current)
            current = []
        elif isinstance(part, Hole) or not part.splits:
            if part.text or (isinstance(part, Piece) and part.is_quoted):
                current.append(part)
        else:
            yield from _split(part, current)
    if current:
        yield tuple(current)


def _split(part: Piece, current: list[Part]) -> Iterator[Value]:
    """The words that end in a part that white space splits; what is left stays in `current`."""
    for run in re.finditer(r"\s+|\S+", part.text):
        if not run[0].isspace():
            current.append(_cut(part, *run.span(), splits=False))
        elif current:
            yield tuple(current)
            current.clear()


def unquoted(value: Value) -> Value:
    """A word as the text of commands: white space splits it, and its quotes are taken away."""
    found: list[Part] = []
    quote = ""
    for part in value:
        if isinstance(part, Hole):
            found.append(part)
            continue
        begin = 0
        text = part.text
        for at, character in enumerate(text):
            is_mark = character == quote or (not quote and character in "'\"")
            if is_mark or (character == "\\" and text[at + 1 : at + 2] in "\n\"'"):
                found.append(_cut(part, begin, at, splits=not quote))
                begin = at + 1
                if is_mark:
                    quote = "" if quote else character
        found.append(_cut(part, begin, len(text), splits=not quote))
    return tuple(one for one in found if one.text)


def _cut(part: Piece, start: int, stop: int, *, splits: bool) -> Piece:
    return Piece(part.text[start:stop], None if part.start is None else part.start + start, splits)


def joined(values: Sequence[Value]) -> Value:
    """Several strings as one, with a space between them."""
    found: list[Part] = []
    for value in values:
        if found:
            found.append(Piece(" ", None, splits=True))
        found += value
    return tuple(found)
