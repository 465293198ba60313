"""`--target` and `--check` on the command line."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from layout_cases import spec_tree

from parcompile.cli.compile import command


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.json").write_text(json.dumps(spec_tree(2, 8, parallelism={"tp": 2})), encoding="utf-8")
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


def names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


ALWAYS = {"plan.json", "process_groups.json", "target_report.json", "parcompile.lock.json"}


def test_targets_select_the_files(folder) -> None:
    assert run("spec.json", "-o", "out", "--target", "torchrun", "-t", "megatron").exit_code == 0
    expected = {"launch/torchrun.sh", "megatron_args.json", "megatron_args.yaml", "megatron_args.sh"}
    assert names(folder / "out") == ALWAYS | expected


def test_an_unknown_target_is_named(folder) -> None:
    result = run("spec.json", "-o", "out", "--target", "torchrum")
    assert result.exit_code != 0
    assert "there is no target 'torchrum'; there are deepspeed" in result.output
    assert not (folder / "out").exists()


def test_what_a_target_cannot_express_is_said(folder) -> None:
    output = run("spec.json", "--target", "accelerate").output
    assert "accelerate: zero.stage 1: FSDP2 shards gradients and weights as well" in output


def test_check_is_quiet_about_files_that_are_up_to_date(folder) -> None:
    run("spec.json", "-o", "out", "--target", "all")
    assert run("spec.json", "-o", "out", "--check", "-q").exit_code == 0


def test_check_shows_what_was_edited_and_writes_nothing(folder) -> None:
    run("spec.json", "-o", "out")
    config = folder / "out" / "ds_config.json"
    edited = config.read_text().replace('"stage": 1', '"stage": 2')
    config.write_text(edited)
    result = run("spec.json", "-o", "out", "--check")
    assert result.exit_code == 1
    assert '-    "stage": 2,' in result.output
    assert '+    "stage": 1,' in result.output
    assert config.read_text() == edited


def test_check_sees_a_spec_that_was_changed_and_files_that_are_missing(folder) -> None:
    run("spec.json", "-o", "out")
    (folder / "out" / "launch" / "torchrun.sh").unlink()
    (folder / "spec.json").write_text(json.dumps(spec_tree(2, 8, parallelism={"tp": 4})), encoding="utf-8")
    result = run("spec.json", "-o", "out", "--check")
    assert result.exit_code == 1
    assert "Missing: out/launch/torchrun.sh" in result.output
    assert "+++ plan.json (compiled)" in result.output
    assert run("spec.json", "-o", "nowhere", "--check").exit_code == 1
    assert not (folder / "nowhere").exists()


def test_check_needs_a_folder(folder) -> None:
    result = run("spec.json", "--check")
    assert result.exit_code == 2
    assert "add -o DIR" in result.output


def test_files_of_an_earlier_target_are_removed_unless_somebody_edited_them(folder) -> None:
    run("spec.json", "-o", "out", "--target", "torchrun", "-t", "slurm", "-t", "deepspeed")
    script = folder / "out" / "launch" / "slurm.sbatch"
    script.write_text(script.read_text() + "# mine\n")
    (folder / "out" / "notes.txt").write_text("mine")
    assert "Only in out: launch/deepspeed.sh" in run("spec.json", "-o", "out", "--check", "-t", "torchrun").output
    run("spec.json", "-o", "out", "--target", "torchrun")
    assert names(folder / "out") == ALWAYS | {"launch/torchrun.sh", "launch/slurm.sbatch", "notes.txt"}


def test_a_lock_file_cannot_name_files_outside_its_folder(folder) -> None:
    run("spec.json", "-o", "out")
    lock = folder / "out" / "parcompile.lock.json"
    tree = json.loads(lock.read_text())
    tree["files"]["../spec.json"] = "sha256:" + sha256((folder / "spec.json").read_bytes()).hexdigest()
    lock.write_text(json.dumps(tree))
    run("spec.json", "-o", "out")
    assert (folder / "spec.json").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"targets": 3}', '{"files": 3}', '{"targets": ["nemo"]}'])
def test_a_damaged_lock_file_is_no_obstacle(folder, text) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "parcompile.lock.json").write_text(text)
    assert run("spec.json", "-o", "out").exit_code == 0
    assert run("spec.json", "-o", "out", "--check").exit_code == 0
