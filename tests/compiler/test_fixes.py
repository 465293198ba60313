"""Fixes change what they say and nothing else: formatting, comments and the other values stay."""

import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import MIXTRAL, spec_tree

from parcompile import schema
from parcompile.diagnostics import Diagnostic, Edit, Fix, Safety, Severity
from parcompile.pipeline import check_read
from parcompile.text import Document, parse, read_file
from parcompile.text.fixes import EditError, apply_edit, apply_fixes, save


def document(text: str, format: str) -> Document:  # noqa: A002
    found = parse(text, f"spec.{format}").document
    assert found is not None
    return found


SPREAD = '{\n  "a": {\n    "x": "8",\n    "y": 2\n  },\n  "b": [1, 2, 3],\n  "c": {}\n}\n'
TIGHT = '{"a":{"x":"8","y":2},"b":[1,2,3],"c":{}}'
BLOCK = "# top\na:  # why\n  x: '8'  # text\n  # about y\n  y: 2\nb: [1, 2, 3]\nc: {}\nd:\n  - one\n  - two\ne:\n"

EDITS = [
    ("json", SPREAD, Edit(("a", "x"), 8), SPREAD.replace('"8"', "8")),
    ("json", SPREAD, Edit(("a", "y"), remove=True), SPREAD.replace(',\n    "y": 2', "")),
    ("json", SPREAD, Edit(("a", "x"), remove=True), SPREAD.replace('"x": "8",\n    ', "")),
    ("json", SPREAD, Edit(("a", "z"), True), SPREAD.replace('"y": 2', '"y": 2,\n    "z": true')),
    ("json", SPREAD, Edit(("c", "z"), 1.5), SPREAD.replace("{}", '{"z": 1.5}')),
    ("json", SPREAD, Edit(("b", 1), remove=True), SPREAD.replace("[1, 2, 3]", "[1, 3]")),
    ("json", SPREAD, Edit(("b", 3), 4), SPREAD.replace("3]", "3, 4]")),
    ("json", SPREAD, Edit(("a", "y"), rename_to="w"), SPREAD.replace('"y"', '"w"')),
    ("json", SPREAD, Edit(("n", "m"), "é"), SPREAD.replace('"c": {}', '"c": {},\n  "n": {"m": "é"}')),
    ("json", TIGHT, Edit(("a", "x"), remove=True), TIGHT.replace('"x":"8",', "")),
    ("json", TIGHT, Edit(("a", "z"), None), TIGHT.replace('"y":2', '"y":2, "z": null')),
    ("json", TIGHT, Edit(("c",), [1]), TIGHT.replace('"c":{}', '"c":[1]')),
    (
        "json",
        SPREAD.replace("\n", "\r\n"),
        Edit(("a", "z"), 1),
        SPREAD.replace('"y": 2', '"y": 2,\n    "z": 1').replace("\n", "\r\n"),
    ),
    ("yaml", BLOCK, Edit(("a", "x"), 8), BLOCK.replace("'8'", "8")),
    ("yaml", BLOCK, Edit(("a", "x"), "bf16"), BLOCK.replace("'8'", "'bf16'")),
    ("yaml", BLOCK, Edit(("a", "y"), "bf16"), BLOCK.replace("y: 2", "y: bf16")),
    ("yaml", BLOCK, Edit(("a", "y"), "8"), BLOCK.replace("y: 2", 'y: "8"')),
    ("yaml", BLOCK, Edit(("a", "y"), "yes"), BLOCK.replace("y: 2", 'y: "yes"')),
    ("yaml", BLOCK, Edit(("a", "y"), 3e-4), BLOCK.replace("y: 2", "y: 0.0003")),
    ("yaml", BLOCK, Edit(("a", "y"), remove=True), BLOCK.replace("  y: 2\n", "")),
    ("yaml", BLOCK, Edit(("a", "x"), remove=True), BLOCK.replace("  x: '8'  # text\n", "")),
    ("yaml", BLOCK, Edit(("a", "x"), rename_to="w"), BLOCK.replace("x:", "w:")),
    ("yaml", BLOCK, Edit(("a", "z"), [1, "b"]), BLOCK.replace("y: 2", "y: 2\n  z: [1, b]")),
    ("yaml", BLOCK, Edit(("f",), 1), BLOCK + "f: 1\n"),
    ("yaml", BLOCK, Edit(("e",), 1), BLOCK.replace("e:\n", "e: 1\n")),
    ("yaml", BLOCK, Edit(("e", "g"), 1), BLOCK.replace("e:\n", "e: {g: 1}\n")),
    ("yaml", BLOCK, Edit(("d", 0), remove=True), BLOCK.replace("  - one\n", "")),
    ("yaml", BLOCK, Edit(("d", 1), remove=True), BLOCK.replace("  - two\n", "")),
    ("yaml", BLOCK, Edit(("d", 2), "three"), BLOCK.replace("two", "two\n  - three")),
    ("yaml", BLOCK, Edit(("d",), 5), BLOCK.replace("d:\n  - one\n  - two", "d: 5")),
    ("yaml", BLOCK, Edit(("c", "z"), 1), BLOCK.replace("{}", "{z: 1}")),
    ("yaml", "a: 1\nb: 2", Edit(("b",), remove=True), "a: 1"),
    ("yaml", "a:\n  b: 1\nc: 2\n", Edit(("a", "b"), remove=True), "a: {}\nc: 2\n"),
    ("yaml", "a: |\n  text\nb: 1\n", Edit(("a",), "x"), "a: x\nb: 1\n"),
    ("yaml", "- a: 1\n  b: 2\n- c\n", Edit((0, "a"), remove=True), "- b: 2\n- c\n"),
]


