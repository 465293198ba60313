"""The compiler's tables of drawn configurations are those of the models; `.ci/drawn_tables.py` compares all types."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from parcompile.model.catalogue import RUNTIME_FAMILIES

SCRIPT = Path(__file__).parents[2] / ".ci" / "drawn_tables.py"
PAGE = Path(__file__).parents[2] / "docs" / "drawn_tables.md"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("drawn_tables", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_drawn_configurations_are_those_of_the_models(script: Any) -> None:
    outcomes = [script.compare(7000 + place, family) for place, family in enumerate(RUNTIME_FAMILIES[::3])]
    assert [one for one in outcomes if one.kind == "different"] == []
    assert sum(one.kind == "equal" for one in outcomes) > 0.9 * len(outcomes)


def test_the_same_number_draws_the_same_configuration(script: Any) -> None:
    assert script.configuration(11, "beam") == script.configuration(11, "beam")
    assert script.configuration(11, "beam") != script.configuration(12, "beam")


def test_the_page_has_no_difference_and_300_draws_at_least() -> None:
    every = PAGE.read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
    name, draws, equal, refused, none, different = (cell.strip() for cell in every.strip("|").split("|"))
    assert (name, different) == ("all", "0")
    assert int(draws) >= 300
    assert int(equal) > 0.9 * (int(draws) - int(refused) - int(none))
