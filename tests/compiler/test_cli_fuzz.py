"""A bounded sample of `benchmarks/fuzz.py`: damaged files end with exit code 0, 1 or 2 and without a traceback."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"
CASES = 120


@pytest.fixture(scope="module")
def fuzz():
    found = importlib.util.spec_from_file_location("fuzz", FILE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_damaged_files_end_in_a_message(fuzz, tmp_path: Path) -> None:
    assert [wrong for seed in range(CASES) if (wrong := fuzz.run_case(tmp_path, seed))] == []


def test_a_traceback_would_be_found(fuzz, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("x")

    monkeypatch.setattr(importlib.import_module("parcompile.cli.main"), "main", fail)
    assert "KeyError" in fuzz.run_case(tmp_path, 0)
