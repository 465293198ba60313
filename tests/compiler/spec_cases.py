"""The specs of tests/specs: each with the findings that it is to give, in `name.expected.json` beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parcompile.rules import DEFAULT_TARGETS, ESTIMATE

FOLDER = Path(__file__).parent.parent / "specs"


@dataclass(frozen=True)
class Case:
    """A spec and what is expected of it: (code, line, column) of every finding, remarks included, in order."""

    file: Path
    targets: tuple[str, ...]
    expected: list[tuple[str, int, int]]

    @property
    def id(self) -> str:
        return self.file.name

    @property
    def code(self) -> str:
        """The code that the case is named after."""
        return self.file.name.split("-")[0]


def cases(folder: str) -> Iterator[Case]:
    for file in sorted((FOLDER / folder).iterdir()):
        if file.suffix not in (".json", ".yaml") or file.name.endswith(".expected.json"):
            continue
        tree = json.loads(file.with_name(f"{file.stem}.expected.json").read_text(encoding="utf-8"))
        found = [(one["code"], one["line"], one["column"]) for one in tree["diagnostics"]]
        yield Case(file, tuple(tree.get("targets", _targets(file))), found)


def _targets(file: Path) -> tuple[str, ...]:
    """What a case is checked for: whether its run fits only where it is about that, since few are of a real size."""
    if file.name.split("-")[0] in ("H004", "H005"):
        return DEFAULT_TARGETS
    return tuple(one for one in DEFAULT_TARGETS if one != ESTIMATE)
