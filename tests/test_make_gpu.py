"""`make gpu`, as far as it goes without a GPU: it says what is missing, and what it would train compiles."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import parcompile

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path / "out")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.startswith("make gpu: there is no GPU")
    assert found.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("example", ["byte_llama", "byte_llama_stages", "byte_mixtral"])
def test_every_example_compiles_for_one_gpu_and_for_a_cpu(example: str, script: ModuleType) -> None:
    file = ROOT / "examples" / f"{example}.json"
    for gpus, precision in ((0, None), (1, "fp32"), (1, "bf16")):
        plan = parcompile.compile(script.spec_of(file, gpus, precision, {}))
        assert plan.world_size == 1
        assert not plan.refusals


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_the_first_example_compiles_for_several_gpus(axis: str, script: ModuleType) -> None:
    plan = parcompile.compile(script.spec_of(ROOT / "examples" / "byte_llama.json", 4, "bf16", {axis: 4}))
    assert plan.world_size == 4
    assert not plan.refusals


def test_a_part_that_fails_or_hangs_is_written_down_and_others_go_on(script: ModuleType, tmp_path: Path) -> None:
    parts = script.Parts(tmp_path, minutes=1)
    assert not parts.run("fails", [sys.executable, "-c", "raise SystemExit(3)"], 30)
    assert not parts.run("hangs", [sys.executable, "-c", "import time; time.sleep(60)"], 1)
    assert parts.run("ends", [sys.executable, "-c", "print('text')"], 30)
    assert [part["exit"] for part in parts.found.values()] == [3, "longer than 1 s", 0]
    assert (tmp_path / "ends.log").read_text() == "text\n"
