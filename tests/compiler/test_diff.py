import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from layout_cases import SMALL_MODEL, compile_tree, spec_tree

from parcompile.backends.artefacts import to_text
from parcompile.cli.showing import diff_command as command
from parcompile.plan import plan_tree
from parcompile.plan.diff import ChangeKind, Difference, Resume, difference, layout_differences

BASE = {"parallelism": {"tp": 2, "cp": 2}, "training": {"global_batch_size": 8}}


def compared(folder: Path, *, before: dict[str, Any] | None = None, **after: Any) -> Difference:
    """From the base spec (with `before` in it) to one with other sections."""
    old = compile_tree(spec_tree(1, 8, **{**BASE, **(before or {})}), folder)
    new = compile_tree(spec_tree(after.pop("nodes", 1), 8, **{**BASE, **(before or {}), **after}), folder)
    return difference(old, new)


def named(found: Difference, *kinds: ChangeKind) -> dict[str, tuple[Any, Any]]:
    return {change.what: (change.before, change.after) for change in found.of(*kinds)}


def test_a_plan_is_the_same_as_itself(tmp_path) -> None:
    found = compared(tmp_path)
    assert found.same
    assert (found.moved_ranks, found.deepspeed.resume, found.deepspeed.reasons) == (0, Resume.SAME_FILES, ())
    assert (found.runtime.resume, found.runtime.reasons) == (Resume.SAME_FILES, ())


def test_another_batch_or_learning_rate_is_another_training(tmp_path) -> None:
    training = {"global_batch_size": 16, "optimizer": {"lr": 1e-4}}
    found = compared(tmp_path, training=training)
    assert named(found, ChangeKind.NUMERICS) == {"global_batch_size": (8, 16), "optimizer.lr": (3e-4, 1e-4)}
    assert named(found, ChangeKind.ROUNDING) == {"gradient_accumulation_steps": (4, 8)}
    assert found.deepspeed.resume is Resume.SAME_FILES


@pytest.mark.parametrize(
    "note", [{"transformers_version": "5.99.0"}, {"architectures": ["Other"]}, {"use_cache": False}]
)
def test_what_a_configuration_says_of_its_file_makes_no_other_model(tmp_path, note) -> None:
    before = {"model": {"hf_config": "config.json"}}
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL | {"transformers_version": "5.23.0"}))
    (tmp_path / "other.json").write_text(json.dumps(SMALL_MODEL | {"transformers_version": "5.23.0"} | note))
    found = compared(tmp_path, before=before, model={"hf_config": "other.json"})
    assert found.same
    assert found.runtime.resume is Resume.SAME_FILES


def test_a_checkpoint_of_another_model_says_which_keys_differ(tmp_path) -> None:
    found = compared(tmp_path, before={"model": SMALL_MODEL}, model=SMALL_MODEL | {"rms_norm_eps": 1e-6})
    assert found.runtime.resume is Resume.NO
    assert found.runtime.reasons == ("the models differ: rms_norm_eps left out → 1e-06",)


def test_reasons_are_written_as_a_configuration_writes_values(tmp_path) -> None:
    old = {"model": {"hf_config": "old.json"}}
    (tmp_path / "old.json").write_text(json.dumps(SMALL_MODEL | {"attention_bias": False, "pad_token_id": None}))
    (tmp_path / "new.json").write_text(
        json.dumps(SMALL_MODEL | {"attention_bias": True, "hidden_act": "gelu", "pad_token_id": 3})
    )
    found = compared(tmp_path, before=old, model={"hf_config": "new.json"})
    said = 'attention_bias false → true; hidden_act left out → "gelu"; pad_token_id null → 3'
    assert found.runtime.reasons == (f"the models differ: {said}",)


def test_what_only_one_of_two_layouts_has_is_said_in_words() -> None:
    assert layout_differences({"ep": None, "tp": 1}, {"ep": 2, "tp": 1}) == {"ep": "ep 1 → 2"}
    folded = {"ep": 2, "expert_tp": None}, {"ep": 2, "expert_tp": 1}
    assert layout_differences(*folded) == {"expert_tp": "expert_tp as tp → 1"}
    no_decay = {"without weight decay": None}, {"without weight decay": "norms"}
    assert list(layout_differences(*no_decay).values()) == ["without weight decay none → norms"]


def test_one_stage_has_no_stages_to_speak_of(tmp_path) -> None:
    plain, staged = {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}
    there = compared(tmp_path, before={"parallelism": plain}, parallelism=staged)
    back = compared(tmp_path, before={"parallelism": staged}, parallelism=plain)
    assert there.runtime.resume is back.runtime.resume is Resume.CUT_ANEW
    assert there.runtime.reasons[0] == "pp 1 → 2"
    assert back.runtime.reasons[0] == "pp 2 → 1"
    assert not [one for one in (*there.runtime.reasons, *back.runtime.reasons) if "none" in one]


