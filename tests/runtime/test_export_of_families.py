"""What was loaded from a folder, trained and exported is what transformers and torch make of that folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from export_runs import faults

pytestmark = pytest.mark.ranks

FAMILIES = (
    *("phi3", "gemma3_text", "granitemoe", "gpt_neox", "glm4_moe", "gpt_oss", "nemotron_h", "zamba2", "falcon_mamba"),
    *("deepseek_v4", "glm5_next_text", "qwen4_exp_text"),
)
"""Fused weights, scales, experts stored under other names, buffers; sinks and biases of experts; tables in pieces.

Of Nemotron-H all names are others, and its configuration has a number that JSON has no name for.

`.ci/configuration_matrix.py export` runs all families.
"""


def test_an_exported_model_is_the_trained_one_with_the_configuration_that_came_in(tmp_path: Path) -> None:
    assert faults(FAMILIES, tmp_path, "tp 2") == []
