"""Figures of benchmarks that are older than the code that they measure say so."""

from __future__ import annotations

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
