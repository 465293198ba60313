"""What one place of the code knows of everything does not grow (`.ci/counts.py`)."""

from __future__ import annotations

import importlib.util
import pkgutil
from pathlib import Path

import pytest

from parcompile.model import blocks
from parcompile.model.blocks import KNOWN, Traits

FILE = Path(__file__).parents[1] / ".ci" / "counts.py"


@pytest.fixture(scope="module")
def module():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("counts", FILE)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_no_count_has_risen(module) -> None:  # type: ignore[no-untyped-def]
    assert module.risen() == {}, "recorded, now: know it in fewer places (.ci/counts.py says what is counted)"


def test_a_further_place_is_counted(module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    import shutil

    for folder in ("compiler/cost", "compiler/model", "runtime/inject"):  # those whose parts are counted by name
        shutil.copytree(FILE.parents[1] / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    before = module.counts()
    (tmp_path / "compiler" / "cost" / "other.py").write_text('INDEXER = ("llama", "mixtral")\n')
    after = module.counts()
    assert after["files that name indexer"] == before["files that name indexer"] + 1
    assert after["literals of model types"] == before["literals of model types"] + 2


def test_mechanisms_that_pages_and_stored_names_know_of_are_listed() -> None:
    every = {
        one
        for file in pkgutil.iter_modules(blocks.__path__)
        for one in vars(importlib.import_module(f"{blocks.__name__}.{file.name}")).values()
        if isinstance(one, type) and issubclass(one, Traits) and one is not Traits
    }
    assert len(every) > len(KNOWN)
    telling = {one for one in every if one.rules or one.pieces or "numeric_keys" in vars(one)}
    assert telling == set(KNOWN)
