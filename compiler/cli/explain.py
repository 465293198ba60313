"""`parcompile explain CODE`: the page of a code."""

from __future__ import annotations

import sys
import textwrap

import click

from parcompile.diagnostics.reporters.style import writable
from parcompile.diagnostics.suggest import closest
from parcompile.rules.pages import Page, pages

_WIDTH = 80


@click.command("explain")
@click.argument("codes", nargs=-1, metavar="CODE...")
def command(codes: tuple[str, ...]) -> None:
    """Explain a code, with an example of wrong and right.

    Without a CODE, list all codes.
    """
    known = pages()
    if not codes:
        _echo(_contents(list(known.values())))
        return
    for number, code in enumerate(codes):
        page = known.get(code.upper())
        if page is None:
            near = closest(code.upper(), list(known))
            raise click.UsageError(f"there is no code {code}" + (f"; did you mean {near}?" if near else ""))
        _echo(("\n" if number else "") + _page(page))


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
    click.echo(writable(sys.stdout, text))
