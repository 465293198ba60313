"""Fixes: edits of a document's text, tried before they are offered, and applied by `--fix`.

One value is set, removed or renamed, and everything else, comments too, stays as the user formatted it.
After each edit the new text is read again and its values are compared with what the edit means; an edit whose text
cannot be changed safely (inside an alias, say) is refused, never guessed.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from parcompile.atomic import write_file
from parcompile.diagnostics import Diagnostic, Edit, Fix, Path, Replacement, Safety

from . import Document, Place, parse


class EditError(ValueError):
    """The edit cannot be made in this text."""


_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./+-]*")
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"})


def apply_edit(document: Document, edit: Edit) -> Document:
    """The document after one edit.

    Raises:
        EditError: the text cannot be changed so.
    """
    expected = _edited(document.tree, edit)
    start, end, text = _TextEditor(document).cut(edit)
    changed = document.text[:start] + text + document.text[end:]
    result = parse(changed, document.file, document.format, bom=document.source.bom)
    if result.document is None or not _same(result.document.tree, expected):
        raise EditError(f"{edit.path!r} cannot be changed without touching something else")
    return result.document


def _same(left: object, right: object) -> bool:
    """Equal values of equal types; the order of keys does not count."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def _edited(tree: object, edit: Edit) -> object:
    """What the values are to be after the edit."""
    if not edit.path:
        if edit.remove or edit.rename_to is not None:
            raise EditError("the whole document cannot be removed or renamed")
        return edit.value
    # Copied is only what lies on the way: the rest is shared with the tree as it was.
    changed: Any = copy.copy(tree)
    node: Any = changed
    *parents, last = edit.path
    for step in parents:
        if isinstance(node, dict) and isinstance(step, str):
            if node.get(step) is None:
                if edit.remove or edit.rename_to is not None:
                    raise EditError(f"there is no {step!r}")
                node[step] = {}
        elif not (isinstance(node, list) and isinstance(step, int) and step < len(node)):
            raise EditError(f"there is no {step!r}")
        node[step] = copy.copy(node[step])
        node = node[step]
    _change(node, last, edit)
    return changed


def _change(node: Any, last: str | int, edit: Edit) -> None:
    inside = (isinstance(node, dict) and last in node) or (isinstance(node, list) and last in range(len(node)))
    if edit.remove:
        if not inside:
            raise EditError(f"there is no {last!r}")
        del node[last]
    elif edit.rename_to is not None:
        if not isinstance(node, dict) or not inside or edit.rename_to in node:
            raise EditError(f"{last!r} cannot be renamed to {edit.rename_to!r}")
        node[edit.rename_to] = node.pop(last)
    elif isinstance(node, list) and last == len(node):
        node.append(edit.value)
    elif inside or (isinstance(node, dict) and isinstance(last, str)):
        node[last] = edit.value
    else:
        raise EditError(f"there is no {last!r}")


