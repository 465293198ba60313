"""What is published beside the package: schemas at their addresses, SchemaStore's entry, and the release."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator, Draft202012Validator

import parcompile
from parcompile import schema
from parcompile.schema import draft07
from parcompile.version import how_to_install

ROOT = Path(__file__).parents[2]


def read(file: Path) -> Any:
    text = file.read_text(encoding="utf-8")
    return json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)


@pytest.mark.parametrize("name", schema.names())
def test_the_id_of_a_schema_is_an_address_that_the_package_resolves(name: str) -> None:
    address = schema.load(name)["$id"]
    assert address == f"{schema.BASE}{name}.schema.json"
    assert address.startswith("https://")
    assert schema.text(address) == schema.text(name)
    through = Draft202012Validator({"$ref": address}, registry=schema.registry())
    assert not through.is_valid([])
    assert draft07(schema.load(name))["$id"] == f"{schema.BASE}{name}.draft-07.schema.json"


def test_the_site_has_the_schemas_where_their_id_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import publish_schemas

    publish_schemas.on_post_build({"site_dir": str(tmp_path)})
    folder = tmp_path / publish_schemas.FOLDER
    assert schema.BASE.endswith(f"/en/stable/{publish_schemas.FOLDER}/")
    for file in folder.iterdir():
        assert read(file)["$id"] == schema.BASE + file.name
    assert len(list(folder.iterdir())) == 2 * len(schema.names())


def test_the_entry_of_schemastore_takes_its_positive_files_and_refuses_its_negative_ones(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / ".ci/schemastore/assemble.py"), str(tmp_path)], check=True, timeout=600)
    for entry in read(tmp_path / "parcompile-catalog-entries.json"):
        name = Path(entry["url"]).stem
        store = read(tmp_path / "src/schemas/json" / f"{name}.json")
        assert (store["$id"], store["$schema"]) == (entry["url"], "http://json-schema.org/draft-07/schema#")
        Draft7Validator.check_schema(store)
        good = sorted((tmp_path / "src/test" / name).iterdir())
        bad = sorted((tmp_path / "src/negative_test" / name).iterdir())
        assert len(good) >= 2 <= len(bad)
        assert [file.name for file in good if not Draft7Validator(store).is_valid(read(file))] == []
        assert [file.name for file in bad if Draft7Validator(store).is_valid(read(file))] == []
        matched = "run.parcompile.yaml" if name == "parcompile" else "ds_config_zero2.json"
        assert any(fnmatch.fnmatch(matched, pattern) for pattern in entry["fileMatch"])
        assert not any(fnmatch.fnmatch("package.json", pattern) for pattern in entry["fileMatch"])


def test_a_release_is_built_tested_and_published_without_a_token() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    flow = yaml.safe_load(text)
    assert flow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key "on" as true
    publish = flow["jobs"]["publish"]
    assert (publish["permissions"], publish["needs"]) == ({"id-token": "write"}, "build")
    assert not re.search(r"password|secrets\.", text)
    steps = [step for job in flow["jobs"].values() for step in job["steps"]]
    assert all(re.search(r"@[0-9a-f]{40}$", step["uses"]) for step in steps if "uses" in step)


@pytest.mark.parametrize(("tag", "code"), [("v{}", 0), ("v9.9.9", 1)])
def test_a_release_refuses_a_tag_that_is_not_the_version(tmp_path: Path, tag: str, code: int) -> None:
    steps = read(ROOT / ".github/workflows/release.yml")["jobs"]["build"]["steps"]
    script = next(step["run"] for step in steps if step.get("name") == "The tag is the version")
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler/version.py").write_bytes((ROOT / "compiler/version.py").read_bytes())
    (tmp_path / "CHANGELOG.md").write_text(f"## [{parcompile.__version__}] - today\n", encoding="utf-8")
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        env={"TAG": tag.format(parcompile.__version__), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        check=False,
        capture_output=True,
    )
    assert done.returncode == code


@pytest.mark.parametrize(
    ("told", "command"),
    [
        (None, "pip install 'parcompile[runtime]'"),
        ({"url": "file://{folder}", "dir_info": {}}, "pip install '{folder}[runtime]'"),
        (
            {"url": "https://example.org/parcompile.whl"},
            "pip install 'parcompile[runtime] @ https://example.org/parcompile.whl'",
        ),
        (
            {"url": "file://{folder}/gone"},
            "install the extra runtime of parcompile, from where it was installed ({folder}/gone is gone)",
        ),
    ],
)
def test_what_adds_an_extra_is_advised_from_where_the_package_came(
    told: dict[str, Any] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "" if told is None else json.dumps(told).replace("{folder}", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    assert how_to_install("runtime") == command.replace("{folder}", str(tmp_path))
