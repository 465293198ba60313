"""A bounded sample of `benchmarks/fuzz.py`: damaged files end with exit code 0, 1 or 2, without a traceback."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MUTANTS = 12
"""Of each kind."""


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        kinds = importlib.import_module("fuzzing.kinds")
        attack = importlib.import_module("fuzzing.attack")
    finally:
        sys.path.remove(str(BENCHMARKS))
    folder = tmp_path_factory.mktemp("fuzz")
    # Files outside of the repository would make the sample another one from machine to machine.
    found = kinds.all_kinds(folder / "made", folder / "no corpus", runtime=False, drawn=8)
    return attack.Attack(folder, found)


def test_damaged_files_end_in_a_message(attack) -> None:
    ends = []
    for kind in attack.kinds:
        own = type(attack)(attack.folder, [kind])
        ends += [own.run(seed)[1] for seed in range(MUTANTS)]
    assert [end.failure for end in ends if end.failure is not None] == []
    assert {end.code for end in ends} == {0, 1, 2}


def test_a_traceback_is_found_with_its_place(attack, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("x")

    monkeypatch.setattr(importlib.import_module("parcompile.cli"), "run", fail)
    _, end = attack.run(0)
    assert end.failure is not None
    assert end.failure.what == "KeyError"


def test_memory_and_time_are_watched(attack, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["fuzzing.attack"]
    monkeypatch.setattr(module, "GROWTH_BYTES", 2**20)
    # Where the peak cannot be reset, what earlier tests have taken and given back has to be taken again.
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    more = module._reset_peak() - resident + 2**28  # pages of libraries may be dropped meanwhile
    monkeypatch.setattr(importlib.import_module("parcompile.cli"), "run", lambda: bytearray(more).count(1))
    assert attack.run(0)[1].failure.what == "memory"

    def turn() -> None:
        while True:
            pass

    monkeypatch.setattr(module, "SECONDS", 0.2)
    monkeypatch.setattr(importlib.import_module("parcompile.cli"), "run", turn)
    assert attack.run(0)[1].failure.what == "too long"


def test_a_seed_names_its_mutant(attack) -> None:
    assert attack.chosen(7) == attack.chosen(7)
    assert attack.chosen(7) != attack.chosen(8)
