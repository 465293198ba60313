"""The pictures in the documents are what the tool draws; as a script, this draws them anew. The commands shown run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from parcompile.pipeline import compile_file
from parcompile.show.pictures import Subject
from parcompile.show.pictures.front import KINDS, picture
from parcompile.show.pictures.svg import svg

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
REPORT = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
OPTIONS = {"grid": {"rank": 5}}
SCHEDULE = {
    "train_steps": 1000,
    "lr_scheduler": {"type": "cosine", "warmup_steps": 100, "min_lr": 3e-5, "total_steps": 1500},
}


def spec_of_readme() -> str:
    found = re.search(r"```json\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found
    # The README shows a mistake, and mends it as its second command does.
    return found[1].replace('"global_batch_size": 66', '"global_batch_size": 64')


def drawn(name: str, folder: Path) -> str:
    file = folder / "spec.json"
    tree = json.loads(spec_of_readme())
    tree["training"] |= SCHEDULE if name == "rates" else {}
    file.write_text(json.dumps(tree), encoding="utf-8")
    plan, checked = compile_file(file)
    assert plan is not None, checked.diagnostics
    return svg(picture(name, Subject.of(plan), **OPTIONS.get(name, {})))


@pytest.mark.parametrize("name", KINDS)
def test_a_picture_in_the_documents_is_what_the_tool_draws(name: str, tmp_path: Path) -> None:
    shown = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert shown == drawn(name, tmp_path), f"draw the pictures anew: python {Path(__file__).relative_to(ROOT)}"


def test_every_picture_is_shown() -> None:
    assert {file.stem for file in FOLDER.glob("*.svg")} >= set(KINDS)
    for name in KINDS:
        assert f"(pictures/{name}.svg)" in REPORT


def test_the_commands_of_the_report_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a PNG needs the extra [pictures]")
    for name in ("spec", "before", "after"):
        tree = json.loads(spec_of_readme())
        if name == "after":
            tree["parallelism"]["tp"] = 4
        (tmp_path / f"{name}.json").write_text(json.dumps(tree), encoding="utf-8")
    commands = re.findall(r"^\$ parcompile (.*)$", REPORT, re.MULTILINE)
    assert len(commands) == 9
    for line in commands:
        line, _, target = line.partition(" > ")
        done = subprocess.run(
            [sys.executable, "-m", "parcompile", *shlex.split(line)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        if target:
            (tmp_path / target).write_text(done.stdout, encoding="utf-8")
    assert "(this plan)" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_snippet_of_the_report_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spec.json").write_text(spec_of_readme(), encoding="utf-8")
    compiled = [sys.executable, "-m", "parcompile", "spec.json", "-o", "plan", "-q"]
    subprocess.run(compiled, cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    found = re.search(r"```python\n(.*?)```", REPORT, re.DOTALL)
    assert found
    names: dict[str, str] = {}
    exec(compile(found[1], "report.md", "exec"), names)
    assert names["drawing"].startswith("<svg")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        for one in KINDS:
            (FOLDER / f"{one}.svg").write_text(drawn(one, Path(scratch)), encoding="utf-8")
            sys.stdout.write(f"drew docs/pictures/{one}.svg\n")
