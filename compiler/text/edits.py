"""Edits of a document's text: one value set, removed or renamed, everything else left as the user formatted it.

After each edit the new text is read again and its values are compared with what the edit means; an edit whose text
cannot be changed safely (inside an alias, say) is refused, never guessed.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from parcompile.diagnostics import Edit, Path

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
