"""One mistake: what it is, where it stands, how it is mended, and how it is printed.

Every part of the compiler that finds something wrong says it with this type; the reporters print it.
"""

from __future__ import annotations

import difflib
import enum
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

# Did you mean …? The nearest of a few names.

LONGEST = 80
"""Longer words are no misspelt names."""
_LEAST_RATIO = 0.7
"""Of difflib, whose 0.6 takes a DeepSpeed key of one's own, `comms_config`, for `comms_logger`."""

_SEPARATORS = str.maketrans("", "", "-_. ")


def closest(word: str, candidates: Iterable[str], *, least: float = _LEAST_RATIO) -> str | None:
    """The candidate that `word` most probably misspells, None when none is near enough to be worth a guess.

    Case and `-`, `_`, `.` and spaces do not count.

    Args:
        word: what was written.
        candidates: what could have been meant.
        least: how alike both have to be, from 0 to 1 (`difflib.SequenceMatcher.ratio`).
    """
    if not word or len(word) > LONGEST:
        return None
    meant, names = _bare(word), dict[str, str]()
    size, letters = len(meant), _letters(meant)
    for candidate, name, other, held in _compared(tuple(candidates)):
        # Letters that the other lacks are not alike in any order; difflib finds that out more slowly.
        most = size - (letters & ~held).bit_count() if size <= other else other
        if 2 * most >= least * (size + other) and candidate != word:
            names.setdefault(name, candidate)
    near = difflib.get_close_matches(meant, names, n=1, cutoff=least)
    return names[near[0]] if near else None


@functools.lru_cache(maxsize=64)
def _compared(candidates: tuple[str, ...]) -> list[tuple[str, str, int, int]]:
    """Each candidate, its bare name, the length of that and its letters: files ask for the same lists many times."""
    bare = map(_bare, candidates)
    return [(one, name, len(name), _letters(name)) for one, name in zip(candidates, bare, strict=True)]


def _letters(word: str) -> int:
    """A bit for each letter, some of which share one."""
    return functools.reduce(int.__or__, (1 << ord(letter) % 64 for letter in word), 0)


def _bare(word: str) -> str:
    return word.lower().translate(_SEPARATORS)


# A diagnostic: one mistake (or remark) about a file, with its place, its reason and what to write instead.

Path = tuple[str | int, ...]
"""Where a value stands in a document: keys and list indices from the root."""


class Severity(str, enum.Enum):
    """How bad a diagnostic is. Only errors stop the compiler."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Safety(str, enum.Enum):
    """What applying a fix does to the run that the spec describes."""

    SAFE = "safe"
    CHANGES_NUMERICS = "changes numerics"
    CHANGES_COST = "changes cost"


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a file. Lines and columns count from 1; columns count characters."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Edit:
    """Set the value at `path` to `value`, or remove the entry, or give it another key."""

    path: Path
    value: object = None
    remove: bool = False
    rename_to: str | None = None


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a fix does to the text: the characters from `start` up to `end` become `text`."""

    start: Position
    end: Position
    text: str


@dataclass(frozen=True, slots=True)
class Fix:
    """A way to make a diagnostic go away, with what that changes. A fix that was tried knows its replacement."""

    title: str
    safety: Safety
    edits: tuple[Edit, ...]
    replacement: Replacement | None = None

    @classmethod
    def removing(cls, path: Path, safety: Safety) -> Fix:
        """Leaves the key at `path` out."""
        return cls(f"remove {path[-1]}", safety, (Edit(path, remove=True),))

    @classmethod
    def setting(cls, path: Path, value: object, safety: Safety) -> Fix:
        """Gives the key at `path` another value."""
        said = str(value).lower() if isinstance(value, bool) else value
        return cls(f"set {path[-1]} to {said}", safety, (Edit(path, value),))


@dataclass(frozen=True, slots=True)
class Related:
    """Another place that a diagnostic speaks of, such as the first of two duplicate keys."""

    message: str
    path: Path
    position: Position | None = None
    end: Position | None = None


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. `position` is None only for findings about a whole file (it cannot be read, say).

    `end` is the place behind the last character that the finding is about.
    """

    code: str
    severity: Severity
    message: str
    path: Path = ()
    file: str | None = None
    position: Position | None = None
    help: str | None = None
    fixes: tuple[Fix, ...] = ()
    related: tuple[Related, ...] = ()
    end: Position | None = None

    def __repr__(self) -> str:
        where = f"{self.file}:{self.position.line}:{self.position.column}" if self.position else self.file
        said = self.message if len(self.message) <= 100 else f"{self.message[:99]}…"
        return f"Diagnostic({self.code!r}, {self.severity.value!r}, {said!r}, {where!r})"

    @property
    def is_error(self) -> bool:
        """Whether this stops the compiler."""
        return self.severity is Severity.ERROR

    def at(self, file: str, position: Position | None) -> Diagnostic:
        """The same diagnostic, placed."""
        return replace(self, file=file, position=position)

    def moved(self, place: Callable[[Path], Path]) -> Diagnostic:
        """The same of another tree, in which `place` says where each value stands."""
        fixes = tuple(
            replace(fix, edits=tuple(replace(edit, path=place(edit.path)) for edit in fix.edits)) for fix in self.fixes
        )
        related = tuple(replace(one, path=place(one.path)) for one in self.related)
        return replace(self, path=place(self.path), fixes=fixes, related=related)


@functools.lru_cache(maxsize=4096)
def format_path(path: Path) -> str:
    """`("parallelism", "tp")` as `parallelism.tp`, list indices as `[0]`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}" if text else step
    return text


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    """Whether any of the diagnostics stops the compiler."""
    return any(diagnostic.is_error for diagnostic in diagnostics)


def in_file_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Sorted by file, line and column, then by code: the order in which a reader meets them."""

    def key(diagnostic: Diagnostic) -> tuple[str, int, int, str, str]:
        position = diagnostic.position or Position(0, 0)
        return (diagnostic.file or "", position.line, position.column, diagnostic.code, diagnostic.message)

    return sorted(diagnostics, key=key)
