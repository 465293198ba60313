"""Six real specs and what they compile to, byte for byte.

After a change that is meant, write the files anew with `python tests/compiler/test_golden.py` and read the difference.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from parcompile.backends.kinds import ALL
from parcompile.backends.registry import render
from parcompile.backends.writing import write
from parcompile.pipeline import compile_file

GOLDEN = Path(__file__).parent.parent / "golden"
SPECS = sorted(GOLDEN.glob("*.json"))


def rendered(spec: Path) -> dict[str, str]:
    plan, checked = compile_file(spec)
    assert plan is not None, [f"{found.code} {found.message}" for found in checked.diagnostics if found.is_error]
    return render(plan, (ALL,))


def test_there_are_six_specs_from_1_to_16384_ranks() -> None:
    assert len(SPECS) == 6


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.stem)
def test_a_real_spec_compiles_to_its_golden_files(spec) -> None:
    found, folder = rendered(spec), GOLDEN / spec.stem
    expected = {
        str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in folder.rglob("*") if file.is_file()
    }
    assert sorted(found) == sorted(expected)
    for name, text in found.items():
        assert text == expected[name], f"{spec.stem}/{name}: run python {Path(__file__).name} and read the difference"


if __name__ == "__main__":
    for one in SPECS:
        shutil.rmtree(GOLDEN / one.stem, ignore_errors=True)
        write(rendered(one), GOLDEN / one.stem)
        sys.stdout.write(f"wrote {GOLDEN / one.stem}\n")
