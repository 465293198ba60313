"""`parcompile checkpoint …` on the checkpoint of a live run, and what comes out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from ranks import run_ranks
from test_checkpoint import STEPS, assert_close, layout, run, train

from parcompile.cli.main import cli
from parcompile.plan import Plan
from parcompile.targets.files import to_text

pytestmark = pytest.mark.ranks


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["checkpoint", *map(str, arguments)])


def written(plan: Plan, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(to_text(plan.to_json()), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[dict[str, Any]]:
    return run("tp2 × dp2", None, saves={2: folder / "run"})


def test_inspect_says_what_a_checkpoint_is_of(folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    found = json.loads(invoke("inspect", folder / "run", "--format", "json").stdout)
    assert {key: found[key] for key in ("step", "tp", "dp", "optimizer_shards", "model_type")} == {
        "step": 2,
        "tp": 2,
        "dp": 2,
        "optimizer_shards": 2,
        "model_type": "llama",
    }
    assert found["parameters"] == layout("one rank").parameters.numel
    assert "optimizer shards  2" in invoke("inspect", folder / "run").stdout


def test_a_converted_checkpoint_is_loaded_by_deepspeed_as_its_own(
    folder: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    target = written(layout("tp4"), folder / "tp4")
    done = invoke("convert", folder / "run", "--to", target, "-o", folder / "converted")
    assert done.exit_code == 0, done.output
    assert invoke("verify", folder / "converted").exit_code == 0
    assert_close(run("tp4", folder / "converted")[0], uninterrupted[0], STEPS - 2)


def test_an_exported_model_can_be_imported_as_the_start_of_a_run(
    folder: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    assert invoke("export", folder / "run", "--hf", folder / "hf").exit_code == 0
    plan = layout("tp2 × dp2")
    done = invoke("import", "--hf", folder / "hf", "--plan", written(plan, folder / "plan"), "-o", folder / "start")
    assert done.exit_code == 0, done.output
    found = run_ranks(4, train, plan, str(folder / "start"), 1)
    from parcompile.runtime.checkpoint import SavedRun, read_note

    one, other = SavedRun(read_note(folder / "start")), SavedRun(read_note(folder / "run"))
    for name in one.parameters:
        assert torch.equal(one.whole(name), other.whole(name)), name
    assert len(found[0]["losses"]) == 1


def test_mistakes_are_one_message(folder: Path, uninterrupted: list[dict[str, Any]], tmp_path: Path) -> None:
    missing = invoke("verify", tmp_path)
    assert missing.exit_code != 0
    assert "there is no checkpoint to resume in" in missing.output
    again = invoke("export", folder / "run", "--hf", folder / "run")
    assert again.exit_code != 0
    assert "is not empty" in again.output
