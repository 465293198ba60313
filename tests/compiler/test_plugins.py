"""Rules, targets, importers and families of another distribution, installed as pip leaves it: files and metadata."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parcompile import entry_points

CODE = """
from parcompile.plugins import Experts, Family, Finding, Importer, Loss, Severity, Target, rule, table_like


@rule(
    "ACME001",
    "runs of this organisation have a seed of their own",
    "Seed 0 is what everybody forgets to set.",
    wrong={"training": {"seed": 0}},
    right={"training": {"seed": 7}},
)
def seed_is_chosen(spec):
    if spec.get("training", "seed") == 0:
        yield Finding("seed 0 is nobody's choice", ("training", "seed"), help="choose one")


@rule("ACME002", "a rule with a defect", "It divides by zero.", wrong={}, right={}, severity=Severity.WARNING)
def broken(spec):
    if spec.get("training", "seed") == 13:
        1 / 0
    yield from ()


RULES = [seed_is_chosen, broken]
TARGET = Target(
    "acme",
    lambda plan: {"acme/run.json": {"ranks": plan.world_size}},
    lambda plan: [Loss("ZeRO", "acme has none", "plain data parallelism is used")],
    backend="acme",
    version="3",
)
OUTSIDE = Target("outside", lambda plan: {"../ds_config.json": {}})
TABLE = table_like("llama")
for row in [one for one in TABLE["rows"] if "norm" in one["name"]]:
    TABLE["rows"].insert(TABLE["rows"].index(row) + 1, {**row, "name": row["name"].replace(".weight", ".bias")})
FAMILY = Family(table=TABLE)
OLD = Family()
INDEXED = Family(query_gate=True)
BESIDE = Family(experts=Experts(beside="shared_mlp"))


def read(source, draft):
    draft.carry(source, "cards", ("cluster", "gpus_per_node"))
    draft.carry(source, "length", ("training", "sequence_length"))
    draft.carry(source, "preset", ("model", "preset"))


IMPORTER = Importer(
    tool="ACME",
    options=dict,
    defaults=dict,
    read=read,
    written=lambda plan: {},
    recognises=lambda tree: "acme_version" in tree,
)
"""
POINTS = """
[parcompile.rules]
house = acme:RULES
[parcompile.targets]
acme = acme:TARGET
outside = acme:OUTSIDE
gone = acme.nowhere:TARGET
[parcompile.importers]
acme = acme:IMPORTER
[parcompile.families]
acme_llama = acme:FAMILY
acme_broken = acme.nowhere:FAMILY
acme_indexed = acme:INDEXED
acme_old = acme:OLD
acme_older = older:FAMILY
acme_beside = acme:BESIDE
"""
SPEC: dict[str, Any] = {
    "version": 1,
    "model": {"preset": "llama-3-8b"},
    "cluster": {"gpus_per_node": 8, "accelerator": "h200"},
    "training": {"sequence_length": 4096, "global_batch_size": 8, "seed": 7},
}


def install(folder: Path, name: str, points: str, code: str) -> Path:
    """A distribution without a network: its module, and the metadata that pip would write."""
    information = folder / f"{name}-1.2.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (information / "entry_points.txt").write_text(points)
    (folder / f"{name}.py").write_text(code)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Runs parcompile with the distributions of `site`, and returns its exit code and what it printed."""
    site = install(tmp_path / "site", "acme", POINTS, CODE)

    def call(*arguments: str, spec: dict[str, Any] | None = None, **environment: str) -> tuple[int, str]:
        (tmp_path / "spec.json").write_text(json.dumps(spec or SPEC))
        done = subprocess.run(
            [sys.executable, "-m", "parcompile", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site), **environment},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return call


def with_seed(seed: int) -> dict[str, Any]:
    return {**SPEC, "training": {**SPEC["training"], "seed": seed}}


