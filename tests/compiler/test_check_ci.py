"""What others' CI takes from this repository: the pre-commit hook and the composite action run as they are written."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from layout_cases import SMALL_MODEL, spec_tree

ROOT = Path(__file__).parents[2]
SPECS = ROOT / "tests" / "specs"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def environment() -> dict[str, str]:
    """With a `parcompile` on the path, as after an installation."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def hooks() -> dict[str, Any]:
    """The hooks by their ids."""
    return {hook["id"]: hook for hook in load(ROOT / ".pre-commit-hooks.yaml")}


@pytest.mark.parametrize(
    ("file", "taken"),
    [
        ("specs/llama.json", True),
        ("runs/spec/llama.yaml", True),
        ("llama.spec.json", True),
        ("ds_config.json", True),
        ("configs/ds_config_zero3.json", True),
        ("configs/deepspeed_bf16.json", True),
        ("package.json", False),
        ("tests/inspector.json", False),
    ],
)
def test_the_hook_takes_specs_and_deepspeed_configs(file: str, taken: bool) -> None:
    assert {bool(re.search(hook["files"], file)) for hook in hooks().values()} == {taken}


def test_the_hook_runs_on_files_and_fails_on_mistakes() -> None:
    hook = hooks()["parcompile-check"]
    for folder, code in (("positive", 0), ("negative", 1)):
        files = [str(file) for file in sorted((SPECS / folder).glob("W001*.json")) if "expected" not in file.name]
        command = [*hook["entry"].split(), *files]
        assert subprocess.run(command, env=environment(), capture_output=True, check=False).returncode == code


def test_the_fixing_hook_mends_what_is_safe_and_fails_on_the_rest(tmp_path: Path) -> None:
    hook = hooks()["parcompile-fix"]
    assert hook["require_serial"]
    tree = spec_tree(model=SMALL_MODEL)
    tree["parallelism"] = {"tp": 1, "sequence_parallel": True}  # T006, whose fix is safe
    fixable, wrong = tmp_path / "fixable.spec.json", tmp_path / "wrong.spec.json"
    fixable.write_text(json.dumps(tree), encoding="utf-8")
    wrong.write_text(json.dumps({**tree, "parallelism": {"tp": 3}}), encoding="utf-8")
    before = wrong.read_text(encoding="utf-8")
    codes = {
        file: subprocess.run(
            [*hook["entry"].split(), str(file)], env=environment(), capture_output=True, check=False
        ).returncode
        for file in (fixable, wrong)
    }
    assert codes == {fixable: 0, wrong: 1}
    assert "sequence_parallel" not in json.loads(fixable.read_text(encoding="utf-8"))["parallelism"]
    assert wrong.read_text(encoding="utf-8") == before


def test_the_action_can_be_listed_and_uploads_only_when_asked() -> None:
    action = load(ROOT / "action.yml")
    assert set(action["branding"]) == {"icon", "color"}
    assert action["outputs"]["sarif"]["value"] == "${{ inputs.sarif }}"
    (upload,) = [step for step in action["runs"]["steps"] if step["name"] == "Upload"]
    assert "inputs.upload-sarif == 'true'" in upload["if"]
    assert action["inputs"]["upload-sarif"]["default"] == "false"


def test_the_citation_names_the_version_of_the_package() -> None:
    import parcompile

    citation = load(ROOT / "CITATION.cff")
    assert citation["version"] == parcompile.__version__
    assert citation["license"] == "Apache-2.0"


