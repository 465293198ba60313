"""Contract: numeric tests pass on other processors: a sample, under each instruction set that this one has.

All of them: `.ci/margins.py`. `docs/numeric_margins.md` has what they gave.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SAMPLE = tuple(f"tests/runtime/test_{name}.py" for name in ("ngrams", "same_numbers", "text_parts"))
WORDS = "begin_anew and parallelism2 or numbers_of_one_process and tp4 and 18 or trained_text_part"
"""What failed on a processor that the tests were not written on."""


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("margins_tool", ROOT / ".ci" / "margins.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.ranks
@pytest.mark.timeout(3600)  # it runs pytest, whose tests have their own limits
@pytest.mark.parametrize(("isa", "threads"), [("default", 2), ("avx2", 1), ("avx512", 1)])
def test_a_sample_passes_with_an_instruction_set(
    isa: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    margins: Any = tool()
    if isa not in margins.available()[:-1]:
        pytest.skip("this processor lacks it, or the whole suite computes with it")
    monkeypatch.setattr(margins, "RECORDS", tmp_path)
    code, folder = margins.run(isa, threads, list(SAMPLE), WORDS, workers=0)
    assert code == 0
    found = margins.read([folder])
    assert len({one["test"] for one in found}) == 3
    assert f"{len(found):,} comparisons" in margins.page(found)


def test_the_page_is_made_of_several_runs_and_a_thin_margin_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    margins: Any = tool()
    monkeypatch.setattr(margins, "PAGE", tmp_path / "page.md")
    name = "tests/runtime/test_same_numbers.py::test_it"
    for folder, variant, case, difference in (
        ("one", "avx2-1", "tp2", 1e-6),
        ("one", "avx2-1", "cp2", 2e-6),
        ("two", "default-2", "tp2", 3e-6),
        ("thin", "avx512-1", "cp2", 4e-6),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        line = {"test": f"{name}[{case}]", "what": "loss", "difference": difference, "limit": 1e-5, "noise": None}
        with (tmp_path / folder / "1.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "variant": variant}) + "\n")
    assert margins.write_page([tmp_path / "one", tmp_path / "two"]) == 0
    text = margins.PAGE.read_text(encoding="utf-8")
    assert "| avx2 | 1 | 1 | 2 | 20% |" in text
    assert "| default | 2 | 1 | 1 | 30% |" in text
    assert "| `test_same_numbers.py::test_it` | 3 | 3.0e-06 | 1.0e-05 | 30% |  | default-2 |" in text
    assert "Without a record: " in text and "`test_lora.py`" in text
    assert margins.write_page([tmp_path / "one", tmp_path / "thin"]) == 1
    assert margins.write_page([tmp_path / "one", tmp_path / "never"]) == 1


def test_no_row_of_the_committed_page_is_thin() -> None:
    text = (ROOT / "docs" / "numeric_margins.md").read_text(encoding="utf-8")
    shares = [int(row.split("|")[5].strip(" %")) for row in text.splitlines() if row.startswith("| `")]
    assert len(shares) > 30
    assert max(shares) <= 33


def test_every_test_that_judges_numbers_is_known() -> None:
    names = {path.name for path in tool().numeric_files()}
    assert {"test_same_numbers.py", "test_lora.py", "test_linear.py", "test_checkpoint.py"} <= names
    assert "test_liveness.py" not in names