def test_a_distribution_in_an_archive_offers_what_it_has(run: Any, tmp_path: Path) -> None:
    site = install(tmp_path / "packed", "older", "[parcompile.targets]\nolder = older:TARGET\n", "TARGET = None")
    archive = shutil.make_archive(str(tmp_path / "site"), "zip", site)
    code, said = run("check", "spec.json", "--target", "older", PYTHONPATH=archive)
    assert code == 2, said
    assert "target 'older' of older 1.2 (older:TARGET) cannot be used" in said


def test_whether_anything_may_be_offered_is_told_without_the_metadata_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in ("absent", "plain")])
    (install(tmp_path / "plain", "other", "[console_scripts]\nparcompile = other:main", "") / "a.egg-info").touch()
    may_offer = entry_points._may_offer.__wrapped__
    assert not may_offer()
    for name in ("with rules", "unreadable"):
        folder = install(tmp_path / name, "acme", "[parcompile.rules]\nhouse = acme:RULES", "")
        if name == "unreadable":
            points = folder / "acme-1.2.dist-info" / "entry_points.txt"
            points.unlink()
            points.mkdir()
        with monkeypatch.context() as inner:
            inner.syspath_prepend(folder)
            assert may_offer()
    (tmp_path / "a.zip").touch()
    with monkeypatch.context() as inner:
        inner.syspath_prepend(tmp_path / "a.zip")
        assert may_offer()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, SimpleNamespace(find_distributions=None, find_spec=None)])
    assert may_offer()


def test_a_rule_finds_is_explained_and_can_be_ignored(run: Any) -> None:
    assert run("check", "spec.json")[0] == 0
    code, said = run("check", "spec.json", spec=with_seed(0))
    assert code == 1
    assert "error[ACME001]: seed 0 is nobody's choice" in said
    assert run("check", "spec.json", "--ignore", "ACME", spec=with_seed(0))[0] == 0
    # A is the letter of other codes: it does not stand for ACME.
    assert run("check", "spec.json", "--ignore", "A", spec=with_seed(0))[0] == 1
    assert run("explain", "ACME001")[1].startswith("ACME001 (error): runs of this organisation")
    assert "ACME: rules of acme 1.2 ACME001 error runs of this" in run("explain")[1]


def test_a_rule_that_fails_is_an_error_that_names_its_distribution(run: Any) -> None:
    code, said = run("check", "spec.json", spec=with_seed(13))
    assert code == 1
    assert (
        "error[ACME002]: the rules 'house' of acme 1.2 (acme:RULES) failed: ZeroDivisionError: division by zero" in said
    )
    assert run("check", "spec.json", spec=with_seed(13), PARCOMPILE_PLUGINS="0")[0] == 0


def test_a_target_writes_into_a_folder_of_its_own_and_is_compared_like_others(run: Any, tmp_path: Path) -> None:
    code, said = run("spec.json", "-o", "plan", "-t", "acme", "-t", "deepspeed")
    assert code == 0
    assert "acme: ZeRO: acme has none (plain data parallelism is used)" in said
    assert json.loads((tmp_path / "plan/acme/run.json").read_text()) == {"ranks": 8}
    assert json.loads((tmp_path / "plan/parcompile.lock.json").read_text())["backends"]["acme"] == "3"
    assert run("spec.json", "-o", "plan", "--check")[0] == 0
    code, said = run("spec.json", "-o", "plan", "--check", PARCOMPILE_PLUGINS="0")
    assert code == 2
    assert "there is no target 'acme'" in said


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gone", "[E001] the target 'gone' of acme 1.2 (acme.nowhere:TARGET) cannot be loaded: ModuleNotFoundError"),
        ("outside", "it wants to write '../ds_config.json': its files have to stand in outside/"),
    ],
)
def test_a_target_that_cannot_be_used_is_refused_when_it_is_named(
    run: Any, tmp_path: Path, name: str, why: str
) -> None:
    code, said = run("spec.json", "-o", "plan", "-t", name)
    assert code == 2
    assert why in said
    assert not (tmp_path / "plan").exists()


