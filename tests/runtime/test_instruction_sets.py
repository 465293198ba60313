"""Contract: numeric tests pass on other processors: a sample, under each instruction set that this one has.

All of them: `.ci/margins.py`. `docs/numeric_margins.md` has what they gave.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SAMPLE = ("tests/runtime/test_ngrams.py", "tests/runtime/test_same_numbers.py")
WORDS = "begin_anew and parallelism2 or numbers_of_one_process and tp4 and 18"
"""What failed on a processor that the tests were not written on."""


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("margins_tool", ROOT / ".ci" / "margins.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.ranks
@pytest.mark.parametrize(("isa", "threads"), [("default", 2), ("avx2", 1), ("avx512", 1)])
def test_a_sample_passes_with_an_instruction_set(
    isa: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    margins: Any = tool()
    if isa not in margins.available()[:-1]:
        pytest.skip("this processor lacks it, or the whole suite computes with it")
    monkeypatch.setattr(margins, "RECORDS", tmp_path)
    code, folder = margins.run(isa, threads, list(SAMPLE), WORDS)
    assert code == 0
    found = margins.read([folder])
    assert len({one["test"] for one in found}) == 2
    assert f"{len(found)} comparisons" in margins.page(found)


def test_every_test_that_judges_numbers_is_known() -> None:
    names = {path.name for path in tool().numeric_files()}
    assert {"test_same_numbers.py", "test_lora.py", "test_linear.py", "test_checkpoint.py"} <= names
    assert "test_liveness.py" not in names
