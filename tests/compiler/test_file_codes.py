"""Each page of a J or K code shows an example that gives this code, and one that does not."""

import ast
import re
from pathlib import Path

import pytest

import parcompile
from parcompile.lint.registry import FILE_CODES
from parcompile.text import parse

FOLDER = Path(parcompile.__file__).parent
TEXT_CODES = [page for page in FILE_CODES.values() if page.code.startswith("J") and page.code not in ("J001", "J002")]


@pytest.mark.parametrize("page", TEXT_CODES, ids=lambda page: page.code)
def test_the_wrong_example_gives_the_code_and_the_right_one_does_not(page):
    assert page.code in {found.code for found in parse(page.wrong, f"spec.{page.format}").diagnostics}
    assert parse(page.right, f"spec.{page.format}").diagnostics == ()


def test_every_code_that_is_said_has_a_page():
    said: set[str] = set()
    for file in [
        *(FOLDER / "schema").glob("*.py"),
        *(FOLDER / "text").glob("*.py"),
        *(FOLDER / "backends").rglob("*.py"),
        *(FOLDER / "lint").rglob("*.py"),
    ]:
        constants = [
            node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Constant)
        ]
        said |= {node.value for node in constants if re.fullmatch(r"[JK][0-9]{3}", str(node.value))}
    assert said == set(FILE_CODES)