def test_an_importer_reads_files_that_it_recognises(run: Any, tmp_path: Path) -> None:
    file = {"acme_version": 1, "cards": 8, "length": 4096, "preset": "llama-3-8b", "colour": "red"}
    (tmp_path / "run.yaml").write_text(json.dumps(file))
    code, said = run("import", "run.yaml", "--accelerator", "h200", "-o", "made.json")
    assert code == 0
    assert "colour: not known to this importer of ACME" in said
    assert json.loads((tmp_path / "made.json").read_text())["cluster"]["gpus_per_node"] == 8
    assert run("import", "run.yaml", "--kind", "nobody")[0] == 2


def test_a_family_gives_a_model_type_its_parameters(run: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = {"model_type": "acme_llama", **sizes, "vocab_size": 256, "max_position_embeddings": 4096}
    assert (
        "error[X004]: parcompile.runtime does not inject" in run("check", "spec.json", spec={**SPEC, "model": model})[1]
    )
    code, said = run("spec.json", "-o", "plan", "--target", "torchtitan", spec={**SPEC, "model": model})
    assert code == 0, said
    assert "warning[X004]: parcompile.runtime does not inject acme_llama: it comes from a plug-in" in said
    assert "input_layernorm.bias" in (tmp_path / "plan/plan.json").read_text()
    for name, why in (
        ("acme_indexed", "it sets query_gate: a plug-in's family has attention, MLPs and experts only"),
        ("acme_old", "it has no table: names, shapes and biases of parameters stand in its table"),
        ("acme_beside", "it sets beside, beside_mlp or norm_after of its experts"),
    ):
        code, said = run("check", "spec.json", spec={**SPEC, "model": {**model, "model_type": name}})
        assert code == 1
        assert f"cannot be used: {why}" in said
    code, said = run("check", "spec.json", spec={**SPEC, "model": {**model, "model_type": "acme_broken"}})
    assert code == 1
    assert "error[E001]: the family 'acme_broken' of acme 1.2 (acme.nowhere:FAMILY) cannot be loaded" in said
    (tmp_path / "site" / "older.py").write_text("from parcompile.plugins import Family\nFAMILY = Family(qkv_bias=True)")
    code, said = run("check", "spec.json", spec={**SPEC, "model": {**model, "model_type": "acme_older"}})
    assert code == 1
    assert "unexpected keyword argument 'qkv_bias': names, shapes and biases of parameters stand in its table" in said


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("RULES = 1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("RULES = 7", "has to be a list of parcompile.plugins.Rule"),
        (CODE.replace("ACME001", "T001"), "the code 'T001' has to be two to eight capital letters and three digits"),
        (CODE.replace("ACME002", "ACME001"), "two rules are called ACME001"),
    ],
)
def test_rules_that_cannot_be_used_fail_the_check(tmp_path: Path, run: Any, code: str, why: str) -> None:
    install(tmp_path / "site", "other", "[parcompile.rules]\nothers = other:RULES\n", code)
    exit_code, said = run("check", "spec.json")
    assert exit_code == 1
    assert said.count("[E001]") == 1
    assert f"error[E001]: the rules 'others' of other 1.2 (other:RULES) {'cannot' if 'cannot' in why else ''}" in said
    assert why in said


BAD = """
import os, sys, time
from parcompile.plugins import Finding, rule

print("printed at import")


class Rude(Exception):
    def __str__(self):
        raise RuntimeError


def exits(spec):
    print("printed by a rule", flush=True)
    os.write(1, b"written by a rule")
    os._exit(0)
    yield


def raises(spec):
    raise Rude
    yield


def leaves(spec):
    sys.exit(3)
    yield


def endless(spec):
    while True:
        yield Finding("again", ())


def junk(spec):
    yield "no finding"


def bad_path(spec):
    yield Finding("message", ("training", object()))


def late(spec):
    while True:
        time.sleep(1)
    yield


def sound(spec):
    yield Finding("a nul \\0 and a place that is not there", ("nowhere", 7, "\\0"))


CHECKS = (exits, raises, leaves, endless, junk, bad_path, late, sound)
RULES = [
    rule(f"BAD00{number}", "bad", "bad", wrong={}, right={})(check) for number, check in enumerate(CHECKS)
]
"""