@pytest.mark.parametrize(("format", "text", "edit", "expected"), EDITS)
def test_an_edit_changes_nothing_else(format: str, text: str, edit: Edit, expected: str):  # noqa: A002
    assert apply_edit(document(text, format), edit).text == expected


@pytest.mark.parametrize(
    ("text", "edit"),
    [
        ("a: &x {b: 1}\nc: *x\n", Edit(("c", "b"), 2)),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", Edit(("c", "b"), 2)),
        ("a: 1\n", Edit(("a", "b"), 2)),
        ("a: 1\n", Edit(("b",), remove=True)),
        ("a: 1\nb: 2\n", Edit(("a",), rename_to="b")),
        ("a: 1\n", Edit((), remove=True)),
        ("a: [1]\n", Edit(("a", 3), 2)),
    ],
)
def test_what_cannot_be_changed_alone_is_refused(text: str, edit: Edit):
    with pytest.raises(EditError):
        apply_edit(document(text, "yaml"), edit)


KEYS = st.sampled_from(["a", "b", "tp", "on", "x y", "1"])
VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 8, 0.5, "bf16", "8", "yes", "a: b", "#", "é\n", [], [1, "x"], {}, {"k": [None]}]
)
TREES: st.SearchStrategy[Any] = st.dictionaries(
    KEYS,
    st.recursive(
        VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
    ),
    max_size=4,
)


def all_paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else []
    return [path, *(found for key, value in entries for found in all_paths(value, (*path, key)))]


@st.composite
def edits(draw: st.DrawFn) -> tuple[Any, Edit]:
    tree = draw(TREES)
    path = draw(st.sampled_from(all_paths(tree)))
    kind = draw(st.sampled_from(["set", "add", "remove", "rename"]))
    if kind == "add":
        return tree, Edit((*path, draw(KEYS)), draw(VALUES))
    if kind == "remove":
        return tree, Edit(path, remove=True)
    return tree, Edit(path, rename_to="new") if kind == "rename" else Edit(path, draw(VALUES))


def as_yaml(tree: Any, style: bool | None) -> str:
    import yaml

    return str(yaml.safe_dump(tree, default_flow_style=style, allow_unicode=True))


