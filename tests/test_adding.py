"""What CONTRIBUTING says of adding one more: each is added to a copy of the package, runs, and takes as many files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from parcompile.rules import example_spec

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


class Copy:
    """The sources, copied; `files` are those that were changed or added."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, set[str]()
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "compiler", folder / "parcompile", ignore=leave)
        shutil.copytree(ROOT / "schemas", folder / "parcompile" / "schemas", ignore=leave)

    def file(self, name: str) -> Path:
        self.files.add(name)
        return self.folder / "parcompile" / name

    def replace(self, name: str, old: str, new: str) -> None:
        file = self.file(name)
        text = file.read_text(encoding="utf-8")
        assert text.count(old) == 1, (name, old)
        file.write_text(text.replace(old, new), encoding="utf-8")

    def run(self, *words: str, spec: Mapping[str, Any] | None = None) -> str:
        """What a command prints."""
        (self.folder / "spec.json").write_text(json.dumps(spec or example_spec({})))
        done = subprocess.run(
            [sys.executable, "-m", "parcompile", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def files_said(what: str) -> int:
    """How many files the paragraph of that title counts."""
    found = re.search(rf"^\*\*{what}\*\* \((\d+) files?\b", TEXT, re.MULTILINE)
    assert found is not None, what
    return int(found[1])


def test_a_rule(copy: Copy) -> None:
    with copy.file("rules/w_world.py").open("a", encoding="utf-8") as file:
        file.write(
            '\n\n@rule("W999")\n'
            "def is_not_acme(spec: Resolution) -> Iterator[Finding]:\n"
            '    if spec.get("name") == "acme":\n        yield Finding("name is acme", ("name",))\n'
        )
    page = {"title": "the run is called acme", "explanation": "Nobody calls a run so.", "wrong": {"name": "acme"}}
    pages = copy.file("rules/pages.json")
    pages.write_text(json.dumps({**json.loads(pages.read_text()), "W999": {**page, "right": {}}}))
    assert "error[W999]: name is acme" in copy.run("check", "spec.json", spec=example_spec({"name": "acme"}))
    assert "W999" not in copy.run("check", "spec.json")
    assert "the run is called acme" in copy.run("explain", "W999")
    assert len(copy.files) == files_said("A rule.")


def test_a_target(copy: Copy) -> None:
    copy.file("backends/acme.py").write_text(
        "from parcompile.plan import Plan\n\n\ndef files(plan: Plan) -> dict[str, object]:\n"
        '    return {"acme/run.json": {"ranks": plan.world_size}}\n'
    )
    copy.replace(
        "backends/registry.py",
        "from . import deepspeed, launch, torchtitan\n",
        "from . import acme, deepspeed, launch, torchtitan\n",
    )
    copy.replace(
        "backends/registry.py",
        '        Target("torchrun",',
        '        Target("acme", acme.files),\n        Target("torchrun",',
    )
    copy.replace("backends/kinds.py", '*("deepspeed", "torchrun",', '*("deepspeed", "acme", "torchrun",')
    copy.run("spec.json", "-o", "out", "--target", "acme")
    assert json.loads((copy.folder / "out" / "acme" / "run.json").read_text())["ranks"] == 8
    assert len(copy.files) == files_said("A target.")


def change(file: Path, work: Callable[[Any], None]) -> None:
    tree = json.loads(file.read_text(encoding="utf-8"))
    work(tree)
    file.write_text(json.dumps(tree), encoding="utf-8")


def enums(tree: Any, holding: str) -> Iterator[list[Any]]:
    """The lists of choices in a schema that have a choice."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if key == "enum" and holding in value:
            yield value
        elif isinstance(value, dict | list):
            yield from enums(value, holding)


def test_an_accelerator(copy: Copy) -> None:
    def add(tree: Any) -> None:
        here = tree["accelerators"]
        here["acme-1"] = {**here["h100-sxm"], "title": "ACME 1", "memory_mib": 1024}

    def name(tree: Any) -> None:
        for choices in enums(tree, "h200"):
            choices.append("acme-1")

    change(copy.file("machines/accelerators.json"), add)
    change(copy.file("schemas/spec.schema.json"), name)
    said = copy.run("check", "spec.json", spec=example_spec({"cluster": {"accelerator": "acme-1"}}))
    assert "error[H001]" in said, said
    assert "acme-1" in copy.run("accelerators")
    assert len(copy.files) == files_said("An accelerator.")


def test_a_model_family(copy: Copy) -> None:
    """One that has a table and no mechanism of its own: taken away, and added again."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = {"model_type": "granite", **sizes, "vocab_size": 256, "max_position_embeddings": 8192}
    (copy.folder / "config.json").write_text(json.dumps(config))
    spec = {**example_spec({}), "model": {"hf_config": "config.json"}}
    families = copy.file("model/families.json")
    stored = json.loads(families.read_text(encoding="utf-8"))["granite"]
    assert "module" not in stored
    change(families, lambda tree: tree.pop("granite"))
    assert "error[S003]: model_type 'granite' is refused" in copy.run("check", "spec.json", spec=spec)
    copy.files.clear()
    change(copy.file("model/families.json"), lambda tree: tree.update(granite=stored))
    said = copy.run("check", "spec.json", spec=spec)
    assert "error" not in said, said
    assert len(copy.files) == files_said("A model family.")


def test_a_key_of_the_spec(copy: Copy) -> None:
    for name in ("spec", "plan"):
        file = copy.file(f"schemas/{name}.schema.json")
        tree = json.loads(file.read_text(encoding="utf-8"))
        training = tree["properties"]["training"]
        training["properties"]["acme"] = {"type": "integer", "minimum": 1, "default": 3, "description": "Of ACME."}
        if name == "plan":
            training["required"].append("acme")
        file.write_text(json.dumps(tree), encoding="utf-8")
    copy.replace("spec/values.py", "    seed: int\n", "    seed: int\n    acme: int\n")
    seed = '            seed=int(self.get("training", "seed")),\n'
    copy.replace("spec/resolve/training.py", seed, f"{seed}{seed.replace('seed', 'acme')}")
    for given, value in (({}, 3), ({"acme": 7}, 7)):
        copy.run("spec.json", "-o", "out", spec=example_spec({"training": given}))
        assert json.loads((copy.folder / "out" / "plan.json").read_text())["training"]["acme"] == value
    assert "error[K005]" in copy.run("check", "spec.json", spec=example_spec({"training": {"acme": 0}}))
    assert len(copy.files) == files_said("A key of the spec.")