class _TextEditor:
    """Finds which stretch of the text to replace by what."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.text = document.text
        self.yaml = document.format == "yaml"
        self.line_break = "\r\n" if "\r\n" in self.text else "\n"

    def cut(self, edit: Edit) -> tuple[int, int, str]:
        """(start, end, replacement)."""
        place = self._place(edit.path)
        if edit.remove:
            assert place is not None
            return self._remove(edit.path, place)
        if edit.rename_to is not None:
            assert place is not None
            return place.key_start, place.key_end, self._key(edit.rename_to, self.text[place.key_start])
        if place is not None:
            return self._replace(place, edit.value)
        return self._insert(edit.path, edit.value)

    def _place(self, path: Path) -> Place | None:
        """The place of a value; refused when it is not written here but comes through an alias."""
        for length in range(1, len(path) + 1):
            outer, inner = self.document.place(path[: length - 1]), self.document.place(path[:length])
            if outer is None or inner is None:
                return None
            if not outer.start <= inner.start <= outer.end:
                raise EditError("the value comes through an alias")
        return self.document.place(path)

    # -- writing values -----------------------------------------------------------------------------------------------

    def _key(self, name: str, quote: str = '"') -> str:
        if self.yaml and quote != '"' and _is_plain(name):
            return f"'{name}'" if quote == "'" else name
        return json.dumps(name, ensure_ascii=False)

    def _value(self, value: object, quote: str = "") -> str:
        if self.yaml:
            if isinstance(value, str) and _is_plain(value) and quote != '"':
                return f"'{value}'" if quote == "'" else value
            if isinstance(value, dict):
                return "{" + ", ".join(f"{self._key(key, '')}: {self._value(one)}" for key, one in value.items()) + "}"
            if isinstance(value, list):
                return "[" + ", ".join(self._value(one) for one in value) + "]"
        return json.dumps(value, ensure_ascii=False)

    def _replace(self, place: Place, value: object) -> tuple[int, int, str]:
        quote = self.text[place.start : place.start + 1]
        written = self._value(value, quote)
        if self.yaml and place.key_end >= 0:
            colon = self.text.index(":", place.key_end) + 1
            if place.start == place.end or "\n" in self.text[colon : place.start]:
                # Nothing, or a block below the key: the value goes beside the key.
                return colon, max(place.end, colon), " " + written
        # A block of text (| or >) has its last line break inside: keep that.
        end = place.start + len(self.text[place.start : place.end].rstrip("\r\n"))
        return place.start, end, written

    # -- new entries --------------------------------------------------------------------------------------------------

    def _insert(self, path: Path, value: object) -> tuple[int, int, str]:
        depth = max(length for length in range(len(path)) if self.document.place(path[:length]) is not None)
        parent, rest = path[:depth], path[depth:]
        for step in reversed(rest[1:]):
            value = {step: value}
        place = self._place(parent)
        assert place is not None
        holder = self.document.get(parent)
        if holder is None:
            return self._replace(place, {rest[0]: value})
        entry = (
            self._value(value) if isinstance(holder, list) else f"{self._key(str(rest[0]), '')}: {self._value(value)}"
        )
        if not isinstance(holder, (dict, list)):
            raise EditError(f"{parent!r} holds no entries")
        entries = self._entries(place)
        if self._is_block(place):
            return self._insert_block(place, entries, f"- {entry}" if isinstance(holder, list) else entry)
        return self._insert_flow(place, entries, entry)

    def _insert_flow(self, place: Place, entries: list[tuple[int, int]], entry: str) -> tuple[int, int, str]:
        if not entries:
            return place.start + 1, place.end - 1, entry
        start, end = entries[-1]
        indent = self._indent(start)
        if indent is None:
            return end, end, f", {entry}"
        return end, end, f",{self.line_break}{indent}{entry}"

    def _insert_block(self, place: Place, entries: list[tuple[int, int]], entry: str) -> tuple[int, int, str]:
        if not entries:
            raise EditError("an empty block")
        line_start = self._line_start(place.start)
        indent = re.sub(r"[^ ]", " ", self.text[line_start : place.start])
        end = entries[-1][1]
        if end > 0 and self.text[end - 1] in "\r\n":
            return end, end, f"{indent}{entry}{self.line_break}"
        end = self._line_end(end)
        return end, end, f"{self.line_break}{indent}{entry}"

    # -- removal ------------------------------------------------------------------------------------------------------

    def _remove(self, path: Path, place: Place) -> tuple[int, int, str]:
        parent = self._place(path[:-1])
        assert parent is not None
        start = place.key_start if isinstance(path[-1], str) else place.start
        entries = self._entries(parent)
        index = next((number for number, entry in enumerate(entries) if entry[0] == start), None)
        if index is None:
            raise EditError("the entry is not written here")
        if self._is_block(parent):
            return self._remove_block(parent, entries, index)
        if len(entries) == 1:
            return parent.start + 1, parent.end - 1, ""
        if index < len(entries) - 1:
            return start, entries[index + 1][0], ""
        return entries[index - 1][1], entries[index][1], ""

    def _is_block(self, place: Place) -> bool:
        """Whether a list or mapping is written by indentation, without brackets."""
        if self.yaml and self.text[place.start] in "&!":
            raise EditError("an anchor or a tag stands before the value")
        return self.yaml and self.text[place.start] not in "{["

    def _remove_block(self, parent: Place, entries: list[tuple[int, int]], index: int) -> tuple[int, int, str]:
        if len(entries) == 1:
            return self._replace(parent, [] if isinstance(parent.children, list) else {})
        start, end = entries[index]
        if isinstance(parent.children, list):
            start = self.text.rindex("-", 0, start)
        if index + 1 < len(entries) and self._indent(start) is None:
            following = entries[index + 1][0]
            return start, self.text.rindex("-", 0, following) if isinstance(parent.children, list) else following, ""
        if end == 0 or self.text[end - 1] not in "\r\n":
            end = self._line_end(end)
        if end < len(self.text) and self.text[end - 1] not in "\r\n":
            end += 2 if self.text.startswith("\r\n", end) else 1
        elif end == len(self.text) and self._line_start(start) > 0:
            # The last line of a file without a final line break: take the one before it.
            before = self._line_start(start) - 1
            return before - (self.text[before - 1 : before + 1] == "\r\n"), end, ""
        return self._line_start(start), end, ""

    # -- the text -----------------------------------------------------------------------------------------------------

    def _entries(self, place: Place) -> list[tuple[int, int]]:
        """Start and end of each entry that is written in this value, in order."""
        children = place.children
        if isinstance(children, dict):
            spans = [(child.key_start, max(child.end, child.key_end)) for child in children.values()]
        else:
            spans = [(child.start, child.end) for child in children or ()]
        return sorted(span for span in spans if place.start <= span[0] <= place.end)

    def _line_start(self, offset: int) -> int:
        return max(self.text.rfind("\n", 0, offset), self.text.rfind("\r", 0, offset)) + 1

    def _line_end(self, offset: int) -> int:
        match = re.compile(r"[\r\n]|\Z").search(self.text, offset)
        assert match is not None
        return match.start()

    def _indent(self, offset: int) -> str | None:
        """The white space before `offset` when nothing else stands before it on its line."""
        before = self.text[self._line_start(offset) : offset]
        return before if not before.strip() else None


def _is_plain(text: str) -> bool:
    """Whether YAML reads `text` without quotes as this text, in all its versions."""
    return bool(_PLAIN.fullmatch(text)) and text.lower() not in _WORDS


class Fixed(NamedTuple):
    """A document after its fixes.

    `skipped` are the findings whose fix would touch what another has changed, or that the text forbids.
    """

    document: Document
    applied: tuple[Diagnostic, ...]
    skipped: tuple[Diagnostic, ...]


def chosen_fix(diagnostic: Diagnostic, *, unsafe: bool) -> Fix | None:
    """The fix to apply for a diagnostic: its first safe one, with `unsafe` else its first of any kind."""
    safe = next((fix for fix in diagnostic.fixes if fix.safety is Safety.SAFE), None)
    return safe or (diagnostic.fixes[0] if unsafe and diagnostic.fixes else None)


def apply_fixes(document: Document, diagnostics: Iterable[Diagnostic], *, unsafe: bool = False) -> Fixed:
    """Apply one fix for each diagnostic of this document that has one.

    Fixes that touch the same values are not mixed: the first counts, the others are left to a second round, when the
    changed document has been checked again.
    """
    applied: list[Diagnostic] = []
    skipped: list[Diagnostic] = []
    touched: list[Path] = []
    for diagnostic in diagnostics:
        fix = chosen_fix(diagnostic, unsafe=unsafe) if diagnostic.file in (None, document.file) else None
        if fix is None:
            continue
        paths = [path for edit in fix.edits for path in _paths(edit)]
        taken = any(_overlap(path, other) for path in paths for other in touched)
        try:
            changed = None if taken else reduce(apply_edit, fix.edits, document)
        except EditError:
            changed = None
        if changed is None:
            skipped.append(diagnostic)
            continue
        document = changed
        touched += paths
        applied.append(diagnostic)
    return Fixed(document, tuple(applied), tuple(skipped))


def _paths(edit: Edit) -> list[Path]:
    """The paths that an edit changes. Removing a list's entry moves the others: the whole list."""
    if edit.rename_to is not None:
        return [edit.path, (*edit.path[:-1], edit.rename_to)]
    return [edit.path[:-1] if edit.remove and isinstance(edit.path[-1], int) else edit.path]


