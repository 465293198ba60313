"""What the README and the guides show is true."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parcompile.model.catalogue import model_types

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def parcompile(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parcompile", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def session(text: str) -> list[tuple[str, str]]:
    """The commands of a terminal that is shown, each with what it prints."""
    return [
        (line, output) for line, output in re.findall(r"^\$ parcompile (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
    ]


def test_the_terminal_shows_what_appears(tmp_path: Path) -> None:
    (spec,) = blocks("json")
    (tmp_path / "spec.json").write_text(spec, encoding="utf-8")
    shown = [one for text in blocks("text")[:2] for one in session(text)]
    assert [line.split()[0] for line, _ in shown] == ["check", "check", "spec.json", "estimate"]
    for line, output in shown:
        done = parcompile(*shlex.split(line), folder=tmp_path)
        printed = done.stdout + done.stderr
        assert printed.rstrip() == output.rstrip() if not line.startswith("estimate") else printed.startswith(output)
        assert done.returncode == (1 if "error[" in output else 0)
    for file in re.findall(r"^\| `([\w.]+\.json)` \|", page("training"), re.MULTILINE):
        assert (tmp_path / "plan" / file).is_file()


@pytest.mark.ranks
def test_the_laptop_run_that_is_shown_trains(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="the commands train: they need the extra [runtime]")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    compile_line, train_line = re.findall(r"^\$ (.* out/byte-llama.*)$", README, re.MULTILINE)
    assert parcompile(*shlex.split(compile_line)[1:], folder=tmp_path).returncode == 0
    finder = [sys.executable, str(ROOT / "examples" / "free_port.py")]
    port = subprocess.run(finder, capture_output=True, text=True, check=True).stdout.strip()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    line = train_line.replace("deepspeed ", f"deepspeed --master_port {port} ")
    done = subprocess.run(
        line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    form = r"loss ([\d.]+) → ([\d.]+) nats per byte in 20 steps"
    shown, found = re.search(form, blocks("text")[2]), re.search(form, done.stdout)
    assert shown
    assert found, done.stdout
    # The text that it trains on is that of the Python that runs it.
    assert [float(one) for one in found.groups()] == pytest.approx([float(one) for one in shown.groups()], rel=0.1)


def test_the_training_snippet_trains(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="the snippet needs the extra [runtime]")
    tree = json.loads((ROOT / "examples" / "byte_llama.json").read_text(encoding="utf-8"))
    tree["cluster"]["gpus_per_node"] = 1
    tree["parallelism"] = {}
    tree["training"].update(sequence_length=32, global_batch_size=2, micro_batch_size=2)
    (tmp_path / "spec.json").write_text(json.dumps(tree), encoding="utf-8")
    assert parcompile("spec.json", "-o", "plan", folder=tmp_path).returncode == 0
    snippet = "\n".join(blocks("python", page("training")))
    done = subprocess.run(
        [sys.executable, "-c", snippet],
        cwd=tmp_path,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d): loss \d", done.stdout, re.MULTILINE) == ["1", "2", "3"]
    # Each figure that the page names is in a row, but for those of several ranks, GPUs, fp16 and routers.
    rows = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [(row["step"], "eval_loss/news" in row) for row in rows] == [(4, True), (5, False), (6, True), (7, False)]
    table = page("training").partition("| figure |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([a-z_]+)[`/]", "".join(row.split("|")[1] for row in table.splitlines()[2:])))
    written = {name.partition("/")[0] for row in rows for name in row} - {"step"}
    elsewhere = {"mfu", "skipped_steps", "slowest_rank", "slowest_seconds", "fastest_seconds", "router_load"}
    elsewhere |= {"refused_choices"}
    assert named == written | elsewhere
    assert "parcompile_eval_loss{" in (tmp_path / "output" / "run.prom").read_text("utf-8")


def test_the_readme_says_first_what_has_not_run() -> None:
    # Who reads only the top of the page has to know it too.
    assert "One GPU has run the runtime, several have not" in README.partition("## ")[0]


def test_the_readme_is_short_and_its_first_command_runs(tmp_path: Path) -> None:
    assert len(README.split()) <= 900
    assert "not on a package index yet" in README
    (line,) = re.findall(r"^\$ parcompile (plan .*)$", README, re.MULTILINE)
    done = parcompile(*shlex.split(line), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_counts_the_models_that_work() -> None:
    types = model_types().values()
    for count, words in (
        (sum(one.works and one.causal for one in types), r"injects\s+more than (\d+)\s+types"),
        (sum(one.text_works for one in types), r"text parts of\s+more than (\d+)\s+multimodal types"),
    ):
        (said,) = map(int, re.findall(words, page("status")))
        assert said < count <= said + 20


def test_every_command_of_make_that_is_shown_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = set(re.findall(r"make (\w+)", README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    assert shown <= targets
    assert {"demo", "test", "lint", "bench", "clean"} <= targets


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_that_the_guides_name_exist() -> None:
    for page in (README, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        for name in re.findall(r"`((?:tests|examples|compiler|runtime|schemas|benchmarks)/[\w/.]*)`", page):
            assert (ROOT / name).exists(), name


def test_every_package_is_listed_for_the_build() -> None:
    """A folder that setuptools does not know is missing from the wheel."""
    listed = set(
        re.findall(r'^    "(parcompile[\w.]*)",$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    found = set()
    for folder, name in (
        ("compiler", "parcompile"),
        ("runtime", "parcompile.runtime"),
        ("schemas", "parcompile.schemas"),
    ):
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([name, *parts]))
    assert listed == found