def test_a_checkpoint_that_keeps_the_whole_configuration_is_still_of_the_same_model() -> None:
    old, new = {"model": {"hidden_size": 8, "dtype": "bfloat16"}, "tp": 2}, {"model": {"hidden_size": 8}, "tp": 4}
    assert layout_differences(old, new) == {"tp": "tp 2 → 4"}


def test_another_layout_sums_in_another_order_and_needs_a_universal_checkpoint(tmp_path) -> None:
    found = compared(tmp_path, parallelism={"tp": 4, "cp": 2})
    assert named(found, ChangeKind.NUMERICS) == {}
    assert named(found, ChangeKind.ROUNDING)["partial sums of a linear (tp)"] == (2, 4)
    assert named(found, ChangeKind.LAYOUT)["tp"] == (2, 4)
    before, after = named(found, ChangeKind.COST)["weights per rank"]
    assert after < before
    assert found.deepspeed.resume is Resume.UNIVERSAL
    assert found.deepspeed.reasons[0].startswith("tp 2 → 4")
    assert any(reason.startswith("dp · cp 4 → 2") for reason in found.deepspeed.reasons)


def test_cp_and_dp_may_be_swapped_within_the_same_files(tmp_path) -> None:
    found = compared(tmp_path, parallelism={"tp": 2, "cp": 4}, training={"global_batch_size": 8})
    assert named(found, ChangeKind.LAYOUT) == {"cp": (2, 4), "dp": (2, 1)}
    assert found.deepspeed.resume is Resume.SAME_FILES


def test_a_checkpoint_does_not_go_to_stages_with_other_layers(tmp_path) -> None:
    training = {"gradient_accumulation_dtype": "fp32", "global_batch_size": 8}
    even = {"parallelism": {"tp": 2, "pp": 2}, "training": training}
    found = compared(
        tmp_path, before=even, parallelism={**even["parallelism"], "num_layers_in_first_pipeline_stage": 1}
    )
    assert named(found, ChangeKind.LAYOUT)["layers of each stage"] == ("2 × 2", "1 × 1, 3 × 1")
    assert found.deepspeed.resume is Resume.NO
    assert "stages hold other layers" in found.deepspeed.reasons[0]


def test_ranks_that_move_are_counted(tmp_path) -> None:
    found = compared(tmp_path, parallelism={"tp": 2, "cp": 2, "order": "cp-tp-dp-pp"})
    # Of each block of four (tp × cp) the two with equal coordinates stay.
    assert found.moved_ranks == 4
    assert compared(tmp_path, parallelism={"tp": 2, "cp": 2, "order": "tp-cp-pp-dp"}).moved_ranks == 0
    assert compared(tmp_path, nodes=2).moved_ranks is None


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ({}, {"model": {**SMALL_MODEL, "num_hidden_layers": 8}}, "the models have other shapes"),
        (
            {"training": {"global_batch_size": 8, "gradient_accumulation_dtype": "fp32"}},
            {"parallelism": {"tp": 2, "cp": 2, "pp": 2}},
            "pp 1 → 2",
        ),
        ({}, {"zero": {"stage": 3}}, "zero.stage 1 → 3"),
        ({}, {"training": {"global_batch_size": 8, "precision": "fp16"}}, "precision bf16 → fp16"),
        ({}, {"training": {"global_batch_size": 8, "optimizer": {"type": "adam"}}}, "optimizer adamw → adam"),
        ({}, {"parallelism": {"tp": 8}}, "kv heads are replicated"),
        ({"model": {"preset": "gpt2"}}, {"parallelism": {"tp": 4, "cp": 2}}, "a fused projection"),
    ],
)
def test_what_keeps_a_checkpoint_of_deepspeed_from_going_over(tmp_path, before, after, reason) -> None:
    found = compared(tmp_path, before=before, **after)
    assert found.deepspeed.resume is Resume.NO
    assert any(one.startswith(reason) for one in found.deepspeed.reasons), found.deepspeed.reasons


