"""Megatron-LM's own verdicts on arguments that we write: recorded by `.ci/generate/megatron_verdicts.py`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from decoder_cases import compiled

from parcompile.backends.megatron.write import MEGATRON_VERSION, arguments, as_list

TABLE = json.loads(Path(__file__).with_name("megatron_verdicts.json").read_text(encoding="utf-8"))
CASES = TABLE["cases"]


def test_the_verdicts_are_those_of_the_version_that_is_written_for() -> None:
    assert TABLE["megatron_version"] == MEGATRON_VERSION
    assert len(CASES) >= 60


def test_megatron_accepts_what_is_written() -> None:
    assert [(case["message"], case["spec"]) for case in CASES if not case["accepted"]] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['spec']['model']['model_type']}-{CASES.index(case)}")
def test_a_judged_spec_is_still_written_as_it_was_judged(case: dict[str, Any]) -> None:
    plan = compiled(case["spec"])
    assert plan is not None
    assert as_list(arguments(plan)) == case["arguments"]
    if case["parameters"] is not None:
        assert plan.parameters.numel == case["parameters"]


@pytest.mark.skipif("PARCOMPILE_MEGATRON" not in os.environ, reason="PARCOMPILE_MEGATRON names no sources")
def test_the_verdicts_are_what_megatron_says_today() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".ci"))
    from upstream.megatron_lm import Judge

    with Judge(Path(os.environ["PARCOMPILE_MEGATRON"])) as judge:
        for case in CASES:
            assert judge.verdict(case["arguments"], 16)["accepted"] == case["accepted"]
