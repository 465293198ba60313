"""Writes the tables so that a difference can be read: one line for a row, one for a key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers


def read(file: Path) -> dict[str, Any]:
    """The tables that are there; none where there is no file."""
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    return empty()


def empty() -> dict[str, Any]:
    """The file without a type."""
    return {"transformers": transformers.__version__, "types": {}, "left_out": {}}


def write(file: Path, stored: Mapping[str, Any]) -> None:
    """Writes the tables, types in alphabetical order."""
    lines = ["{", f' "transformers": {json.dumps(stored["transformers"])},', ' "types": {']
    names = sorted(stored["types"])
    for name in names:
        lines += [
            f"  {json.dumps(name)}: {{",
            *_entry(stored["types"][name]),
            "  }" + ("," if name != names[-1] else ""),
        ]
    lines += [" },", ' "left_out": {', *_lines(dict(sorted(stored["left_out"].items())), "  "), " }", "}"]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _entry(entry: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for number, (key, value) in enumerate(entry.items()):
        comma = "," if number < len(entry) - 1 else ""
        if isinstance(value, Mapping) and value and key in ("derived", "stacks"):
            lines += [f'   "{key}": {{', *_lines(value, "    "), "   }" + comma]
        elif key == "rows":
            rows = [f"    {json.dumps(row)}" for row in value]
            lines += ['   "rows": [', *(row + "," for row in rows[:-1]), rows[-1], "   ]" + comma]
        else:
            lines.append(f'   "{key}": {json.dumps(value)}{comma}')
    return lines


def _lines(held: Mapping[str, Any], indent: str) -> list[str]:
    pairs = [f"{indent}{json.dumps(key)}: {json.dumps(value)}" for key, value in held.items()]
    return [*(pair + "," for pair in pairs[:-1]), *pairs[-1:]]
