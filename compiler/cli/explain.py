"""`parcompile explain CODE`: the page of a code."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping
from typing import Any

import click

from parcompile.diagnostics.diagnostic import closest
from parcompile.lint.registry import Page, pages

from .saying import say

_WIDTH = 80


@click.command("explain")
@click.argument("codes", nargs=-1, metavar="CODE...")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(codes: tuple[str, ...], form: str) -> None:
    """Explain a code, with an example of wrong and right.

    Without a CODE, list all codes.
    """
    known = pages()
    if form == "json":
        _echo(json.dumps([_tree(_known(known, code)) for code in codes or known], indent=2, ensure_ascii=False))
        return
    if not codes:
        _echo(_contents(list(known.values())))
        return
    for number, code in enumerate(codes):
        _echo(("\n" if number else "") + _page(_known(known, code)))


def _known(known: Mapping[str, Page], code: str) -> Page:
    """The page of a code.

    Raises:
        UsageError: there is none.
    """
    page = known.get(code.upper())
    if page is None:
        near = closest(code.upper(), list(known))
        raise click.UsageError(f"there is no code {code}" + (f"; did you mean {near}?" if near else ""))
    return page


def _tree(page: Page) -> dict[str, Any]:
    tree = dataclasses.asdict(page)
    return {**tree, "severity": page.severity.value}


def _page(page: Page) -> str:
    lines = [f"{page.code} ({page.severity.value}): {page.title}", ""]
    lines += textwrap.wrap(page.explanation, _WIDTH)
    for word, text in page.examples:
        lines += ["", f"{word}:", *("    " + line for line in text.splitlines())]
    lines.append("")
    if page.targets != ("all",):
        lines.append(f"concerns: {', '.join(page.targets)}")
    lines += [f"source: {source}" for source in page.sources]
    return "\n".join(lines).rstrip()


def _contents(all_pages: list[Page]) -> str:
    lines: list[str] = []
    group = ""
    for page in all_pages:
        if page.group != group:
            group = page.group
            lines += ([""] if lines else []) + [group]
        lines.append(f"  {page.code}  {page.severity.value:<8} {page.title}")
    return "\n".join(lines)


def _echo(text: str) -> None:
    say(text)
