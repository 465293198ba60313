"""docs/troubleshooting.md: from what a user sees to a code and what to do.

`python .ci/pages/troubleshooting_page.py` writes it: each rule is run on its own wrong example, so that the messages
are those that the checker prints.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parcompile.diagnostics import Diagnostic, Severity
from parcompile.lint.deepspeed import usage_context
from parcompile.lint.registry import FILE_CODES, GROUPS, Page, Settings, check_settings, file_rules, pages
from parcompile.rules import CONCERNED, check, example_spec
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.text import parse

_SHORT = 100
"""Characters up to which a right example stands in a cell."""

_START = """\
# Troubleshooting

From the message that you see, to its code, to what to do. This page is written by
`python .ci/pages/troubleshooting_page.py`: each rule is run on its wrong example, so the messages are the checker's
own, with that example's numbers. The whole page of a code is in [rules](rules.md), and in `parcompile explain CODE`.

First of all: `parcompile check SPEC` before every submission; exit code 0 means that a plan can be made.
"""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that a run says, and what to do. `sign` is a part of the message that never changes."""

    sign: str
    meaning: str
    advice: str


RUN = tuple(Trouble(*row) for row in json.loads(Path(__file__).with_name("troubles.json").read_text(encoding="utf-8")))
"""What no rule can know before the run. A test finds each sign in the source."""

_MEMORY = """\
## The run ends out of memory

`parcompile estimate SPEC` shows the largest component of the fullest rank.

| largest | do |
|---|---|
| activations | activation_checkpointing full, a smaller micro_batch_size, a larger cp, sequence_parallel with tp |
| logits | a larger tp (the vocabulary is split over it), a smaller micro_batch_size |
| weights, gradients | a larger tp |
| master weights, optimizer state | ZeRO stage 1, more ranks in dp · cp |

`parcompile search SPEC` compares all layouts that the spec leaves open. When the estimate said that it fits, keep the
row that the run left in `measurements.csv` and [calibrate](estimates.md#your-own-runs).
"""


def reference() -> str:
    """The whole document."""
    found = _messages()
    rows = ["## A run says", "", "| you see | which means | do |", "|---|---|---|"]
    rows += [f"| … {one.sign} … | {one.meaning} | {one.advice} |" for one in RUN]
    parts = [_START, "\n".join([*rows, ""]), _MEMORY]
    letters = sorted({code[0] for code in pages()})
    parts += [_table(letter, [(code, one) for code, one in found.items() if code[0] == letter]) for letter in letters]
    return "\n".join(parts)


def _table(letter: str, rows: Sequence[tuple[str, Diagnostic | None]]) -> str:
    lines = [f"## {letter}: {GROUPS[letter]}", "", "| you see | code | do |", "|---|---|---|"]
    for code, one in rows:
        page = pages()[code]
        seen, advice = page.title, _advice(page)
        if one is not None:
            choices = " or ".join(fix.title for fix in one.fixes)
            seen, advice = one.message, one.help or choices or advice
        lines.append(f"| {_cell(seen)} | [{code}](rules.md#{code.lower()}) | {_cell(advice)} |")
    return "\n".join([*lines, ""])


def _advice(page: Page) -> str:
    """What to do where the message itself does not say it."""
    if page.severity is Severity.INFO:
        return "nothing to do; this reports a decision"
    right = " ".join(page.right.split())
    return f"for example `{right}`" if 2 < len(right) <= _SHORT else "see the page of the code"


def _messages() -> dict[str, Diagnostic | None]:
    """For every code what its wrong example is told; None where an excerpt cannot be checked alone."""
    found: dict[str, Diagnostic | None] = dict.fromkeys(pages())
    for code, one in _all_found():
        if one.code == code and found[code] is None:
            found[code] = one
    return found


def _all_found() -> Iterator[tuple[str, Diagnostic]]:
    from parcompile.rules import all_rules

    for rule in all_rules():
        with contextlib.suppress(Unavailable):
            yield from ((rule.code, one) for one in check(Resolution(example_spec(rule.wrong)), CONCERNED))
    for entry in file_rules():
        around = usage_context(entry.wrong, None, entry.usage)
        settings = Settings(entry.wrong, frozenset(), around)
        yield from ((entry.code, one) for one in check_settings(settings, entry.kind))
    for page in FILE_CODES.values():
        if page.code.startswith("J"):
            read = parse(page.wrong, f"example.{page.format}")
            yield from ((page.code, one) for one in read.diagnostics)


def _cell(text: str) -> str:
    return text.replace("\\", r"\\").replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;").replace("\n", " ")


if __name__ == "__main__":
    sys.stdout.write(reference())
