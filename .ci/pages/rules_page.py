"""docs/rules.md: the pages of all codes as one document. `python .ci/pages/rules_page.py` writes it."""

from __future__ import annotations

import sys
import textwrap

from parcompile.lint.registry import GROUPS, Page, pages

_WIDTH = 120
_START = """\
# Rules

Every finding of `parcompile check` has a code. This page is written by `python .ci/pages/rules_page.py` from the
rules themselves; `parcompile explain CODE` shows the same in a terminal.

An **error** stops the compiler, a **warning** names something that is probably not meant, a **remark** (info) says what
was inferred, rewritten or has no effect. A rule that concerns *all* is true of any run; the others hold for the backend
that they name, and those of Megatron-LM fire only with `--target megatron`.
Examples are parts of a spec, laid over one of llama-3-8b on a node of eight H200s.
"""


def reference() -> str:
    """The whole document."""
    by_group: dict[str, list[Page]] = {}
    for page in pages().values():
        by_group.setdefault(page.code[0], []).append(page)
    parts = [_START, _table(by_group)]
    for letter, group in by_group.items():
        parts.append(f"## {letter}: {GROUPS[letter]}\n")
        parts += [_section(page) for page in group]
    return "\n".join(parts)


def _table(by_group: dict[str, list[Page]]) -> str:
    rows = ["| code | | what it finds |", "|---|---|---|"]
    for group in by_group.values():
        rows += [f"| [{page.code}](#{page.code.lower()}) | {page.severity.value} | {page.title} |" for page in group]
    return "\n".join(rows) + "\n"


def _section(page: Page) -> str:
    lines = [f"### {page.code}", "", f"**{page.title[0].upper()}{page.title[1:]}** ({page.severity.value})", ""]
    lines += [*textwrap.wrap(page.explanation, _WIDTH, break_on_hyphens=False), ""]
    for word, text in page.examples:
        lines += [f"{word.capitalize()}:", "", f"```{page.format}", text, "```", ""]
    if page.targets != ("all",):
        lines += [f"Concerns: {', '.join(page.targets)}.", ""]
    if page.sources:
        lines += [f"Sources: {'; '.join(page.sources)}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(reference())
