"""The pages of docs/: what they show runs, what is generated is current, and the site holds together."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import api_page as api
import llms_page as llms
import models_page as models
import pytest
import rules_page as rules
import spec_page as spec
import troubleshooting_page as troubleshooting
from click.testing import CliRunner

from parcompile.cli import cli, main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ("choosing", "concepts", "estimates", "migration", "moe", "quickstart")
FAILS = "# exits with 1"


def files(page: str) -> dict[str, str]:
    """The files that a page shows, each under its name."""
    return dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', page, re.DOTALL))


def commands(page: str) -> list[str]:
    shown = "".join(re.findall(r"```console\n(.*?)```", page, re.DOTALL))
    return re.findall(r"^\$ (.*)$", shown, re.MULTILINE)


def test_each_step_to_fit_a_larger_model_has_the_estimate_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "fit_larger.md").read_text(encoding="utf-8")
    tree, seen = json.loads(files(text)["spec.json"]), 0
    for change, shown in re.findall(r"^\| [^|]+ \| (?:`(\{[^|]+\})`)? ?\| ([A-Z ]+ · [^|]+) \|$", text, re.MULTILINE):
        for section, values in json.loads(change or "{}").items():
            tree[section] |= values
        Path("spec.json").write_text(json.dumps(tree), encoding="utf-8")
        run = CliRunner().invoke(cli, ["estimate", "spec.json"])
        assert run.stdout.splitlines()[0] == shown, change
        seen += 1
    assert seen == 11


def test_parts_of_layers_have_the_estimates_that_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "fit_larger.md").read_text(encoding="utf-8")
    tree = json.loads(files(text)["parts.json"])
    rows = re.findall(r'^\| `"([a-z+]+)"` \| ([A-Z ]+ · [^|]+) \|$', text, re.MULTILINE)
    for word, shown in rows:
        tree["training"]["activation_checkpointing"] = word
        Path("parts.json").write_text(json.dumps(tree), encoding="utf-8")
        assert CliRunner().invoke(cli, ["estimate", "parts.json"]).stdout.splitlines()[0] == shown, word
    assert len(rows) == 7


def exit_code(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs a command of a page: parcompile in this process, which saves its imports, others in a shell."""
    if line.startswith("parcompile "):
        monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True))
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    # The launcher's own port may be taken by another test.
    finder = [sys.executable, str(ROOT / "examples" / "free_port.py")]
    port = subprocess.run(finder, capture_output=True, text=True, check=True).stdout.strip()
    line = line.replace("deepspeed ", f"deepspeed --master_port {port} ")
    return subprocess.run(line, shell=True, env=environment, timeout=600, check=False).returncode


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.ranks
def test_every_command_of_a_page_runs_on_the_files_that_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if name in ("moe", "quickstart"):
        pytest.importorskip("deepspeed", reason="the page trains: it needs the extra [runtime]")
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for file, text in files(page).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shown = commands(page)
    assert len(shown) >= 6
    for line in shown:
        found = exit_code(line, monkeypatch)
        assert found == (1 if line.endswith(FAILS) else 0), f"{line}\n{capfd.readouterr()}"
    if name in ("choosing", "concepts"):
        drawn = {picture.name: picture.read_bytes() for picture in tmp_path.glob("*.svg")}
        stored = {picture.name: picture.read_bytes() for picture in (DOCS / "pictures" / name).glob("*.svg")}
        assert drawn == stored, f"draw docs/pictures/{name} anew with the commands of docs/{name}.md"


def test_every_console_block_is_run_by_a_test() -> None:
    shown = {page.stem for page in DOCS.glob("*.md") if commands(page.read_text(encoding="utf-8"))}
    assert shown == {*PAGES, "data", "doctor", "finetune", "guide", "preflight", "report"}  # their own tests run these


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("spec", spec.reference),
        ("troubleshooting", troubleshooting.reference),
        ("rules", rules.reference),
        ("api", api.reference),
        ("models", models.reference),
    ],
)
def test_a_generated_page_is_current(name: str, written) -> None:
    module = written.__module__
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == written(), f"python -m {module} > docs/{name}.md"


def test_troubles_of_a_run_are_messages_that_the_source_holds() -> None:
    folders = (ROOT / "runtime", ROOT / "compiler")
    modules = [one for folder in folders for one in folder.rglob("*.py") if one.stem != "troubleshooting"]
    source = "".join(one.read_text(encoding="utf-8") for one in modules)
    for one in troubleshooting.RUN:
        assert one.sign in source, one.sign


def test_the_page_of_environment_variables_lists_what_the_runtime_reads() -> None:
    from parcompile.runtime.settings import HEARTBEAT, RECORDS, VARIABLES

    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    for one in VARIABLES:
        assert f"| `{one.name}` | {one.default_seconds:g} s | {one.meaning} |" in page
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "runtime").rglob("*.py"))
    read = set(re.findall(r'"(PARCOMPILE_[A-Z_]+)"', source))
    known = {*(one.name for one in VARIABLES), HEARTBEAT, RECORDS}
    assert read == known == set(re.findall(r"`(PARCOMPILE_[A-Z_]+)`", page))


class _Fetched(HTMLParser):
    """What a page loads by itself; links that a reader follows are not among it."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.addresses.append(given.get("href") or "")
        elif tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.addresses.append(given["src"] or "")


def build(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mkdocs", reason="the site was NOT built: it needs the extra [docs]")
    command = [sys.executable, "-m", "mkdocs", "build", *arguments]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = build(ROOT, "--strict", "--site-dir", str(site))
    assert done.returncode == 0, done.stdout + done.stderr
    # The page for wrong addresses is for servers: nobody opens it from a folder.
    pages = [page for page in site.glob("*.html") if page.name != "404.html"]
    assert {page.stem for page in pages} >= {page.stem for page in DOCS.glob("*.md")}
    for page in pages:
        parser = _Fetched()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.addresses
        for one in parser.addresses:
            path = one.partition("#")[0].partition("?")[0]
            assert one.startswith("data:") or ("//" not in one and (page.parent / path).exists()), f"{page.name}: {one}"
    styles = [style.read_text(encoding="utf-8") for style in site.rglob("*.css")]
    assert not [found for style in styles for found in re.findall(r"(?:@import|url\()[\s'\"]*(?:https?:)?//", style)]


@pytest.mark.parametrize(
    "broken", ["[a page](nowhere.md)", "[a part](rules.md#z999)", "![a picture](pictures/none.svg)"]
)
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, broken: str) -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    settings = re.sub(r"(?m)^hooks: .*$", "", settings.partition("\nnav:")[0])
    (tmp_path / "mkdocs.yml").write_text(settings + "\n", encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n{broken}\n", encoding="utf-8")
    (tmp_path / "docs" / "rules.md").write_text("# Rules\n\n## B001\n", encoding="utf-8")
    done = build(tmp_path)
    assert done.returncode == 1
    assert broken.partition("(")[2].rstrip(")") in done.stdout + done.stderr


def test_the_list_of_pages_for_language_models_is_current() -> None:
    written = llms.reference()
    assert (DOCS / "llms.txt").read_text(encoding="utf-8") == written, "python .ci/pages/llms_page.py > docs/llms.txt"
    named = set(re.findall(r"\((\w+)\.md\)", written))
    assert named == {page.stem for page in DOCS.glob("*.md")}
