"""What a shell script consists of. Positions are offsets in its text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Literal:
    """Text that stands for itself. Quoted text is neither split into words nor matched as a pattern."""

    text: str
    start: int
    quoted: bool


@dataclass(frozen=True, slots=True)
class Expansion:
    """`$name`, `${name}`, `${name[index]}`, `${name:-word}` and the like. `operator` is empty for the plain value."""

    name: str
    start: int
    end: int
    quoted: bool
    index: str | None = None
    operator: str = ""
    argument: Word = ()


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`$((…))`."""

    expression: str
    start: int
    end: int
    quoted: bool


@dataclass(frozen=True, slots=True)
class Substitution:
    """The output of a command: `$(…)` or backquotes. It is never known."""

    text: str
    start: int
    end: int
    quoted: bool


WordPart = Literal | Expansion | Arithmetic | Substitution
Word = tuple[WordPart, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name=value`, `name+=value`, `name[index]=value` or `name=(…)`."""

    name: str
    value: Word | tuple[Word, ...]
    is_array: bool = False
    append: bool = False
    index: str | None = None


@dataclass(frozen=True, slots=True)
class Simple:
    """A command with its words. Assignments before it hold for it alone; without words they stay."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    start: int


@dataclass(frozen=True, slots=True)
class AndOr:
    """`left && right` or `left || right`."""

    left: Node
    operator: str
    right: Node


@dataclass(frozen=True, slots=True)
class Branch:
    """A condition and what runs when it holds."""

    condition: Block
    body: Block


@dataclass(frozen=True, slots=True)
class If:
    """`if … elif … else … fi`."""

    branches: tuple[Branch, ...]
    otherwise: Block


@dataclass(frozen=True, slots=True)
class Choice:
    """The patterns of a case and what runs when one of them matches."""

    patterns: tuple[Word, ...]
    body: Block


@dataclass(frozen=True, slots=True)
class Case:
    """`case word in … esac`."""

    word: Word
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class For:
    """`for name in words; do … done`; `words` is None for the C-like form and for one without `in`."""

    name: str
    words: tuple[Word, ...] | None
    body: Block


@dataclass(frozen=True, slots=True)
class While:
    """`while` and `until`."""

    condition: Block
    body: Block


@dataclass(frozen=True, slots=True)
class Group:
    """`{ … }` or `( … )`; `own` variables stay inside."""

    body: Block
    own: bool


@dataclass(frozen=True, slots=True)
class Function:
    """A function, which runs when it is called."""

    name: str
    body: Block


Node = Simple | AndOr | If | Case | For | While | Group | Function
Block = tuple[Node, ...]
