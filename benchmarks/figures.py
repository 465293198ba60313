"""Marks figures of benchmarks/README.md that are older than the code that they measure.

    python benchmarks/figures.py                    # lists sections whose code has changed and that do not say so
    python benchmarks/figures.py --mark             # lets them say so
    python benchmarks/figures.py --measured search  # after the figures of a section were written anew

A section whose figures depend on certain rooms holds a comment with these rooms and the hash of their files.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence

from harness import ROOT, parsed

PAGE = ROOT / "benchmarks" / "README.md"
MARK = "*Older than the code: what it measures has changed since.*"
_OF = re.compile(r"^<!-- figures of (?P<rooms>[\w/ .]+): (?P<digest>\w+) -->\n", re.MULTILINE)


def digest(rooms: Sequence[str]) -> str:
    """The hash of the Python and JSON files of folders of the repository, by name and content."""
    found = hashlib.sha256()
    for room in sorted(rooms):
        for file in sorted((ROOT / room).rglob("*")):
            if file.suffix in (".py", ".json"):
                found.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def sections(text: str) -> dict[str, str]:
    """The sections of the page by their heading."""
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def unmarked(text: str) -> list[str]:
    """The sections whose code has changed since they were measured, and that do not say so."""
    found = {name: _OF.search(section) for name, section in sections(text).items() if MARK not in section}
    return [name for name, one in found.items() if one and digest(one["rooms"].split()) != one["digest"]]


def marked(text: str) -> str:
    """The page with a mark in each of these."""
    for name in unmarked(text):
        section = sections(text)[name]
        found = _OF.search(section)
        assert found is not None
        text = text.replace(section, section.replace(found[0], f"{found[0]}\n{MARK}\n", 1), 1)
    return text


def measured(text: str, name: str) -> str:
    """The page where a section is as new as the code is."""
    section = sections(text)[name]
    found = _OF.search(section)
    assert found is not None, f"{name} does not say what it measures"
    comment = found[0].replace(found["digest"], digest(found["rooms"].split()))
    return text.replace(section, section.replace(f"\n{MARK}\n", "").replace(found[0], comment), 1)


def main() -> None:
    """The command of this module."""
    options = parsed(
        __doc__, mark=(False, "write the marks"), measured=("", "a section of the page whose figures are new")
    )
    text = PAGE.read_text(encoding="utf-8")
    if options.measured or options.mark:
        text = measured(text, options.measured) if options.measured else marked(text)
        PAGE.write_text(text, encoding="utf-8")
    for name in unmarked(text):
        print(f"{name}: older than the code that it measures")
    sys.exit(bool(unmarked(text)))


if __name__ == "__main__":
    main()
