"""For people at a terminal: the message, the line with the place underlined, and what to write instead; or one line.

error[K001]: unknown key "trainning"
  --> spec.json:5:3
   |
 5 |   "trainning": {}
   |   ^^^^^^^^^^^
  help: did you mean "training"?
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TextIO
from unicodedata import category, combining, east_asian_width

from parcompile.diagnostics import Diagnostic, Position, Safety, Severity, format_path

from . import Context, Style, printable, wrapped, writable

_TOKEN = re.compile(r"""\"(?:[^"\\]|\\.)*\"|'[^']*'|[^\s"'{}\[\],:]+|.""")
_TAB = "    "


def write_text(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:
    """One block for each diagnostic, and a last line with the count. Folded remarks take a line each."""
    remarks = [one for one in diagnostics if one.severity is Severity.INFO]
    style = context.style
    whole = [one for one in diagnostics if not (context.folded and one.severity is Severity.INFO)]
    for group in _of_one_line(whole):
        drawn: set[tuple[Position, str]] = set()
        for diagnostic in group:
            stream.write(writable(stream, "\n".join(_block(diagnostic, context, group, drawn))) + "\n\n")
    if context.folded and remarks:
        stream.write("".join(writable(stream, _folded(one, style)) + "\n" for one in remarks) + "\n")
    if diagnostics:
        stream.write(writable(stream, _summary(diagnostics, context)) + "\n")


def _of_one_line(diagnostics: Sequence[Diagnostic]) -> Iterator[list[Diagnostic]]:
    """Neighbours of one severity that are about one line: they share its excerpt."""

    def line(one: Diagnostic) -> object:
        return id(one) if one.position is None else (one.severity, one.file, one.position.line)

    return (list(group) for _, group in itertools.groupby(diagnostics, line))


def _folded(diagnostic: Diagnostic, style: Style) -> str:
    """A remark in one line, cut at the terminal's width."""
    head = f"{diagnostic.severity.value}[{diagnostic.code}]"
    text = f": {printable(' '.join(diagnostic.message.split()))}"
    room = style.width - len(head)
    if _columns(text) > room:
        dots = "…" if style.unicode else "..."
        text = _cut(text, room - len(dots)).rsplit(" ", 1)[0] + dots
    return style.severity(diagnostic.severity, head) + text


def _summary(diagnostics: Sequence[Diagnostic], context: Context) -> str:
    counts = []
    for severity, word in ((Severity.ERROR, "error"), (Severity.WARNING, "warning"), (Severity.INFO, "remark")):
        count = sum(1 for diagnostic in diagnostics if diagnostic.severity is severity)
        if count:
            hint = " (-v shows where)" if severity is Severity.INFO and context.folded else ""
            counts.append(context.style.severity(severity, f"{count} {word}{'' if count == 1 else 's'}") + hint)
    fixable = sum(1 for d in diagnostics if any(fix.safety is Safety.SAFE for fix in d.fixes))
    text = ", ".join(counts)
    if len(context.files) > 1:
        text += f" in {len({d.file for d in diagnostics if d.file})} of {len(context.files)} files"
    if fixable and context.fix_hint:
        text += f"; [*] {fixable} can be fixed with {context.fix_hint}"
    return text


def _block(
    diagnostic: Diagnostic, context: Context, group: Sequence[Diagnostic], drawn: set[tuple[Position, str]]
) -> list[str]:
    """A finding. Its `group` shares one excerpt, in which it underlines all places; `drawn` are those seen already."""
    severity, style = diagnostic.severity, context.style
    mark = " [*]" if context.fix_hint and any(fix.safety is Safety.SAFE for fix in diagnostic.fixes) else ""
    head = style.severity(severity, f"{severity.value}[{diagnostic.code}]") + style.strong(f"{mark}: ")
    indent = len(severity.value) + len(diagnostic.code) + len(mark) + 4
    lines = wrapped(printable(diagnostic.message), style.width - indent)
    block = [head + style.strong(lines[0]), *(" " * 2 + style.strong(line) for line in lines[1:])]
    margin = 3
    position = diagnostic.position
    places = [p for p in (position, *(r.position for r in diagnostic.related)) if p is not None]
    if places:
        margin = max(3, *(len(str(place.line)) + 1 for place in places))
    others = [one.position for one in group if one.position is not None]
    block += _place(diagnostic.file, position, context, margin, severity, "", others, drawn)
    if position is None and diagnostic.path:
        block.append(f"{' ' * margin}{style.quiet('at')} {printable(format_path(diagnostic.path))}")
    for related in diagnostic.related:
        if related.position is not None:
            block += _place(diagnostic.file, related.position, context, margin, None, related.message, (), drawn)
    if diagnostic.help:
        block += _note("help", printable(diagnostic.help), style, margin)
    for fix in diagnostic.fixes:
        if fix.safety is not Safety.SAFE or len(diagnostic.fixes) > 1:
            block += _note("fix", printable(f"{fix.title} ({fix.safety.value})"), style, margin)
    return block


def _place(
    file: str | None,
    position: Position | None,
    context: Context,
    margin: int,
    severity: Severity | None,
    label: str,
    others: Sequence[Position],
    drawn: set[tuple[Position, str]],
) -> list[str]:
    if file is None and position is None:
        return []
    style = context.style
    bar = style.quiet("│" if style.unicode else "|")
    arrow = style.quiet(("──▶" if style.unicode else "-->") if not label else ("───" if style.unicode else "---"))
    where = printable(file or "?")
    if position is not None:
        where += f":{position.line}:{position.column}"
    lines = [f"{' ' * (margin - 1)}{arrow} {where}"]
    if position is not None and (position, label) in drawn:
        return [] if label else lines
    if position is not None:
        drawn.add((position, label))
    line = context.line(file, position.line) if position is not None else None
    if position is None or not line:
        return [*lines, f"{' ' * margin}{bar} {label}"] if label else lines
    shown, start, length = _window(line, position.column, style.width - margin - 3, "…" if style.unicode else "...")
    caret = ("^" if severity is not None else "-") * length
    fits = len(line) <= _REACH * style.width and _columns(line) <= style.width - margin - 3
    if severity is not None and fits:
        # The whole line is there: every finding about it is marked.
        marks = sorted((one for one in others if one.line == position.line), key=lambda one: one.column)
        found = [_window(line, one.column, style.width - margin - 3, "") for one in marks]
        drawn.update((one, "") for one in marks)
        start, caret = found[0][1], _carets([(one[1], one[2]) for one in found])
    mark = style.severity(severity, caret) if severity is not None else style.quiet(caret)
    number = style.quiet(f"{position.line:>{margin - 1}} ")
    lines.append(f"{' ' * margin}{bar}")
    lines.append(f"{number}{bar} {shown}")
    if label and start + length + 1 + len(label) > style.width - margin - 2 and start > len(label):
        # Behind the mark the label would leave the terminal: it stands before it.
        lines.append(f"{' ' * margin}{bar} {' ' * (start - len(label) - 1)}{label} {mark}")
    else:
        lines.append(f"{' ' * margin}{bar} {' ' * start}{mark}" + (f" {label}" if label else ""))
    return lines


def _carets(places: Sequence[tuple[int, int]]) -> str:
    """Carets below places of a line, from the first one on: each a start and a length in columns."""
    first = places[0][0]
    found = [" "] * max(start + length - first for start, length in places)
    for start, length in places:
        found[start - first : start - first + length] = "^" * length
    return "".join(found)


def _note(word: str, text: str, style: Style, margin: int) -> list[str]:
    lead = " " * (margin - 1)
    lines = wrapped(text, style.width - margin - len(word) - 2)
    rest = " " * (margin + len(word) + 1)
    return [f"{lead}{style.strong(word + ':')} {line}" if not i else rest + line for i, line in enumerate(lines)]


_REACH = 4
"""Characters before and behind a place, in widths of the terminal, that may be shown: marks over letters take none."""


def _window(line: str, column: int, width: int, dots: str) -> tuple[str, int, int]:
    """The part of a line that fits into `width` columns, and where in it the place starts and how long it is."""
    index = min(column - 1, len(line))
    # A line may be a whole file: only what is near the place is measured.
    skipped = max(0, index - _REACH * width)
    line, index = line[skipped : index + _REACH * width], index - skipped
    match = _TOKEN.match(line, index)
    length = len(match[0]) if match else 1
    first = 0
    if _columns(line) > width:
        # As much of the line's end as fits, but always a third of the width before the place.
        room = max(width // 3, width - len(dots) - _columns(line[index:]))
        first = index
        while first > 0 and _columns(line[first - 1]) <= room:
            first -= 1
            room -= _columns(line[first])
    before = dots if first or skipped else ""
    text = before + _visible(line[first:])
    start = _columns(before) + _columns(line[first:index])
    if _columns(text) > width:
        text = _cut(text, width - len(dots)) + dots
    marked = max(1, min(_columns(line[index : index + length]), width - start))
    return text, start, marked


def _visible(text: str) -> str:
    """Tabs as spaces and what moves the cursor as a middle dot."""
    text = text.replace("\t", _TAB)
    return "".join(c if c.isprintable() and category(c) not in ("Cf", "Cc") else "·" for c in text)


def _columns(text: str) -> int:
    """How many columns a terminal takes for `text`."""
    if text.isascii() and text.isprintable():
        return len(text)
    return sum(len(_TAB) if c == "\t" else 0 if combining(c) else 1 + (east_asian_width(c) in "WF") for c in text)


def _cut(text: str, columns: int) -> str:
    total = 0
    for index, character in enumerate(text):
        total += _columns(character)
        if total > columns:
            return text[:index]
    return text


def write_concise(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:
    """One line each."""
    style = context.style
    for found in diagnostics:
        where = printable(found.file or "-")
        if found.position is not None:
            where += f":{found.position.line}:{found.position.column}"
        severity = style.severity(found.severity, f"{found.severity.value}[{found.code}]")
        text = " ".join(found.message.split()) + (f" ({' '.join(found.help.split())})" if found.help else "")
        stream.write(writable(stream, f"{where}: {severity} {printable(text)}") + "\n")