def _overlap(left: Path, right: Path) -> bool:
    length = min(len(left), len(right))
    return left[:length] == right[:length]


def save(document: Document, before: Document) -> None:
    """Write a document back to its file, whole or not at all, with its byte order mark and permissions.

    Args:
        document: after its fixes.
        before: as it was read. A file that is another one now stays as it is.

    Raises:
        OSError: the file cannot be written, or was changed since it was read.
    """
    write_file(FilePath(document.file), _content(document), expected=_content(before))


def _content(document: Document) -> bytes:
    return (("\ufeff" if document.source.bom else "") + document.text).encode("utf-8")


# Tries fixes before they are offered: one that does not remove its diagnostic, or that adds an error, is none.
#
# That what is mended turns out too large for its accelerator is no fault of the fix: it works, but comes behind those
# after which the run fits.

Recheck = Callable[[Document], Sequence[Diagnostic]]
"""Everything that is wrong with a document."""

MOST_OFFERED = 3
"""So many fixes of one diagnostic are worth reading."""
MOST_WORK = 1500
LARGEST = 200_000
"""A trial checks the whole file again, which takes as long as there are findings: of trials times findings there are no
more than so many, and none in a file of more characters than this. What is not tried is not offered."""


def tried(
    diagnostics: Iterable[Diagnostic], document: Document, recheck: Recheck, *, too_large: str
) -> list[Diagnostic]:
    """The diagnostics, each with the first few of its fixes that work.

    Args:
        diagnostics: of the document.
        document: they are tried on.
        recheck: what is wrong with a changed one.
        too_large: the code that says that a run does not fit: fixes that end there come last.
    """
    found = list(diagnostics)
    errors = Counter(_identity(one) for one in found if one.is_error)
    budget = MOST_WORK // max(1, len(found)) if len(document.text) <= LARGEST else 0
    kept: list[Diagnostic] = []
    for one in found:
        fixes = _working(one, errors, document, recheck, too_large) if len(one.fixes) <= budget else []
        budget -= len(one.fixes)
        kept.append(replace(one, fixes=tuple(fixes)))
    return kept


