"""JUnit XML: one test suite for each file, one failed test case for each error, a passed one for a file without any."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TextIO
from xml.sax.saxutils import escape, quoteattr

from parcompile.diagnostics import Diagnostic, Severity

from .dispatch import Context

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:
    """The document. Warnings and remarks pass, and stand in the case's output."""
    suites = [(file, [found for found in diagnostics if found.file == file]) for file in context.files]
    loose = [found for found in diagnostics if found.file is None]
    suites += [("-", loose)] if loose else []
    failures = sum(found.severity is Severity.ERROR for found in diagnostics)
    tests = sum(max(1, len(found)) for _, found in suites)
    ascii_only = _ascii(stream)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    lines.append(f'<testsuites name="parcompile" tests="{tests}" failures="{failures}" errors="0">')
    for file, found in suites:
        lines += _suite(file, found, context.kinds.get(file))
    lines.append("</testsuites>")
    text = "\n".join(lines) + "\n"
    stream.write(text.encode("ascii", "xmlcharrefreplace").decode("ascii") if ascii_only else text)


def _ascii(stream: TextIO) -> bool:
    """Whether the stream cannot be trusted to write the UTF-8 that the document promises."""
    encoding = str(getattr(stream, "encoding", None) or "utf-8")
    return encoding.lower().replace("-", "") != "utf8"


def _suite(file: str, found: Sequence[Diagnostic], kind: str | None) -> list[str]:
    failures = sum(one.severity is Severity.ERROR for one in found)
    name = _attribute(file)
    lines = [f'  <testsuite name={name} tests="{max(1, len(found))}" failures="{failures}" errors="0" skipped="0">']
    if kind:
        lines.append(f'    <properties><property name="kind" value={_attribute(kind)}/></properties>')
    if not found:
        lines.append(f'    <testcase classname={name} name="valid"/>')
    for one in found:
        place = f":{one.position.line}:{one.position.column}" if one.position else ""
        lines.append(f"    <testcase classname={name} name={_attribute(f'{one.code} {file}{place}')}>")
        body = f"{file}{place}: {one.message}" + (f"\nhelp: {one.help}" if one.help else "")
        if one.severity is Severity.ERROR:
            lines.append(
                f"      <failure type={_attribute(one.code)} message={_attribute(one.message)}>{_text(body)}</failure>"
            )
        else:
            lines.append(f"      <system-out>{_text(f'{one.severity.value}: {body}')}</system-out>")
        lines.append("    </testcase>")
    lines.append("  </testsuite>")
    return lines


def _text(text: str) -> str:
    return escape(_NOT_XML.sub("\ufffd", text), {"\r": "&#13;", "\t": "&#9;"})


def _attribute(text: str) -> str:
    return quoteattr(_NOT_XML.sub("\ufffd", text))
