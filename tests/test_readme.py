"""What the README and the guides show is true."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def parcompile(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parcompile", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_spec_compiles_to_what_is_shown(tmp_path: Path) -> None:
    (spec,) = blocks("json")
    (tmp_path / "spec.json").write_text(spec, encoding="utf-8")
    done = parcompile("spec.json", "-o", "plan", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = blocks("text")[0]
    assert done.stdout.startswith(shown)
    for file in re.findall(r"^\| `(\w+\.json)` \|", README, re.MULTILINE):
        assert (tmp_path / "plan" / file).is_file()


def test_the_error_that_is_shown_is_the_error_that_appears(tmp_path: Path) -> None:
    (spec,) = blocks("json")
    wrong = spec.replace('"global_batch_size": 64', '"global_batch_size": 98')
    (tmp_path / "spec.json").write_text(wrong, encoding="utf-8")
    done = parcompile("spec.json", "-o", "plan", folder=tmp_path)
    assert done.returncode == 1
    assert blocks("text")[1] in done.stderr


def test_the_training_snippet_trains(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="the snippet needs the extra [runtime]")
    tree = json.loads((ROOT / "examples" / "byte_llama.json").read_text(encoding="utf-8"))
    tree["cluster"]["gpus_per_node"] = 1
    tree["parallelism"] = {}
    tree["training"].update(sequence_length=32, global_batch_size=2, micro_batch_size=2)
    (tmp_path / "spec.json").write_text(json.dumps(tree), encoding="utf-8")
    assert parcompile("spec.json", "-o", "plan", folder=tmp_path).returncode == 0
    (snippet,) = blocks("python")
    assert "< 1000:" in snippet  # three steps do here
    script = (
        "import torch\nsamples = [torch.randint(0, 256, (32,)) for _ in range(8)]\n"
        + snippet.replace("< 1000:", "< 3:")
        + "print('trained', float(loss))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout


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