def _working(
    one: Diagnostic, errors: Counter[tuple[str, Path]], document: Document, recheck: Recheck, too_large: str
) -> list[Fix]:
    working: list[Fix] = []
    last: list[Fix] = []
    for fix in one.fixes:
        if len(working) == MOST_OFFERED:
            break
        try:
            changed = reduce(apply_edit, fix.edits, document)
        except EditError:
            continue
        after = recheck(changed)
        gone = all(_identity(other) != _identity(one) for other in after)
        known = Counter({(code, _renamed(path, fix)): count for (code, path), count in errors.items()})
        added = Counter(_identity(other) for other in after if other.is_error) - known
        if gone and all(code == too_large for code, _ in added):
            # Nobody could tell what memory it takes before: what is too large comes last.
            (last if added else working).append(replace(fix, replacement=_replacement(document, changed)))
    return [*working, *last][:MOST_OFFERED]


def _renamed(path: Path, fix: Fix) -> Path:
    """Where a value stands after the renamings of a fix."""
    for edit in fix.edits:
        size = len(edit.path)
        if edit.rename_to is not None and path[:size] == edit.path:
            path = (*edit.path[:-1], edit.rename_to, *path[size:])
    return path


def _replacement(before: Document, after: Document) -> Replacement:
    """The one stretch of text in which two documents differ."""
    old, new = before.text, after.text
    start = _common(old, new)
    rest = min(len(old), len(new)) - start
    same = _common(old[: -rest - 1 : -1], new[: -rest - 1 : -1])
    end = len(old) - same
    return Replacement(before.source.position(start), before.source.position(end), new[start : len(new) - same])


def _common(left: str, right: str) -> int:
    """Characters that two texts begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(left), len(right)))


def _identity(one: Diagnostic) -> tuple[str, Path]:
    return one.code, one.path