def checked_as_json(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "parcompile", "check", "--format", "json", "spec.json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_nothing_that_a_rule_does_ends_a_check_or_reaches_its_output(tmp_path: Path) -> None:
    site = install(tmp_path / "site", "bad", "[parcompile.rules]\nbad = bad:RULES\n", BAD)
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    done = checked_as_json(tmp_path, site)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    found = {one["code"]: one["message"] for one in json.loads(done.stdout)["diagnostics"] if one["code"][:3] == "BAD"}
    ends = ("it ended its process", "cannot be shown", "SystemExit: 3", "than 1,000 findings", "yielded str", "yielded")
    assert all(why in found[f"BAD00{number}"] for number, why in enumerate(ends))
    assert all("the rules 'bad' of bad 1.2 (bad:RULES) failed: " in found[f"BAD00{number}"] for number in range(7))
    assert "longer than 10 s" in found["BAD006"]
    assert "a place that is not there" in found["BAD007"]


MODULE = """
import os
from parcompile.plugins import Family, Importer, Loss, Refusal, Target, table_like

os.write(1, b"written at import")
print("printed at import", flush=True)
cycle = {}
cycle["self"] = cycle
FILES = {"nul": {"nul/a\\0": ""}, "cycle": {"cycle/a": cycle}, "nan": {"nan/a": float("nan")}, "no": 7}


def ends(*_):
    os._exit(0)


def turns(*_):
    print("printed by a target", flush=True)
    while True:
        pass


for name, files in FILES.items():
    globals()[name] = Target(name, lambda plan, files=files: files)
exits, loops = Target("exits", ends), Target("loops", lambda plan: {}, turns)
junk = Target("junk", lambda plan: {}, lambda plan: [7])
greedy = Target("greedy", lambda plan: {"greedy/a": str(len(bytearray(1 << 33)))})
prints = Target("prints", lambda plan: print("printed by a target") or {"prints/a": "b"})
importer = Importer("X", dict, dict, lambda source, draft: ends(), lambda plan: {}, recognises=lambda tree: "x" in tree)
family = Family(table=table_like("llama"), refusals=(Refusal("x", ends, "no"),))
wrong = Family(table=table_like("llama"), refusals=7)
"""
DRIVER = """
import json, sys
from parcompile import entry_points
from parcompile.cli import run

entry_points.IMPORT_SECONDS, entry_points.SECONDS = 2, 0.5
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    print("ended", run(), " ".join(words), file=sys.stderr, flush=True)
"""


def test_nothing_that_a_plug_in_does_ends_a_command_or_reaches_its_output(tmp_path: Path) -> None:
    targets = {
        "nul": "it wants to write",
        "cycle": "Circular reference",
        "nan": "not JSON compliant",
        "no": "'int' object",
        "exits": "it ended its process",
        "loops": "it took longer than 0.5 s",
        "junk": "its losses hold int, not a Loss",
        "greedy": "MemoryError",
        "dies": "cannot be loaded: it ended its process",
        "patches": "its import replaces json.dumps, json.encoder.JSONEncoder.encode, which every",
        "hangs": "cannot be loaded: it took longer than 2 s",
    }
    own = ("dies", "hangs", "patches")
    points = [f"{name} = {name if name in own else f'rude:{name}'}" for name in (*targets, "prints")]
    points += ["[parcompile.importers]", "x = rude:importer", "[parcompile.families]", "f = rude:family"]
    points = ["[parcompile.targets]", *points, "wrong = rude:wrong"]
    site = install(tmp_path / "site", "rude", "\n".join(points), MODULE)
    (site / "dies.py").write_text("import os; os._exit(0)")
    (site / "patches.py").write_text(
        "import json\njson.dumps = lambda *_, **__: 'broken'\njson.JSONEncoder.encode = lambda *_: 'broken'\n"
    )
    (site / "hangs.py").write_text("while True: pass")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = {**sizes, "vocab_size": 256, "max_position_embeddings": 4096}
    for name, spec in (
        ("spec", SPEC),
        ("x", {"x": 1}),
        *((name, {**SPEC, "model": {"model_type": name, **model}}) for name in ("f", "wrong")),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(spec))
    commands = [["spec.json", "-o", "out", "-t", name] for name in targets]
    checks = [["check", "--format", "json", f"{name}.json"] for name in ("f", "wrong", "spec")]
    commands += [["import", "x.json"], *checks, ["check", "--format", "json", "-t", "prints", "spec.json"]]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(commands)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=6000,
        check=False,
    )
    assert "Traceback" not in done.stderr
    parts = re.split(r"ended (\d) (.*)\n", done.stderr)
    said = {words: (int(code), " ".join(text.split())) for text, code, words in zip(*[iter(parts)] * 3, strict=False)}
    for name, why in targets.items():
        code, text = said[f"spec.json -o out -t {name}"]
        assert code == 2
        assert f"Error: [E001] the target {name!r} of rude 1.2" in text
        assert why in text
    assert said["import x.json"][0] == 2
    assert "[E001] the importer 'x' of rude 1.2 (rude:importer) failed: it ended" in said["import x.json"][1]
    assert not (tmp_path / "out").exists()
    # Standard output is the JSON of the four checks and nothing else.
    decoder, rest, found = json.JSONDecoder(), done.stdout, []
    while rest.strip():
        tree, end = decoder.raw_decode(rest.lstrip())
        rest = rest.lstrip()[end:]
        found.append([one for one in tree["diagnostics"] if one["code"] == "E001"])
    assert [len(one) for one in found] == [1, 1, 0, 0]
    assert "the family 'f' of rude 1.2 (rude:family) failed: it ended its process" in found[0][0]["message"]
    assert "the family 'wrong' of rude 1.2 (rude:wrong) failed: TypeError" in found[1][0]["message"]


