"""Figures of benchmarks that are older than the code that they measure say so; benchmarks import what is there."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import figures

SECTION = "# Page\n\n## search\n\n<!-- figures of compiler/text: {digest} -->\n\n| a | 1 |\n\n## other\n\ntext\n"


def test_no_figure_is_older_than_its_code_in_silence() -> None:
    found = figures.unmarked(figures.PAGE.read_text(encoding="utf-8"))
    assert found == [], "run python benchmarks/figures.py --mark, or measure again"


def test_a_section_is_marked_when_its_code_changes_and_new_when_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    room = tmp_path / "compiler" / "text"
    room.mkdir(parents=True)
    (room / "a.py").write_text("one = 1\n")
    text = SECTION.format(digest=figures.digest(["compiler/text"]))
    assert figures.unmarked(text) == []
    (room / "a.py").write_text("one = 2\n")
    assert figures.unmarked(text) == ["search"]
    marked = figures.marked(text)
    assert figures.MARK in figures.sections(marked)["search"]
    assert figures.unmarked(marked) == []
    again = figures.measured(marked, "search")
    assert figures.MARK not in again
    assert figures.unmarked(again) == []


ROOT = Path(__file__).parents[1]
BESIDE = (ROOT / "benchmarks", ROOT / "tests" / "runtime", ROOT / "tests" / "compiler", ROOT / "examples")
SCRIPTS = sorted(file for folder in ("benchmarks", ".ci") for file in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.relative_to(ROOT).as_posix())
def test_a_script_imports_what_is_there(script: Path) -> None:
    """Benchmarks and tools run by hand, months apart: a name that has moved meanwhile is seen here."""
    missing = [
        f"line {one.lineno}: from {one.module} import {name.name}"
        for one in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(one, ast.ImportFrom) and one.module and not one.level
        for name in one.names
        if not is_there(one.module, name.name, script.parent)
    ]
    assert missing == []


def is_there(module: str, name: str, folder: Path) -> bool:
    """Whether a module of the project has the name; of others it is not asked."""
    if module.split(".")[0] == "parcompile":
        try:
            found = importlib.import_module(module)
            return hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}") is not None
        except ModuleNotFoundError:
            return False
    files = (beside / f"{module.replace('.', '/')}.py" for beside in (folder, *BESIDE))
    file = next(filter(Path.is_file, files), None)
    if file is None:
        return True
    names: set[str] = set()
    for one in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            names.add(one.name)
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            names.add(one.id)
        elif isinstance(one, ast.ImportFrom | ast.Import):
            names.update(alias.asname or alias.name for alias in one.names)
    return name in names
