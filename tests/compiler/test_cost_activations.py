"""Activation formulas against the published ones, and what they imply."""

from __future__ import annotations

from dataclasses import replace

import pytest
from published import stored_activation_bytes
from published_runs import gpt_shape, llama_shape

from parcompile.cost.activations import layer_bytes
from parcompile.cost.footprint import fit_probability, footprint
from parcompile.cost.layer_passes import LOSS_CHUNK_ELEMENTS
from parcompile.cost.memory_terms import memory_terms
from parcompile.cost.workload import Workload
from parcompile.units import GIB


def test_a_gpt_layer_with_fused_attention_keeps_what_the_selective_form_keeps() -> None:
    """34 s b h counts two dropout masks (1 byte each) and their inputs' copies, which are not kept without dropout."""
    found = layer_bytes(gpt_shape(24, 2304, 24), tp=1, sequence_parallel=False)
    assert found.total == 2 * 2304 * (4 + 4 + 8)
    assert found.total <= stored_activation_bytes(s=1, b=1, h=2304, a=24, recompute="selective")


@pytest.mark.parametrize(("recompute", "layers"), [("none", 24 * 2), ("selective", 1), ("full", 1)])
def test_stored_scores_are_kept_of_all_layers_or_recomputed_of_one(recompute: str, layers: int) -> None:
    """5 a s² b / t for each layer: arXiv 2205.05198, table 2."""
    fused = Workload(
        shape=gpt_shape(48, 2304, 24),
        nodes=1,
        gpus_per_node=8,
        accelerator="a100-80gb",
        sequence_length=1024,
        micro_batch=2,
        micro_batches=4,
        tp=4,
        pp=2,
        recompute=recompute,
        framework="megatron",
    )
    first, stored = memory_terms(fused)[0], memory_terms(replace(fused, framework="megatron-2021"))[0]
    assert stored.attention - first.attention == layers * 5 * 24 * 1024**2 * 2 / 4


def test_grouped_heads_and_gated_mlp_follow_the_component_form() -> None:
    shape = llama_shape(layers=2, hidden=4096, heads=32, kv_heads=8, width=14336, vocab=32000, tied=False)
    found = layer_bytes(shape, tp=4, sequence_parallel=True)
    assert found.attention == 2 * (2 * 32 + 2 * 8) * 128 / 4
    assert found.mlp == 2 * 3 * 14336 / 4
    assert found.stream == 2 * 4 * 4096 / 4
    assert found.gathered == 2 * 2 * 4096 * 3 / 4


def test_kv_heads_below_tp_are_kept_by_every_rank() -> None:
    shape = llama_shape(layers=2, hidden=4096, heads=32, kv_heads=2, width=14336, vocab=32000, tied=False)
    assert layer_bytes(shape, tp=8, sequence_parallel=False).attention == 2 * (2 * 4 + 2 * 1) * 128


WORK = Workload(
    shape=llama_shape(layers=32, hidden=4096, heads=32, kv_heads=8, width=14336, vocab=128256, tied=False),
    nodes=4,
    gpus_per_node=8,
    accelerator="h100-sxm",
    sequence_length=8192,
    micro_batch=1,
    micro_batches=16,
    tp=4,
    dp=2,
    pp=4,
)
GRADIENTS = 8192 * (5 * 4 * 4096 - 2 * 4096 - 2 * 4 * 14336 // 4)
"""Of a stage without a head: of the norm in front of the last MLP, when what goes into that and it keeps is gone."""

RECEIVED = 2 * 8192 * 4096
"""Of a micro-batch, by a stage behind the first: the first norm keeps a copy in fp32."""


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    held = [stage.components["activations"] for stage in footprint(WORK).stages]
    one = footprint(replace(WORK, micro_batches=1)).stages[0].components["activations"] - GRADIENTS
    of_stages = [(4, 0), (3, RECEIVED), (2, RECEIVED)]
    assert held[:3] == pytest.approx([(one + came) * count + GRADIENTS for count, came in of_stages])
    last_norm_and_head_input = 8192 * 4096 * (4 + 2 + 2)
    assert held[3] == pytest.approx(one + RECEIVED + last_norm_and_head_input)


def test_interleaving_holds_more_by_its_factor() -> None:
    plain, interleaved = footprint(WORK).stages[0], footprint(replace(WORK, virtual_stages=2)).stages[0]
    held = [stage.components["activations"] - GRADIENTS for stage in (interleaved, plain)]
    ratio = 1 + 3 / (4 * 2)
    # Half of its chunks receive.
    assert held[0] == pytest.approx(ratio * (held[1] + 4 * RECEIVED))


def test_logits_stand_on_the_last_stage_and_the_peak_names_its_rank() -> None:
    found = footprint(WORK)
    assert [stage.components["logits"] > 0 for stage in found.stages] == [False, False, False, True]
    assert [stage.rank for stage in found.stages] == [0, 8, 16, 24]
    assert found.peak.total_bytes == max(stage.total_bytes for stage in found.stages)
    assert found.peak.largest in found.peak.components


def test_cp_cuts_activations_and_logits() -> None:
    whole, cut = footprint(replace(WORK, dp=4, cp=1)), footprint(replace(WORK, dp=2, cp=2))
    for name, constant in (("activations", 0), ("logits", 4 * LOSS_CHUNK_ELEMENTS)):
        sizes = [one.stages[-1].components[name] - constant for one in (whole, cut)]
        assert sizes[1] == pytest.approx(sizes[0] / 2)


def test_full_recomputation_keeps_layer_inputs_and_one_layer() -> None:
    full, none = footprint(replace(WORK, recompute="full")), footprint(WORK)
    assert full.stages[0].components["activations"] < 0.3 * none.stages[0].components["activations"]
    inputs = 8 * 4 * 8192 * 4096 * 2
    assert full.stages[0].components["activations"] > inputs


def test_the_probability_follows_the_interval() -> None:
    assert fit_probability(70.0, (60.0, 80.0), 80.0) == pytest.approx(0.95, abs=0.001)
    assert fit_probability(70.0, (60.0, 80.0), 70.0) == pytest.approx(0.5)
    assert fit_probability(70.0, (60.0, 80.0), 60.0) == pytest.approx(0.05, abs=0.001)


def test_the_static_part_of_a_deepspeed_plan_is_certain() -> None:
    found = footprint(WORK)
    low, high = found.interval_bytes
    assert low >= found.peak.static_bytes
    assert low <= found.peak.total_bytes <= high


def test_what_a_7b_model_holds_beyond_static_memory_is_near_the_measured_figure() -> None:
    """Measured with Megatron on H100: 19.24 GiB static, 53.22 GiB peak. The static part is of a plain MLP, too."""
    shape = llama_shape(layers=32, hidden=4096, heads=32, kv_heads=8, width=16384, vocab=131073, tied=True)
    work = Workload(
        shape=replace(shape, mlp=replace(shape.mlp, gated=False)),
        nodes=1,
        gpus_per_node=8,
        accelerator="h100-sxm",
        sequence_length=8192,
        micro_batch=2,
        micro_batches=4,
        tp=4,
        dp=2,
        framework="megatron",
    )
    assert work.padded_vocabulary == 131584
    peak = footprint(work).peak
    assert peak.total_bytes / GIB - peak.static_bytes / GIB == pytest.approx(53.22 - 19.24, rel=0.1)
