"""The user module that `docs/modules.md` describes compiles."""

from __future__ import annotations

import json
import re
from pathlib import Path

from parcompile.rules import check
from parcompile.schema import validate
from parcompile.spec.resolve import Resolution

PAGE = Path(__file__).parents[1] / "docs" / "modules.md"


def test_the_section_for_a_user_module_compiles() -> None:
    (section,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    spec = {
        "version": 1,
        "model": json.loads(section),
        "cluster": {"gpus_per_node": 8},
        "parallelism": {"tp": 4, "cp": 2},
        "training": {"sequence_length": 4096},
    }
    validation = validate(spec, "spec")
    assert validation.valid, validation.diagnostics
    assert [one.message for one in check(Resolution(spec)) if one.is_error] == []
