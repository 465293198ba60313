"""Pages and messages use the field's terms (docs/glossary.md), not words that were retired for them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from parcompile.rules import all_rules

ROOT = Path(__file__).parents[1]
RETIRED = {
    r"\bcut(s|ting)?\b(?! off| there)": "split, shard",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"carr(y|ies) a state": "linear-attention/SSM layer",
    r"stands? for windows": "compressed KV",
    r"gives? back what (it|they) takes?": "zero experts",
    r"whole on (each|every) rank": "replicated",
    r"\btells of\b": "describes",
    r"\bgo on on\b": "resume on",
    r"waited for\b": "exposed",
    r"in the way: ": "fix before compiling",
    r"no words? for (it|them)\b": "not supported",
    r"other coordinates": "ranks change position",
    r"happens to be visible": "nodes × gpus_per_node",
    r"\bgets the text\b": "receives the string",
    r"decides? it$": "set by",
    r"\bplaces? (on|in|of) (tp|cp|dp|pp|ep|(this|the|all) (node|rank)s?)\b": "index",
    r"\bpadded places?\b": "position",
    r"\baccounts? (of|for every)\b": "report",
    r"\bidentity experts?\b": "zero expert",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def retired(text: str) -> list[str]:
    return [f"{found[0]!r}: {better}" for word, better in RETIRED.items() for found in re.finditer(word, text, re.I)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_no_retired_word(page: Path) -> None:
    # Code, the names of files and the addresses of links are names, not words.
    text = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert retired(text) == []


def test_what_rules_say_has_no_retired_word() -> None:
    said = {rule.code: retired(f"{rule.title} {rule.explanation}") for rule in all_rules()}
    assert {code: words for code, words in said.items() if words} == {}


def _strings(file: Path) -> Iterator[str]:
    """What a file may print: string constants of several words that are no docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docs = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    for one in ast.walk(tree):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in docs and " " in one.value:
            yield re.sub(r"`[^`\n]*`|\| cut -d", "", one.value)


def _words_of_data(tree: object) -> Iterator[str]:
    """What a JSON file says in several words: descriptions of keys, reasons, advisories."""
    if isinstance(tree, dict | list):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from _words_of_data(one)
    elif isinstance(tree, str) and " " in tree:
        yield re.sub(r"`[^`\n]*`", "", tree)


def _said(file: Path) -> Iterator[str]:
    """What a file of a room may say to a user."""
    if file.suffix == ".py":
        yield from _strings(file)
    elif file.suffix == ".json":
        yield from _words_of_data(json.loads(file.read_text(encoding="utf-8")))
    elif file.suffix == ".txt":  # of a new project
        yield from file.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("room", ["compiler", "runtime", "schemas"])
def test_no_message_has_a_retired_word(room: str) -> None:
    found = {
        f"{file.relative_to(ROOT)}: {text}": words
        for file in sorted((ROOT / room).rglob("*"))
        for text in _said(file)
        if (words := retired(text))
    }
    assert found == {}