@pytest.mark.parametrize(
    ("after", "resume", "reason"),
    [
        ({"parallelism": {"tp": 8}}, Resume.CUT_ANEW, "tp 2 → 8"),
        ({"training": {"global_batch_size": 8, "precision": "fp16"}}, Resume.CUT_ANEW, "precision bf16 → fp16"),
        ({"training": {"global_batch_size": 8, "optimizer": {"type": "adam"}}}, Resume.NO, "optimizer adamw → adam"),
        ({"model": {**SMALL_MODEL, "num_hidden_layers": 8}}, Resume.NO, "the models differ: num_hidden_layers 4 → 8"),
        ({"zero": {"stage": 2}}, Resume.CUT_ANEW, "zero stage 1 → 2"),
        ({"zero": {"stage": 3}}, Resume.CUT_ANEW, "zero stage 1 → 3"),
        ({"training": {"global_batch_size": 8, "seed": 5}}, Resume.SAME_FILES, None),
    ],
)
def test_the_runtime_cuts_anew_what_the_layout_changes(tmp_path, after, resume, reason) -> None:
    found = compared(tmp_path, **after).runtime
    assert found.resume is resume
    assert reason is None or reason in found.reasons


class TestCommand:
    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        for name, tp in (("a", 2), ("b", 4)):
            tree = spec_tree(1, 8, parallelism={"tp": tp}, training={"global_batch_size": 8})
            (tmp_path / f"{name}.json").write_text(json.dumps(tree), encoding="utf-8")
        plan = compile_tree(tree, tmp_path)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "plan.json").write_text(to_text(plan_tree(plan)), encoding="utf-8")
        return tmp_path

    def run(self, *arguments: object):
        return CliRunner().invoke(command, [str(argument) for argument in arguments])

    def test_specs_plans_and_folders_can_be_compared(self, folder) -> None:
        same = self.run(folder / "b.json", folder / "out")
        assert (same.exit_code, same.output) == (0, "The plans are the same.\n")
        assert self.run(folder / "out" / "plan.json", folder / "out").output == same.output
        text = self.run(folder / "a.json", folder / "out").output
        assert "Rounding: the same sums in another order" in text
        assert "Checkpoint, by this runtime: resharded while it is loaded\n  tp 2 → 4" in text
        assert "Checkpoint, by DeepSpeed alone: universal conversion" in text

    def test_json_is_the_whole_of_standard_output(self, folder) -> None:
        tree = json.loads(self.run(folder / "a.json", folder / "b.json", "--format", "json").stdout)
        assert tree["checkpoint"]["deepspeed"]["resume"] == "universal conversion"
        assert tree["checkpoint"]["runtime"]["resume"] == "resharded while it is loaded"
        assert {"kind": "layout", "what": "tp", "before": 2, "after": 4, "note": "", "unit": ""} in tree["changes"]

    def test_bytes_and_times_are_said_in_units(self, folder) -> None:
        text = self.run(folder / "a.json", folder / "b.json").stdout
        assert re.search(r"weights per rank +[\d.]+ [KMG]iB → [\d.]+ [KMG]iB \([+-][\d.]+%\)", text)
        assert re.search(r"time of a step, estimated +[\d.]+ (us|ms|s) → ", text)

    def test_a_broken_spec_is_reported_and_a_missing_file_is_named(self, folder) -> None:
        (folder / "a.json").write_text(json.dumps(spec_tree(1, 8, parallelism={"tp": 3})), encoding="utf-8")
        broken = self.run(folder / "a.json", folder / "b.json")
        assert broken.exit_code == 1
        missing = self.run(folder / "none.json", folder / "b.json")
        assert missing.exit_code != 0
        assert "none.json" in missing.output

    def test_markdown_says_what_moves_what_it_costs_and_whether_a_checkpoint_goes_over(self, folder) -> None:
        done = self.run(folder / "a.json", folder / "b.json", "--format", "markdown")
        assert done.exit_code == 0
        for part in (
            "**The same training**: the same sums in another order. 6 ranks change position.",
            "| layout | tp 2 × dp 4, micro 1 × 2 | tp 4 × dp 2, micro 1 × 4 |  |",
            "- parcompile's runtime: goes on; the checkpoint is resharded while it is loaded\n  - tp 2 → 4",
            "- DeepSpeed alone: needs a universal conversion",
            "<summary>Layout (",
        ):
            assert part in done.output, part
        rows = [line for line in done.output.splitlines() if line.startswith("| ")]
        assert any(line.startswith("| step, estimated |") and line.endswith("% |") for line in rows)
        # Each table is whole: its rows have as many cells as its head.
        assert {line.count("|") for line in rows} == {5}

    def test_markdown_of_the_same_plan_says_so(self, folder) -> None:
        assert "Nothing changes" in self.run(folder / "b.json", folder / "out", "--format", "markdown").output

    def test_what_a_spec_is_called_is_no_markup(self, folder) -> None:
        tree = spec_tree(1, 8, name="</details> @team | [x](y)", parallelism={"tp": 2})
        (folder / "c.json").write_text(json.dumps(tree), encoding="utf-8")
        text = self.run(folder / "a.json", folder / "c.json", "--format", "markdown").output
        assert "&#60;/details&#62; &#64;team &#124; &#91;x&#93;(y)" in text
        assert "@team" not in text
