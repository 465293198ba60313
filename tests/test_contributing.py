"""The map in CONTRIBUTING names what is there, and everything at the top of a folder is on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOLDERS = ("compiler", "runtime")


def rooms_on_map(folder: str) -> set[str]:
    """Names in the first column of the folder's table; those of folders end in a slash."""
    _, _, rows = TEXT.partition(f"| room of `{folder}/` | its noun |\n|---|---|\n")
    table, _, _ = rows.partition("\n\n")
    return {name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def is_there(folder: str, name: str) -> bool:
    place = ROOT / folder / name.rstrip("/")
    return (place / "__init__.py").is_file() if name.endswith("/") else place.with_suffix(".py").is_file()


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_room_on_the_map_exists(folder: str) -> None:
    named = rooms_on_map(folder)
    assert named
    assert sorted(name for name in named if not is_there(folder, name)) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_room_is_on_the_map(folder: str) -> None:
    modules = {file.stem for file in (ROOT / folder).glob("*.py")} - {"__init__", "__main__"}
    rooms = {f"{file.parent.name}/" for file in (ROOT / folder).glob("*/__init__.py")}
    assert sorted((modules | rooms) - rooms_on_map(folder)) == []


def test_the_files_and_folders_that_the_text_names_exist() -> None:
    places = re.findall(r"`((?:compiler|runtime|schemas|tests|examples|benchmarks)/[\w./-]*)`", TEXT)
    assert len(places) > 8
    assert [place for place in places if not (ROOT / place).exists()] == []