def action_step(name: str = "Check") -> str:
    steps = load(ROOT / "action.yml")["runs"]["steps"]
    (step,) = [one for one in steps if one["name"] == name]
    return str(step["run"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="the action is a bash script")
@pytest.mark.parametrize(("folder", "code"), [("positive", 0), ("negative", 1)])
def test_the_action_checks_patterns_and_writes_sarif(folder: str, code: int, tmp_path: Path) -> None:
    for file in sorted((SPECS / folder).glob("C001*.json")):
        if "expected" not in file.name:
            (tmp_path / "specs" / "deep").mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tmp_path / "specs" / "deep" / file.name)
    settings = {"SPECS": "specs/**/*.json", "IGNORE": "B005", "WARNINGS_AS_ERRORS": "false", "SARIF": "out.sarif"}
    done = subprocess.run(
        ["bash", "-e", "-c", action_step()],
        cwd=tmp_path,
        env={**environment(), **settings},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert ("::error" in done.stdout) is bool(code)
    assert '"2.1.0"' in (tmp_path / "out.sarif").read_text(encoding="utf-8")


@pytest.fixture
def pull_request(tmp_path: Path) -> Path:
    """A checkout whose branch changes a spec, adds one, breaks one and removes one, with its base at `origin`."""
    origin, here = tmp_path / "origin", tmp_path / "here"
    specs = origin / "specs" / "deep"
    specs.mkdir(parents=True)
    config = {**SMALL_MODEL, "architectures": ["LlamaForCausalLM"]}
    (specs / "config.hf").write_text(json.dumps(config), encoding="utf-8")
    for name in ("changed", "broken", "gone", "same"):
        tree = spec_tree(1, 8, model={"hf_config": "config.hf"}, parallelism={"tp": 2})
        (specs / f"{name}.json").write_text(json.dumps(tree), encoding="utf-8")
    git = functools.partial(subprocess.run, check=True, capture_output=True)
    git(["git", "init", "-q", "-b", "main"], cwd=origin)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    git(["git", "add", "-A"], cwd=origin)
    git(["git", *who, "commit", "-qm", "base"], cwd=origin)
    git(["git", "clone", "-q", str(origin), str(here)])
    changed = {"changed": 4, "broken": 3, "new & odd [1]": 2}
    for name, tp in changed.items():
        tree = spec_tree(1, 8, model={"hf_config": "config.hf"}, parallelism={"tp": tp})
        (here / "specs" / "deep" / f"{name}.json").write_text(json.dumps(tree), encoding="utf-8")
    (here / "specs" / "deep" / "gone.json").unlink()
    git(["git", "add", "-A"], cwd=here)
    git(["git", *who, "commit", "-qm", "change"], cwd=here)
    return here


@pytest.mark.skipif(shutil.which("bash") is None or shutil.which("git") is None, reason="the action needs bash and git")
def test_the_action_writes_what_a_pull_request_changes_into_the_summary(pull_request: Path, tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n", encoding="utf-8")
    settings = {"SPECS": "specs/**/*.json none/*.json", "BASE_REF": "main", "GITHUB_STEP_SUMMARY": str(summary)}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", action_step("Compare")],
        cwd=pull_request,
        env={**environment(), **settings},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    parts = {part.splitlines()[0]: part for part in text.split("\n## ")[1:]}
    assert set(parts) == {
        "specs/deep/changed.json",
        "specs/deep/broken.json",
        "specs/deep/gone.json",
        r"specs/deep/new \& odd \[1\].json",
    }
    assert "| layout | tp 2 × dp 4, micro 1 × 1 | tp 4 × dp 2, micro 1 × 1 |" in parts["specs/deep/changed.json"]
    assert "resharded while it is loaded" in parts["specs/deep/changed.json"]
    assert "error[" in parts["specs/deep/broken.json"]
    assert "is gone" in parts["specs/deep/gone.json"]
    assert "nothing to compare" in parts[r"specs/deep/new \& odd \[1\].json"]
    listed = subprocess.run(["git", "worktree", "list"], cwd=pull_request, capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 1


def test_the_action_compares_in_pull_requests_only() -> None:
    tree = load(ROOT / "action.yml")
    assert tree["inputs"]["base-ref"]["default"] == "${{ github.base_ref }}"
    (step,) = [one for one in tree["runs"]["steps"] if one["name"] == "Compare"]
    assert "inputs.base-ref != ''" in step["if"]
