"""Every spec of tests/specs gives the findings that stand beside it, in their places: nothing more, nothing less."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
from spec_cases import Case, cases

from parcompile.diagnostics import Severity
from parcompile.lint.registry import FILE_CODES
from parcompile.pipeline import Checked, check_file, check_read, compile_file
from parcompile.plan import plan_from_tree, plan_tree
from parcompile.rules import all_rules
from parcompile.text import Result
from parcompile.text.fixes import apply_edit

pytestmark = pytest.mark.usefixtures("one_search_for_a_spec")

NEGATIVE, POSITIVE = list(cases("negative")), list(cases("positive"))


def found(checked: Checked) -> list[tuple[str, int, int]]:
    return [(one.code, one.position.line, one.position.column) for one in checked.diagnostics if one.position]


@pytest.mark.parametrize("case", NEGATIVE, ids=lambda case: case.id)
def test_negative_gives_exactly_its_findings(case: Case) -> None:
    checked = check_file(case.file, case.targets)
    assert found(checked) == case.expected
    assert not checked.valid
    assert case.code in {one.code for one in checked.diagnostics if one.is_error}


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.id)
def test_positive_compiles_with_exactly_its_remarks(case: Case) -> None:
    plan, checked = compile_file(case.file, case.targets)
    assert found(checked) == case.expected
    assert plan is not None
    assert plan_from_tree(plan_tree(plan)).plan_hash == plan.plan_hash


def test_every_error_rule_has_three_negatives() -> None:
    errors = {rule.code for rule in all_rules() if rule.severity is Severity.ERROR}
    # K009 (a key that needs another) has no place in this schema.
    wanted = errors | ({code for code in FILE_CODES if code[0] == "K"} - {"K009"})
    counts = Counter(code for case in NEGATIVE for code in {code for code, _, _ in case.expected})
    assert {code for code in wanted if counts[code] < 3} == set()


@pytest.mark.parametrize(
    "case", [case for case in NEGATIVE if case.file.suffix in (".json", ".yaml")], ids=lambda case: case.id
)
def test_every_fix_removes_its_finding_and_adds_no_error(case: Case) -> None:
    checked = check_file(case.file, case.targets)
    if checked.document is None:
        return
    errors = Counter((one.code, one.path) for one in checked.diagnostics if one.is_error)
    for one in checked.diagnostics:
        for fix in one.fixes:
            document = checked.document
            for edit in fix.edits:
                document = apply_edit(document, edit)
            after = check_read(Result(document.source, document), case.file.parent, case.targets).diagnostics
            assert (one.code, one.path) not in {(other.code, other.path) for other in after}, fix.title
            added = Counter((other.code, other.path) for other in after if other.is_error) - errors
            assert not added, fix.title


def test_fixes_are_offered_for_most_errors() -> None:
    fixable = {one.code for case in NEGATIVE for one in check_file(case.file, case.targets).diagnostics if one.fixes}
    errors = {rule.code for rule in all_rules() if rule.severity is Severity.ERROR}
    assert errors <= fixable


def test_a_conflict_shows_both_places() -> None:
    checked = check_file(next(case.file for case in NEGATIVE if case.id == "B002-steps-too-few.json"))
    conflict = next(one for one in checked.diagnostics if one.code == "B002")
    named = {(related.path[-1], related.position is not None) for related in conflict.related}
    assert named == {("micro_batch_size", True), ("gradient_accumulation_steps", True)}


def test_yaml_and_json_give_the_same_findings(tmp_path) -> None:
    case = next(case for case in NEGATIVE if case.id == "T001-25-heads-on-2.json")
    # JSON is YAML: the same text under another name is read by the other parser.
    twin = tmp_path / "spec.yaml"
    shutil.copy(case.file, twin)
    assert found(check_file(twin)) == case.expected
