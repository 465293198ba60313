"""Contract: `parcompile checkpoint` says what to name instead, writes all or nothing, and loses nothing."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from training_runs import MODEL, initial_model, make_plan

from parcompile.backends.artefacts import to_text
from parcompile.cli import cli
from parcompile.plan import Plan, plan_tree
from parcompile.runtime import RunError, initialize
from parcompile.runtime.checkpoint import verify
from parcompile.runtime.checkpoint.adapting import import_pretrained
from parcompile.runtime.run_log import RunLog


def plan_file(plan: Plan, file: Path) -> Path:
    file.write_text(to_text(plan_tree(plan)))
    return file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run: its plan, and a checkpoint in `checkpoints`, made from the weights in `hf`."""
    plan = make_plan(1, {})
    initial_model(plan).save_pretrained(tmp_path / "hf")
    import_pretrained(tmp_path / "hf", plan, tmp_path / "run" / "checkpoints")
    plan_file(plan, tmp_path / "run" / "plan.json")
    return tmp_path / "run"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["checkpoint", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """What a command says that ends with a message."""
    done = invoke(*arguments)
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit), done.exception
    return done.output


def test_a_path_that_is_no_checkpoint_is_answered_with_what_to_name(run: Path) -> None:
    checkpoints = run / "checkpoints"
    step = checkpoints / "step-0"
    assert f"in {run / 'none'}: there is no such folder" in refused("inspect", run / "none")
    assert f"in {run}: name {checkpoints}" in refused("inspect", run)
    assert f"this is a file: name the folder of a checkpoint, such as {checkpoints}" in refused(
        "inspect", run / "plan.json"
    )
    for file, meant in ((step / "parcompile.json", step), (checkpoints / "latest", checkpoints)):
        assert f"this is a file: name the folder of a checkpoint, such as {meant}" in refused("verify", file)
    empty = run / "empty"
    empty.mkdir()
    assert "it holds neither parcompile.json, which each checkpoint has, nor latest" in refused("inspect", empty)
    (checkpoints / "latest").write_text("step-9")
    assert "names step-9, but" in (said := refused("verify", checkpoints))
    assert "complete there: step-0" in said
    (checkpoints / "latest").unlink()
    assert "it lacks the file latest, which names the last one: name a checkpoint in it (step-0)" in refused(
        "inspect", checkpoints
    )


def test_a_folder_that_nobody_may_read_is_told_as_such(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, stat = run / "checkpoints" / "step-0", Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if closed in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    for folder in (closed, closed.parent):
        assert f"{closed / 'parcompile.json'} cannot be read: Permission denied" in refused("inspect", folder)


def test_nothing_is_written_into_a_checkpoint_which_that_would_make_unusable(run: Path) -> None:
    step, plan, hf = run / "checkpoints" / "step-0", run / "plan.json", run.parent / "hf"
    for output in (step, step / "new" / "folder"):
        assert "a checkpoint, and a further file makes it unusable" in refused(
            "convert", step, "--to", plan, "-o", output
        )
        assert "makes it unusable" in refused("import", "--hf", hf, "--plan", plan, "-o", output)
        with pytest.raises(RunError, match="makes it unusable"):
            RunLog(output)
        with pytest.raises(RunError, match="makes it unusable"):
            initialize(plan=str(plan), measurements=output / "measurements.csv")
    assert "makes it unusable" in refused("export", step, "--hf", step / "hf")
    assert verify(step) == []
    # A spec may have the name of a note: its folder is no checkpoint.
    (run / "parcompile.json").write_text("{}")
    assert invoke("export", step, "--hf", run / "hf").exit_code == 0


def test_weights_that_are_exported_have_the_permissions_of_any_new_file(run: Path) -> None:
    assert invoke("export", run / "checkpoints", "--hf", run / "out").exit_code == 0
    modes = {oct(file.stat().st_mode) for file in (run / "out").iterdir()}
    assert modes == {oct((run / "plan.json").stat().st_mode)}


def test_an_export_that_fails_leaves_nothing(run: Path) -> None:
    into = run.parent / "hf"  # no multimodal model
    said = refused("export", run / "checkpoints", "--hf", run / "deep" / "out", "--into", into)
    assert "holds no other part than the text" in said
    assert not (run / "deep").exists()
    limits, full = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        said = refused("export", run / "checkpoints", "--hf", run / "deep" / "out")
        other = refused("convert", run / "checkpoints", "--to", run / "plan.json", "-o", run / "converted")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, full)
    assert f"{run / 'deep' / 'out'} cannot be written:" in said
    assert not (run / "deep").exists()
    assert "cannot be written" in other
    assert not list((run / "converted").glob("*step*"))


def test_a_file_in_the_place_of_the_output_and_options_that_contradict_are_told(run: Path) -> None:
    file = run / "plan.json"
    assert f"{file} is a file" in refused("export", run / "checkpoints", "--hf", file)
    assert f"{file} is a file" in refused("convert", run / "checkpoints", "--to", file, "-o", file)
    into = ("--into", run.parent / "hf", "--adapter")
    assert "give one of them" in refused("export", run / "checkpoints", "--hf", run / "out", *into)


def test_a_plan_may_be_a_spec_and_another_model_is_told_with_its_values(run: Path) -> None:
    spec = {
        "version": 1,
        "name": "as a spec",
        "model": MODEL,
        "cluster": {"nodes": 1, "gpus_per_node": 1, "accelerator": "cpu"},
        "training": {"sequence_length": 32, "global_batch_size": 8, "micro_batch_size": 4, "precision": "fp32"},
    }
    (run / "spec.json").write_text(json.dumps(spec))
    for arguments in (
        ("convert", run / "checkpoints", "--to", run / "spec.json", "-o", run / "converted"),
        ("import", "--hf", run.parent / "hf", "--plan", run / "spec.json", "-o", run / "imported"),
    ):
        done = invoke(*arguments)
        assert done.exit_code == 0, done.output
    other = {**spec, "model": {**MODEL, "hidden_size": 2 * MODEL["hidden_size"]}}
    (run / "spec.json").write_text(json.dumps(other))
    said = refused("convert", run / "checkpoints", "--to", run / "spec.json", "-o", run / "no")
    size = MODEL["hidden_size"]
    assert f"hidden_size is {size} in the checkpoint and {2 * size} in the plan" in said
