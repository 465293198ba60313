"""`parcompile check`, `explain` and `schema`, as users and machines meet them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from rules_page import reference

from parcompile import schema
from parcompile.backends.registry import TARGETS
from parcompile.cli import _OF_CHECKPOINT, main
from parcompile.cli.checkpoint import command as checkpoint
from parcompile.diagnostics.reporters import FORMATS
from parcompile.lint.registry import GROUPS, pages

pytestmark = pytest.mark.usefixtures("one_search_for_a_spec")

DOCS = Path(__file__).parents[2] / "docs" / "rules.md"

GOOD = """{
  "version": 1,
  "model": {"preset": "llama-3-8b"},
  "cluster": {"gpus_per_node": 8, "accelerator": "h200"},
  "parallelism": {"tp": 2, "dp": 4},
  "training": {"sequence_length": 8192, "global_batch_size": 64,
    "micro_batch_size": 1, "gradient_accumulation_steps": 16}
}
"""
BAD = GOOD.replace('"tp": 2', '"tp": "2"').replace('"global_batch_size": 64,', '"global_batch_size": 100,')
WARNED = GOOD.replace('"tp": 2, "dp": 4', '"cp": 2, "dp": 4, "cp_layout": "contiguous"')


NEEDS_SEQUENCE_PARALLEL = GOOD.replace("llama-3-8b", "mixtral-8x7b").replace('"tp": 2', '"tp": 2, "ep": 2')
"""Megatron-LM refuses experts under tensor parallelism without sequence parallelism; DeepSpeed does not."""


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs the command line in this process, in a folder with a good, a bad and a warned-of spec."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"good.json": GOOD, "bad.json": BAD, "warned.json": WARNED}.items():
        Path(name).write_text(text, encoding="utf-8")

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["parcompile", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return Outcome(int(stopped.value.code or 0), captured.out, captured.err)

    return call


class TestExitCodes:
    def test_a_good_spec_is_0(self, run: Any) -> None:
        done = run("check", "good.json")
        assert (done.code, done.err) == (0, "")
        assert "1 file checked: no errors, no remarks" in done.out

    @pytest.mark.parametrize("command", ["import", "check"])
    def test_a_broken_yaml_file_is_refused_with_its_line(self, run: Any, command: str) -> None:
        Path("broken.yaml").write_text("micro_batch_size: 2\nsequence_len: [4\n", encoding="utf-8")
        done = run(command, "broken.yaml")
        assert done.code != 0
        assert "broken.yaml cannot be read: line 2, column 17: " in done.err

    def test_errors_are_1(self, run: Any) -> None:
        done = run("check", "good.json", "bad.json")
        assert done.code == 1
        assert "bad.json:5:25" in done.out

    @pytest.mark.parametrize("arguments", [(), ("no.json",), ("no*.json",), ("good.json", "--select", "Q999"), (".",)])
    def test_usage_and_unreadable_files_are_2(self, run: Any, arguments: tuple[str, ...]) -> None:
        assert run("check", *arguments).code == 2

    def test_an_unreadable_file_does_not_hide_the_others(self, run: Any) -> None:
        done = run("check", "no.json", "bad.json", "--format", "json")
        assert done.code == 2
        assert done.json["error_count"] == 2
        assert "no.json" in done.err

    def test_warnings_fail_only_when_asked(self, run: Any) -> None:
        assert run("check", "warned.json").code == 0
        done = run("check", "warned.json", "--warnings-as-errors", "--format", "json")
        assert done.code == 1
        assert done.json["valid"] is False
        assert [one["severity"] for one in done.json["diagnostics"] if one["code"] == "C004"] == ["error"]


@pytest.mark.parametrize("arguments", [("export", "out"), ("verify", "--help"), ("convert",), ("inspect",)])
def test_a_word_that_checkpoints_know_is_led_to_them(run: Any, arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert done.err.endswith(f"did you mean `parcompile checkpoint {arguments[0]}`?\n")
    assert set(_OF_CHECKPOINT) | {"import"} == set(checkpoint.commands)


class TestSelection:
    def test_ignored_codes_do_not_count(self, run: Any) -> None:
        assert run("check", "bad.json", "--ignore", "K003,B").code == 0

    def test_only_selected_codes_count(self, run: Any) -> None:
        done = run("check", "bad.json", "--select", "K003", "--format", "json")
        assert {one["code"] for one in done.json["diagnostics"]} == {"K003"}

    def test_an_unknown_code_is_named_with_the_nearest(self, run: Any) -> None:
        assert "did you mean B002?" in run("check", "good.json", "--ignore", "B0O2").err


class TestFormats:
    def test_json_is_the_whole_output_and_as_documented(self, run: Any) -> None:
        done = run("check", "bad.json", "--format", "json")
        assert set(done.json) == {"valid", "error_count", "warning_count", "files", "diagnostics"}
        keys = {"code", "severity", "message", "file", "line", "column", "end_line", "end_column"}
        keys |= {"path", "help", "related", "fixes"}
        assert all(set(one) == keys for one in done.json["diagnostics"])
        (wrong,) = [one for one in done.json["diagnostics"] if one["code"] == "K003"]
        assert (wrong["file"], wrong["line"], wrong["column"], wrong["path"]) == ("bad.json", 5, 25, "parallelism.tp")
        assert (wrong["end_line"], wrong["end_column"]) == (5, 28)

    def test_formats_for_programs_say_that_a_file_could_not_be_read(self, run: Any) -> None:
        Path("cut.json").write_text('{"version": 1, "mod', encoding="utf-8")
        done = run("check", "good.json", "cut.json", "--format", "json")
        assert done.code == 2
        assert done.json["valid"] is False
        assert [one[:24] for one in done.json["unreadable"]] == ["cut.json cannot be read:"]
        (log,) = run("check", "good.json", "cut.json", "--format", "sarif").json["runs"]
        assert log["invocations"][0]["executionSuccessful"] is False
        assert 'errors="1"' in run("check", "good.json", "cut.json", "--format", "junit").out
        assert run("check", "good.json", "--format", "json").json["valid"] is True

    @pytest.mark.parametrize("format_", FORMATS)
    def test_every_format_names_the_code(self, run: Any, format_: str) -> None:
        done = run("check", "bad.json", "good.json", "--format", format_)
        assert done.code == 1
        assert "K003" in done.out

    def test_sarif_carries_titles(self, run: Any) -> None:
        log = run("check", "bad.json", "--format", "sarif").json
        rules = {rule["id"]: rule["shortDescription"]["text"] for rule in log["runs"][0]["tool"]["driver"]["rules"]}
        assert rules["K003"] == pages()["K003"].title

    def test_patterns_match_in_all_folders_and_each_file_once(self, run: Any) -> None:
        Path("a/b").mkdir(parents=True)
        Path("a/b/deep.json").write_text(BAD, encoding="utf-8")
        done = run("check", "**/*.json", "bad.json", "--format", "json", "--select", "K003")
        assert [one["file"] for one in done.json["diagnostics"]] == ["a/b/deep.json", "bad.json"]

    def test_a_text_of_standard_input_that_is_cut_off_says_where(self) -> None:
        command = [sys.executable, "-m", "parcompile", "check", "-"]
        done = subprocess.run(command, input='{"version": 1', capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("Error: - cannot be read: line 1, column 14: the file ends inside the object")

    def test_standard_input_is_a_file(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        command = [sys.executable, "-m", "parcompile", "check", "-", "--format", "concise"]
        done = subprocess.run(command, input=BAD, capture_output=True, text=True, check=False, encoding="utf-8")
        assert done.returncode == 1
        assert "<stdin>:5:25: error[K003]" in done.stdout


class TestValues:
    def test_every_value_tells_where_it_comes_from(self, run: Any) -> None:
        values = run("check", "good.json", "--show-values", "--format", "json").json["values"]["good.json"]
        assert values["parallelism.tp"] == {"value": 2, "origin": "spec", "detail": "", "line": 5}
        assert values["parallelism.cp"]["origin"] == "default"
        assert values["model.hidden_size"] == {
            "value": 4096,
            "origin": "preset",
            "detail": "llama-3-8b",
            "line": None,
        }
        derived = values["parallelism.dp"]
        assert (derived["origin"], derived["value"]) == ("spec", 4)

    def test_text_shows_lines_and_equations(self, run: Any) -> None:
        Path("auto.json").write_text(GOOD.replace('"dp": 4', '"dp": "auto"'), encoding="utf-8")
        out = run("check", "auto.json", "--show-values").out
        assert "derived: world 8 / (tp 2 · cp 1 · pp 1)" in out
        assert "line 5" in out

    def test_other_formats_refuse_it(self, run: Any) -> None:
        assert run("check", "good.json", "--show-values", "--format", "sarif").code == 2


class TestFix:
    def test_safe_fixes_keep_the_formatting(self, run: Any) -> None:
        text = GOOD.replace('"tp": 2', '"tensor_model_parallel_size":    2').replace('node": 8', 'node": "8"')
        Path("fix.json").write_text(text, encoding="utf-8")
        done = run("check", "fix.json", "--fix")
        assert done.code == 0
        assert "2 fixed" in done.out
        assert Path("fix.json").read_text(encoding="utf-8") == GOOD.replace('"tp": 2', '"tp":    2')

    def test_unsafe_fixes_wait_to_be_asked_for(self, run: Any) -> None:
        Path("fix.json").write_text(GOOD.replace("16}", "4}"), encoding="utf-8")
        assert run("check", "fix.json", "--fix").code == 1
        assert run("check", "fix.json", "--unsafe-fixes").code == 0
        assert Path("fix.json").read_text(encoding="utf-8") == GOOD

    def test_standard_input_is_not_written(self, run: Any) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "parcompile", "check", "-", "--fix"],
            input=BAD,
            capture_output=True,
            text=True,
            check=False,
            encoding="utf-8",
        )
        assert done.returncode == 1


class TestExplain:
    @pytest.mark.parametrize("code", sorted(pages()))
    def test_every_code_has_a_page(self, run: Any, code: str) -> None:
        done = run("explain", code.lower())
        assert done.code == 0
        assert done.out.startswith(f"{code} (")
        assert max(map(len, done.out.splitlines())) <= 120

    def test_without_a_code_all_are_listed(self, run: Any) -> None:
        out = run("explain").out
        assert all(code in out for code in pages())

    def test_an_unknown_code_is_a_usage_error(self, run: Any) -> None:
        done = run("explain", "T999")
        assert done.code == 2
        assert "there is no code T999; `parcompile explain` lists all" in done.err

    @pytest.mark.parametrize("arguments", [("explain",), ("check", "good.json", "--ignore")])
    def test_a_code_without_its_zeros_is_answered_with_the_whole_one(
        self, run: Any, arguments: tuple[str, ...]
    ) -> None:
        assert "there is no code B1; did you mean B001?" in run(*arguments, "b1").err
        assert "there is no code Q; `parcompile explain` lists all" in run(*arguments, "Q").err

    def test_codes_are_separated_by_commas_and_a_letter_lists_its_own(self, run: Any) -> None:
        assert run("explain", "B001,B005").out == run("explain", "B001", "B005").out
        listed = run("explain", "d").out
        assert all((f"  {code}  " in listed) == code.startswith("D") for code in pages())
        of_letter = json.loads(run("explain", "D", "--format", "json").out)
        assert [page["code"] for page in of_letter] == [code for code in pages() if code.startswith("D")]
        said = run("explain", "B001", "Q9")
        assert (said.code, said.out) == (2, "")

    def test_every_letter_has_a_name(self) -> None:
        assert {code[0] for code in pages()} == set(GROUPS)

    def test_the_reference_is_up_to_date(self) -> None:
        assert DOCS.read_text(encoding="utf-8") == reference(), "run: python .ci/pages/rules_page.py > docs/rules.md"


class TestSchema:
    @pytest.mark.parametrize("name", schema.names())
    def test_the_draft_07_twin_of_every_schema_is_one(self, run: Any, name: str) -> None:
        twin = run("schema", name, "--draft-07").json
        Draft7Validator.check_schema(twin)
        assert twin["$schema"] == "http://json-schema.org/draft-07/schema#"

    @pytest.mark.parametrize("name", schema.names())
    def test_every_schema_is_printed_under_both_spellings(self, run: Any, name: str) -> None:
        assert run("schema", name).json == run("schema", name.replace("_", "-")).json == schema.load(name)

    def test_an_unknown_name_lists_the_known(self, run: Any) -> None:
        done = run("schema", "nothing")
        assert done.code == 2
        assert "spec" in done.err


def test_check_takes_the_targets_that_compile_takes(run: Any) -> None:
    Path("experts.json").write_text(NEEDS_SEQUENCE_PARALLEL, encoding="utf-8")

    def codes(*names: str) -> set[str]:
        found = run("check", "experts.json", "--format", "json", *(word for name in names for word in ("-t", name)))
        return {one["code"] for one in found.json["diagnostics"]}

    plain = codes()
    assert "T009" not in plain
    assert "T009" in codes("megatron") & codes("all")
    assert all(codes(name) == plain for name in TARGETS if name != "megatron")


def test_a_target_that_does_not_exist_is_refused_alike(run: Any) -> None:
    said = "there is no target 'foo'; there are deepspeed, torchrun, slurm, kubernetes, skypilot, megatron"
    for command in (("check",), ("compile", "-o", "out")):
        found = run(command[0], "good.json", *command[1:], "--target", "foo")
        assert found.code == 2
        assert said in found.err


@pytest.mark.parametrize(
    "part", ['"hf_config": "\\u0000"', '"preset": "llama-3-8b\\u0000"', '"module": "\\u0000.json"']
)
def test_names_with_a_nul_byte_are_findings(run: Any, part: str) -> None:
    Path("nul.json").write_text(GOOD.replace('"preset": "llama-3-8b"', part), encoding="utf-8")
    found = run("check", "nul.json")
    assert found.code == 1
    assert "Traceback" not in found.err + found.out


def test_a_machine_named_with_a_nul_byte_cannot_be_read(run: Any) -> None:
    text = GOOD.replace('"h200"', '"\\u0000.json"')
    Path("nul.json").write_text(text, encoding="utf-8")
    found = run("check", "nul.json", "--format", "json")
    assert found.code == 1
    assert [one["code"] for one in found.json["diagnostics"] if one["severity"] == "error"] == ["H002"]