@settings(max_examples=400, deadline=None)
@given(edits(), st.sampled_from(["json", "json2", "block", "mixed"]))
def test_an_edit_means_the_same_in_every_format_or_is_refused(case: tuple[Any, Edit], style: str):
    tree, edit = case
    if style.startswith("json"):
        found = document(json.dumps(tree, indent=2 if style == "json2" else None), "json")
    else:
        found = document(as_yaml(tree, False if style == "block" else None), "yaml")
    before = copy.deepcopy(found.tree)
    try:
        changed = apply_edit(found, edit)
    except EditError:
        return
    assert found.tree == before
    node: Any = changed.tree
    if not edit.remove and edit.rename_to is None:
        assert changed.get(edit.path, "nothing") == edit.value
    elif edit.rename_to is not None:
        assert changed.get((*edit.path[:-1], "new"), "nothing") == found.get(edit.path)
    elif isinstance(edit.path[-1], str):
        assert changed.get(edit.path, "nothing") == "nothing"
    assert isinstance(node, (dict, type(edit.value)))


def finding(path: tuple[str | int, ...], *fixes: Fix) -> Diagnostic:
    return Diagnostic("X001", Severity.ERROR, "x", path, fixes=fixes)


def test_only_safe_fixes_are_applied_unless_asked():
    spec = document(SPREAD, "json")
    safe = finding(("a", "x"), Fix("8", Safety.SAFE, (Edit(("a", "x"), 8),)))
    risky = finding(("a", "y"), Fix("3", Safety.CHANGES_NUMERICS, (Edit(("a", "y"), 3),)))
    fixed = apply_fixes(spec, [safe, risky])
    assert (fixed.applied, fixed.skipped) == ((safe,), ())
    assert fixed.document.tree == {"a": {"x": 8, "y": 2}, "b": [1, 2, 3], "c": {}}
    assert apply_fixes(spec, [safe, risky], unsafe=True).document.get(("a", "y")) == 3


def test_fixes_that_touch_the_same_value_wait_for_the_next_round():
    spec = document(SPREAD, "json")
    first = finding(("a",), Fix("drop", Safety.SAFE, (Edit(("a",), remove=True),)))
    second = finding(("a", "x"), Fix("8", Safety.SAFE, (Edit(("a", "x"), 8),)))
    fixed = apply_fixes(spec, [first, second])
    assert (fixed.applied, fixed.skipped) == ((first,), (second,))


def test_every_fix_of_the_schema_removes_its_diagnostic():
    text = """\
version: "1"  # first
model:
  preset: llama-3-8b
cluster: {gpus_per_node: '8', accelerator: H100_SXM}
parallelism:
  tensor_parallel_size: 2   # from Megatron
  sequence_paralel: yes
training:
  seq_length: 8192
  precision: bfloat16
  optimizer: {type: AdamW}
"""
    found = document(text, "yaml")
    for _ in range(3):
        fixed = apply_fixes(found, schema.validate(found, "spec").diagnostics, unsafe=True)
        assert not fixed.skipped
        found = fixed.document
    assert schema.validate(found, "spec").diagnostics == ()
    assert (
        found.text
        == """\
version: 1  # first
model:
  preset: llama-3-8b
cluster: {gpus_per_node: 8, accelerator: h100-sxm}
parallelism:
  tp: 2   # from Megatron
  sequence_parallel: true
training:
  sequence_length: 8192
  precision: bf16
  optimizer: {type: adamw}
"""
    )


def misspelt(section: dict[str, Any]) -> Any:
    """What is wrong with a spec that has these sizes in a misspelt section, which has the wrong tp 3 beside."""
    tree = {**spec_tree(), "paralellism": {"tp": 3, **section}}
    del tree["parallelism"]
    text = json.dumps(tree)
    return check_read(parse(text, "spec.json"), Path())


