"""Recomputation of one's own for each pipeline stage: in the spec and the plan, in the estimate, in a search."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from layout_cases import compile_tree, spec_tree

from parcompile import schema
from parcompile.backends.artefacts import to_text
from parcompile.backends.registry import render
from parcompile.cost.changes import PARTS_TRIED, fewest_parts, fewest_stages
from parcompile.cost.collectives import collectives
from parcompile.cost.footprint import footprint, is_safe
from parcompile.cost.measurements import plain_row, read_plain
from parcompile.cost.step import timing
from parcompile.cost.traffic import traffic
from parcompile.cost.workload import Workload
from parcompile.model.hf_config import shape_from_config
from parcompile.model.layer_parts import WORDS
from parcompile.model.presets import presets
from parcompile.pipeline import check_file
from parcompile.plan import load_plan, plan_tree
from parcompile.plan.diff import difference
from parcompile.searching.ranking import SearchResult, search
from parcompile.searching.space import open_space
from parcompile.show.pictures.timeline import timetable
from parcompile.spec.resolve import Resolution

LLAMA = presets()["llama-3-8b"].config
MIXED = ("full", "full", "none", "none")
WORK = Workload(
    shape=shape_from_config(LLAMA),
    nodes=1,
    gpus_per_node=8,
    accelerator="h100-sxm",
    sequence_length=8192,
    micro_batch=2,
    micro_batches=16,
    tp=2,
    pp=4,
)
FULL, NONE, SOME = (replace(WORK, recompute=recompute) for recompute in ("full", "none", MIXED))


def spec(recompute: object, **parallelism: object) -> dict[str, Any]:
    training = {"global_batch_size": 8, "gradient_accumulation_dtype": "fp32", "activation_checkpointing": recompute}
    return spec_tree(parallelism={"pp": 4, **parallelism}, training=training)


class TestEstimate:
    def test_each_stage_holds_what_it_holds_where_all_recompute_the_same(self) -> None:
        of_full, of_none = footprint(FULL).stages, footprint(NONE).stages
        assert footprint(SOME).stages == (*of_full[:2], *of_none[2:])
        assert of_full[0].total_bytes < of_none[0].total_bytes

    def test_each_stage_takes_the_time_of_what_it_recomputes(self) -> None:
        full, none, some = (timing(work).step for work in (FULL, NONE, SOME))
        assert some.stages == (*full.stages[:2], *none.stages[2:])
        assert sum(some.parts.values()) == pytest.approx(some.seconds)
        assert none.seconds < some.seconds < full.seconds

    def test_the_parts_of_a_step_are_those_of_the_slowest_stage(self) -> None:
        # 16 layers take longer recomputed than 16 others with the head.
        first = replace(WORK, pp=2, tp=4, recompute=("full", "none"))
        full = timing(replace(first, recompute="full")).step
        found = timing(first).step
        assert found.stages[0] == max(found.stages)
        alone = 16 * found.stages[0]
        assert found.compute + found.launch + found.tensor + found.context + found.expert == pytest.approx(alone)
        assert found.bubble == pytest.approx(sum(found.stages[1:]))
        assert found.stages[0] == full.stages[0]

    def test_each_stage_sends_what_it_sends_where_all_recompute_the_same(self) -> None:
        for index, stage in enumerate(WORK.stages):
            alike = FULL if index < 2 else NONE
            assert collectives(SOME, stage) == collectives(alike, stage)
        assert collectives(FULL, WORK.stages[0]) != collectives(NONE, WORK.stages[0])

    def test_the_traffic_is_that_of_the_stage_that_sends_most(self) -> None:
        over_tp = {
            name: next(one.wire_bytes for one in traffic(work) if one.group == "tp")
            for name, work in (("full", FULL), ("none", NONE), ("some", SOME))
        }
        assert over_tp["none"] < over_tp["some"] <= over_tp["full"]
        ulysses = replace(SOME, tp=1, cp=2, cp_implementation="ulysses")
        recomputed = next(one for one in traffic(ulysses) if one.group == "cp")
        full = next(one for one in traffic(replace(ulysses, recompute="full")) if one.group == "cp")
        assert recomputed.wire_bytes == full.wire_bytes

    def test_forward_takes_its_own_share_of_each_stage(self) -> None:
        found = timetable(SOME, timing(SOME).step)
        shares = {}
        for stage in (0, 2):
            forward, backward = (
                next(one for one in found.passes if one.stage == stage and one.forward is forth)
                for forth in (True, False)
            )
            shares[stage] = (backward.stop - backward.start) / (forward.stop - forward.start)
        assert 2.5 < shares[0] < 3.5
        assert 1.5 < shares[2] < 2.5

    def test_a_measured_run_keeps_it(self, tmp_path: Path) -> None:
        row = plain_row(SOME, model="llama-3-8b", hf_config=LLAMA, peak_bytes=1, step_seconds=1.0)
        file = tmp_path / "measured.csv"
        file.write_text(
            ",".join(row) + "\n" + ",".join(f'"{one.replace(chr(34), chr(34) * 2)}"' for one in row.values())
        )
        (read,) = read_plain(file)
        assert read.work.recompute == MIXED


class TestSpecAndPlan:
    def test_the_words_of_the_schemas_are_those_of_the_estimate(self) -> None:
        for name in ("spec", "plan"):
            key = json.dumps(schema.load(name)["properties"]["training"]["properties"]["activation_checkpointing"])
            assert [json.loads(one) for one in re.findall(r'"enum": (\[[^]]+\])', key)] == [list(WORDS)] * 2

    def test_a_plan_keeps_one_word_for_each_stage(self, tmp_path: Path) -> None:
        plan = compile_tree(spec(list(MIXED)), tmp_path)
        assert plan.spec.training.activation_checkpointing == MIXED
        file = tmp_path / "plan.json"
        file.write_text(to_text(plan_tree(plan)), encoding="utf-8")
        assert load_plan(file).spec.training.activation_checkpointing == MIXED

    def test_the_same_word_for_all_stages_is_one_word(self, tmp_path: Path) -> None:
        of_list, of_word = (compile_tree(spec(one), tmp_path) for one in (["full"] * 4, "full"))
        assert of_list.spec.training.activation_checkpointing == "full"
        # The hashes alone tell how the spec was written.
        trees = [plan_tree(plan) for plan in (of_list, of_word)]
        assert {key for key in trees[0] if trees[0][key] != trees[1][key]} == {"spec_hash", "plan_hash"}

    def test_another_word_on_one_stage_is_another_plan(self, tmp_path: Path) -> None:
        before, after = (compile_tree(spec(one), tmp_path) for one in ("full", list(MIXED)))
        assert before.plan_hash != after.plan_hash
        change = next(one for one in difference(before, after).changes if one.what == "activation_checkpointing")
        assert (change.before, change.after) == ("full", "full, full, none, none")

    @pytest.mark.parametrize(
        ("recompute", "parallelism", "message"),
        [
            (["full", "none"], {}, "activation_checkpointing has 2 words (full, none) for pp 4: 2 ≠ 4"),
            (["full", "none"], {"pp": 1}, "2 ≠ 1"),
            (["full", "none"], {"pp": 2}, None),
            (list(MIXED), {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2}, "4 ≠ 2"),
            (
                ["full", "none"],
                {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2},
                "activation_checkpointing (full, none) for each stage with 2 virtual stages on each rank",
            ),
        ],
    )
    def test_words_are_as_many_as_stages(
        self, recompute: list[str], parallelism: dict[str, object], message: str | None, tmp_path: Path
    ) -> None:
        file = tmp_path / "spec.json"
        file.write_text(json.dumps(spec(recompute, **parallelism)), encoding="utf-8")
        found = [one.message for one in check_file(file).diagnostics if one.code == "R003"]
        assert len(found) == (message is not None)
        assert all(message in one for one in found if message)

    def test_tools_with_one_word_for_all_stages_get_no_files(self, tmp_path: Path) -> None:
        plan = compile_tree(spec(list(MIXED)), tmp_path)
        files = render(plan, ("megatron", "torchtitan"))
        report = json.loads(files["target_report.json"])["targets"]
        for target in ("megatron", "torchtitan"):
            assert not report[target]["expressible"]
            whats = [loss["what"] for loss in report[target]["losses"]]
            assert "activation_checkpointing full, full, none, none" in whats


class TestSearch:
    def test_the_fewest_first_stages_are_chosen_with_which_it_fits(self) -> None:
        # Without recomputation stage 0 is too full, and stage 1 is not: one stage is enough.
        found = fewest_stages(NONE)
        assert found is not None
        assert found.recompute == ("full", "none", "none", "none")

    def test_virtual_stages_and_one_stage_have_no_first_ones(self) -> None:
        assert fewest_stages(replace(NONE, virtual_stages=2)) is None
        assert fewest_stages(replace(NONE, pp=1, dp=4)) is None

    @staticmethod
    def _search(micro_batch: int, *, executable: bool = True, **training: object) -> SearchResult:
        tree = spec_tree(model={"preset": "llama-3-8b"}, parallelism={"tp": 2, "pp": 4, "dp": 1})
        tree["training"] = {"sequence_length": 8192, "global_batch_size": 32, "micro_batch_size": micro_batch}
        tree["training"] |= {"gradient_accumulation_dtype": "fp32", **training}
        return search(open_space(Resolution(tree), executable=executable))

    def test_less_is_recomputed_where_that_is_faster_than_all_and_none_does_not_fit(self) -> None:
        found = self._search(2)
        assert found.best is not None and found.best.candidate.work.recompute == "norms"
        fastest: dict[object, float] = {}
        for one in found.fitting:
            word = one.candidate.work.recompute
            kind = word if isinstance(word, str) else "some stages"
            fastest[kind] = min(one.seconds, fastest.get(kind, one.seconds))
        assert max(fastest["norms"], fastest["some stages"]) < fastest["full"]

    def test_of_parts_the_first_that_is_enough_is_taken(self) -> None:
        none = replace(WORK, pp=1, tp=8, micro_batch=6, micro_batches=8, sequence_parallel=True, recompute="none")
        found = fewest_parts(none)
        assert found is not None and found.recompute == "attention+norms"
        for word, fits in (("none", False), ("norms", False), ("attention+norms", True), ("mlp", True)):
            assert is_safe(footprint(replace(none, recompute=word))) is fits
        steps = [timing(replace(none, recompute=word)).step.seconds for word in ("none", *PARTS_TRIED, "full")]
        assert steps == sorted(steps)
        # All parts take as long as the layer that they are, whose attention is kept too.
        every, full = (timing(replace(none, recompute=word)).step for word in ("attention+mlp+norms", "full"))
        assert every.compute == pytest.approx(full.compute, rel=1e-6)
        assert every.tensor == pytest.approx(full.tensor, rel=1e-6)

    def test_nothing_is_recomputed_where_that_fits(self) -> None:
        found = self._search(1)
        assert found.best is not None
        assert found.best.candidate.work.recompute == "none"

    def test_what_the_spec_says_stays_and_other_tools_get_one_word(self) -> None:
        given = self._search(2, activation_checkpointing="full")
        assert {one.candidate.work.recompute for one in (*given.fitting, *given.too_large)} == {"full"}
        listed = self._search(2, activation_checkpointing=list(MIXED))
        known = {one.candidate.work.recompute for one in (*listed.fitting, *listed.too_large)}
        assert known == {MIXED}
        others = self._search(2, executable=False)
        assert all(isinstance(one.candidate.work.recompute, str) for one in others.fitting)