@pytest.mark.parametrize("rude", ["os._exit(0)", "re.match('(a+)+$', 'a' * 60 + 'b')"])
def test_what_an_import_leaves_running_neither_holds_up_a_command_nor_lifts_its_limits(
    tmp_path: Path, rude: str
) -> None:
    left = f"""
import atexit, os, re, threading
from parcompile.plugins import Severity, rule
from parcompile import entry_points
entry_points.SECONDS = 1
atexit.register(lambda: 1 / 0)
threading.Thread(target=threading.Event().wait).start()
@rule("LEFT001", "title", "why", wrong={{}}, right={{}})
def ends(spec):
    yield {rude}
RULES = [ends]
"""
    site = install(tmp_path / "site", "left", "[parcompile.rules]\nhouse = left:RULES", left)
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    done = checked_as_json(tmp_path, site)
    assert (done.returncode, done.stderr) == (1, "")
    (found,) = [one for one in json.loads(done.stdout)["diagnostics"] if one["severity"] == "error"]
    assert found["code"] == "LEFT001"
    assert "the rules 'house' of left 1.2 (left:RULES) failed: it " in found["message"]


class _Returned:
    """What is rude only when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], tuple(self.call[1:])


@pytest.mark.parametrize("threads", [False, True])
def test_what_a_plug_in_returns_or_how_long_it_takes_ends_nothing(
    threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_points, "MOST_BYTES", 1000)
    monkeypatch.setitem(entry_points._LEFT, "earlier tests", set(threading.enumerate()) - {threading.current_thread()})
    over = threading.Event()
    other = threading.Thread(target=over.wait, daemon=True)
    works: list[Any] = [lambda: _Returned(os._exit, 3), lambda: _Returned(int, "x"), lambda: "x" * 2000, over.wait]
    try:
        if threads:
            other.start()
            works = [over.wait, lambda: 1 / 0]
        found = entry_points.apart([*works, lambda: 7], 2)
    finally:
        over.set()
        if threads:
            other.join()
    whys = [one.why for one in found[:-1]]
    late = "it took longer than 2 s"
    ends = (late, "ZeroDivisionError") if threads else ("it ended its", "ValueError: invalid", "it returned 2,0", late)
    assert all(map(str.startswith, whys, ends))
    assert len(whys) == len(works)
    assert found[-1] == 7