def test_a_misspelt_section_is_renamed_where_its_keys_tell_which_it_is():
    checked = misspelt({})
    (key,) = [one for one in checked.diagnostics if one.code == "K001"]
    fixed = apply_fixes(checked.document, [key])
    assert fixed.document.text == checked.document.text.replace("paralellism", "parallelism")
    # What is wrong inside of it stays wrong, and is no reason against the fix.
    again = check_read(parse(fixed.document.text, "spec.json"), Path())
    inside = [one for one in checked.diagnostics if one.is_error and one.code != "K001"]
    assert [one.code for one in inside] == [one.code for one in again.diagnostics if one.is_error]
    assert {one.code for one in inside} >= {"T001", "W001"}


def test_a_misspelt_section_of_unknown_keys_is_only_guessed_at():
    (key, *_) = [one for one in misspelt({"rows": 1, "columns": 2}).diagnostics if one.code == "K001"]
    assert key.help == 'did you mean "parallelism"?'
    assert all(fix.safety is not Safety.SAFE for fix in key.fixes)


def test_a_file_is_saved_whole_with_its_mark_and_permissions(tmp_path: Path):
    file = tmp_path / "spec.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": "8"}\r\n')
    file.chmod(0o640)
    found = read_file(file).document
    assert found is not None
    save(apply_edit(found, Edit(("a",), 8)), found)
    assert file.read_bytes() == b'\xef\xbb\xbf{"a": 8}\r\n'
    assert file.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.json"]


def test_what_an_editor_appends_while_a_fix_is_saved_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between the comparison and the rename, and through a handle that was opened before both."""
    file = tmp_path / "spec.yaml"
    file.write_text("a: '8'\n")
    found = read_file(file).document
    assert found is not None
    changed = apply_edit(found, Edit(("a",), 8))
    flushed = os.fsync

    def appended(handle: int) -> None:
        flushed(handle)
        with file.open("a") as stream:
            stream.write("# appended\n")

    monkeypatch.setattr(os, "fsync", appended)
    with pytest.raises(OSError, match="changed while it was checked"):
        save(changed, found)
    monkeypatch.undo()
    assert file.read_text() == "a: '8'\n# appended\n"
    file.write_text("a: '8'\n")
    editor = subprocess.Popen(
        [sys.executable, "-c", EDITOR, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert editor.stdin is not None
    assert editor.stdout is not None
    editor.stdout.readline()
    threading.Timer(0.3, lambda: editor.communicate("\n")).start()
    with pytest.raises(OSError, match="changed while it was checked"):
        save(changed, found)
    editor.wait(60)
    assert file.read_text() == "a: '8'\n# late\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.yaml"]


EDITOR = """
import sys
with open(sys.argv[1], "a") as stream:
    print(flush=True)
    sys.stdin.readline()
    stream.write("# late\\n")
"""


def test_what_an_editor_wrote_meanwhile_is_not_lost_and_a_read_only_file_stays(tmp_path: Path):
    file = tmp_path / "spec.yaml"
    file.write_text("a: '8'\n")
    found = read_file(file).document
    assert found is not None
    changed = apply_edit(found, Edit(("a",), 8))
    file.write_text("a: '8'\n# appended\n")
    with pytest.raises(OSError, match="changed while it was checked"):
        save(changed, found)
    assert file.read_text() == "a: '8'\n# appended\n"
    file.write_text("a: '8'\n")
    file.chmod(0o444)
    with pytest.raises(OSError, match="read-only"):
        save(changed, found)
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("a: '8'\n", 0o444)


def test_taking_back_a_balancing_loss_leaves_the_other_losses_of_routers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MIXTRAL, "output_router_logits": True}), encoding="utf-8")
    router = {"aux_loss": 0.01, "aux_loss_scope": "sequence", "z_loss": 0.001}
    read = parse(
        json.dumps(spec_tree(model={"hf_config": "config.json"}, training={"router": router})), "spec.json", "json"
    )
    (refused,) = (one for one in check_read(read, tmp_path).diagnostics if one.code == "M006")
    assert read.document is not None
    fixed = apply_fixes(read.document, [refused], unsafe=True)
    assert fixed.document.get(("training", "router")) == {"z_loss": 0.001}
