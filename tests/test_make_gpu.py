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


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(SCRIPT)


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    return loaded(SCRIPT.with_name("gpu_step.py"))


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


def test_every_layout_compiles_for_its_ranks_and_for_a_cpu(script: ModuleType) -> None:
    for layout, (example, ranks, changes) in script.LAYOUTS.items():
        file = ROOT / "examples" / f"{example}.json"
        plan = parcompile.compile(script.spec_of(file, ranks, None, changes))
        alone = parcompile.compile(script.spec_of(file, 0, None, script.on_cpu(layout)[1]))
        assert (plan.world_size, alone.world_size) == (ranks, 1)
        assert not plan.refusals
        assert plan.spec.model.shape == alone.spec.model.shape


@pytest.mark.parametrize("model", ["llama-3.2-1b", "gemma-3-1b", "qwen3-30b-a3b", "deepseek-v3", "gemma-2-9b"])
def test_the_models_of_which_a_step_is_measured_fit(model: str, tmp_path: Path, steps: ModuleType) -> None:
    plan = parcompile.compile(steps.write_spec(model, tmp_path))
    assert plan.estimate().to_json()["memory"]["fits"]


def test_ranks_of_one_gpu_say_that_they_are_hosts_of_their_own(tmp_path: Path, script: ModuleType) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, sys, pathlib\n"
        "said = [os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'NCCL_HOSTID')]\n"
        "pathlib.Path(sys.argv[1], said[0]).write_text(' '.join(said))\n"
        "sys.exit(int(sys.argv[2]) if said[0] == '1' else 0)\n"
    )
    command = [*script.launcher(2, shared=True), str(rank), str(tmp_path)]
    assert subprocess.run([*command, "0"], timeout=120, check=False).returncode == 0
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["0 0 2 rank0", "1 1 2 rank1"]
    failed = subprocess.run([*command, "4"], timeout=120, check=False, capture_output=True, text=True)
    assert failed.returncode != 0
    assert "exitcode  : 4" in failed.stderr


def test_a_part_that_fails_or_hangs_is_written_down_and_others_go_on(script: ModuleType, tmp_path: Path) -> None:
    parts = script.Parts(tmp_path, minutes=1)
    assert not parts.run("fails", [sys.executable, "-c", "raise SystemExit(3)"], 30)
    assert not parts.run("hangs", [sys.executable, "-c", "import time; time.sleep(60)"], 1)
    assert parts.run("ends", [sys.executable, "-c", "print('text')"], 30)
    assert [part["exit"] for part in parts.found.values()] == [3, "longer than 1 s", 0]
    assert (tmp_path / "ends.log").read_text() == "text\n"
