"""Every preset can be estimated, and its parameters add up exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parcompile.cost.estimate import estimate, parameters
from parcompile.cost.table import error_text, table
from parcompile.cost.workload import Workload
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import shape_from_config
from parcompile.model.presets import Preset, presets

PRESETS = list(presets().values())


def work(name: str) -> Workload:
    return Workload(
        shape=shape_from_config(presets()[name].config),
        nodes=64,
        gpus_per_node=8,
        accelerator="h100-sxm",
        sequence_length=1024,
        micro_batch=1,
        micro_batches=8,
        dp=512,
        vocab_divisible_by=1,
    )


@pytest.mark.parametrize("preset", PRESETS, ids=[one.name for one in PRESETS])
def test_the_parameters_of_all_layers_stages_and_ends_are_those_of_the_model(preset: Preset) -> None:
    one = work(preset.name)
    found, rows = parameters(one), parameter_table(one.shape)
    ends = sum(row.numel for row in (*rows.before, *rows.after))
    assert found.total == preset.parameters == sum(found.by_layer) + ends
    trained = found.total - sum(row.numel * row.count for row in rows if not row.trained)
    assert found.by_stage == (trained,)
    staged = replace(one, pp=one.shape.num_hidden_layers, dp=1)
    copied = rows.before[0].numel if one.shape.tie_word_embeddings else 0
    assert sum(parameters(staged).by_stage) == trained + copied


@pytest.mark.parametrize("preset", PRESETS, ids=[one.name for one in PRESETS])
def test_every_preset_has_a_finite_estimate_and_a_table(preset: Preset) -> None:
    found = estimate(work(preset.name), tokens=1e9)
    assert 0 < found.time.utilisation < 1
    assert found.memory.peak.total_bytes > found.memory.peak.static_bytes > 12 * found.parameters.total / 512
    assert "MFU" in table(found)


def test_experts_are_shared_over_ep_and_dense_parameters_are_not() -> None:
    one = work("mixtral-8x7b")
    whole, shared = parameters(one).by_layer[0], parameters(replace(one, ep=8)).by_layer[0]
    assert one.shape.moe is not None
    experts = 8 * 3 * one.shape.hidden_size * one.shape.moe.intermediate_size
    assert shared == whole - experts * 7 // 8


def test_expert_traffic_counts_each_expert_of_a_token_in_both_directions() -> None:
    one = replace(work("mixtral-8x7b"), ep=8)
    found = {group.group: group for group in estimate(one).traffic}
    # Two exchanges of rows in forward and two in backward, and before them eight numbers of eight bytes.
    rows, counts = 2 * (1024 * 4096 * 2) * 7 / 8, 8 * 8 * 7 / 8
    assert found["ep"].wire_bytes == 32 * 8 * (4 * rows + counts)
    assert found["ep"].messages == 32 * 8 * 5


def test_tensor_parallel_ranks_share_the_tokens_that_travel_to_experts() -> None:
    one = replace(work("mixtral-8x7b"), ep=8)
    alone, shared = ({group.group: group for group in estimate(replace(one, tp=tp)).traffic} for tp in (1, 2))
    rows, counts = 2 * (1024 * 4096 * 2), 8 * 8 * 7 / 8
    assert alone["ep"].wire_bytes == 32 * 8 * (4 * rows * 7 / 8 + counts)
    # Half of the rows; the numbers are those of both ranks that hold slices of an expert.
    assert shared["ep"].wire_bytes == 32 * 8 * (4 * rows / 2 * 7 / 8 + 2 * counts)
    # These two put the rows that come for their slices together, and add up the results of each.
    without = {group.group: group for group in estimate(replace(one, tp=2, ep=1)).traffic}
    assert shared["tp"].messages == without["tp"].messages + 32 * 8 * 4
    assert shared["tp"].wire_bytes == without["tp"].wire_bytes + 32 * 8 * 4 * rows / 2
    # Whole experts: nothing is gathered.
    folded = {group.group: group for group in estimate(replace(one, tp=2, expert_tp=1)).traffic}
    assert folded["tp"] == without["tp"]
    assert folded["ep"].wire_bytes == 32 * 8 * (4 * rows / 2 * 7 / 8 + counts)


def test_moe_computes_only_the_experts_of_a_token() -> None:
    one = work("mixtral-8x7b")
    dense = replace(one, shape=replace(one.shape, moe=None, intermediate_size=8 * 14336))
    assert estimate(one).time.step.compute < 0.5 * estimate(dense).time.step.compute


def test_gradients_of_experts_have_their_share_of_the_time_that_all_gradients_take() -> None:
    found = estimate(replace(work("mixtral-8x7b"), ep=8))
    exposed = {group: found.exposed_seconds(group) for group in ("dp-cp", "expert-dp")}
    sent = {one.group: one.wire_bytes for one in found.traffic}
    assert min(exposed.values()) > 0
    assert sum(exposed.values()) == pytest.approx(found.time.step.gradients)
    assert exposed["expert-dp"] / exposed["dp-cp"] == pytest.approx(sent["expert-dp"] / sent["dp-cp"])


@pytest.mark.parametrize(
    ("name", "said"), [("llama-3.2-3b", "between them"), ("llama-3-70b", "19.7 times larger"), ("gpt2", "10.8 times")]
)
def test_an_estimate_says_how_far_its_model_is_from_those_that_were_fitted(name: str, said: str) -> None:
    own, others = (error_text(estimate(replace(work(name), framework=one))) for one in ("deepspeed", "nanotron"))
    assert said in own
    assert said in others
    assert own.startswith("of time only: `parcompile preflight` counts memory.")
    assert others.startswith("of memory and time.")


def test_a_step_with_other_values_is_that_of_replace() -> None:
    one = work("llama-3-8b")
    assert one.having(tp=4, recompute="full") == replace(one, tp=4, recompute="full") != one
