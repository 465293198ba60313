"""Bytes and messages of each group, and the time that they leave exposed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from published_runs import gpt_shape, llama_shape

from parcompile.cost.coefficients import TIME
from parcompile.cost.collectives import collectives
from parcompile.cost.flops import matmul_parameters, model_flops_per_token
from parcompile.cost.step import bandwidth, step_terms, step_time, timing
from parcompile.cost.traffic import traffic
from parcompile.cost.workload import Workload
from parcompile.machines import accelerators, find_accelerator
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import shape_from_config
from parcompile.user_files import shipped

SHAPE = llama_shape(layers=8, hidden=1024, heads=16, kv_heads=4, width=4096, vocab=32000, tied=False)
WORK = Workload(
    shape=SHAPE,
    nodes=2,
    gpus_per_node=8,
    accelerator="h100-sxm",
    sequence_length=2048,
    micro_batch=2,
    micro_batches=4,
    dp=16,
)
START = {name: one.start for name, one in TIME.items()}


def only(work: Workload, group: str) -> float:
    return next(one.wire_bytes for one in traffic(work) if one.group == group)


def test_tp_sends_four_ring_all_reduces_in_each_layer_and_two_for_the_ends() -> None:
    work = replace(WORK, tp=4, dp=4)
    activation, loss = 2 * 2048 * 1024 * 2, 3 * 4 * (2 * 2048)
    assert only(work, "tp") == 4 * ((4 * 8 + 2) * 2 * 3 / 4 * activation + 3 * loss)
    recomputed = only(replace(work, recompute="full"), "tp") - only(work, "tp")
    assert recomputed == 4 * 2 * 8 * 2 * 3 / 4 * activation
    norms, head_again = (2 * 8 + 1) * 2 * 3 / 4 * 1024 * 4, 4 * 3 / 4 * activation
    split = replace(work, sequence_parallel=True)
    assert only(split, "tp") == only(work, "tp") + norms + head_again
    # At stage 2 gradients are taken as they come: norms are summed in each of 4 micro-batches.
    assert only(replace(split, zero_stage=2), "tp") == only(work, "tp") + 4 * norms / 2 + head_again


def test_norms_are_summed_in_one_message_of_a_step() -> None:
    work = replace(WORK, tp=4, dp=4, sequence_parallel=True)
    stage = work.stages[0]
    once = collectives(work, stage)["tp", "all-reduce"]
    each = collectives(replace(work, zero_stage=2), stage)["tp", "all-reduce"]
    assert (once.messages, each.messages) == (1, 4 * (2 * 8 + 1))
    assert each.wire_bytes == 4 * once.wire_bytes / 2  # in bf16, not in the sums' fp32


def test_gradients_and_weights_cross_dp_and_cp() -> None:
    """DeepSpeed reduces with all-reduce, in the type of the sums, here fp32; with cp in fp32."""
    parameters = WORK.stage_parameters(WORK.stages[0])
    assert only(WORK, "dp-cp") == pytest.approx(parameters * (2 * 4 + 2) * 15 / 16)
    assert only(replace(WORK, zero_stage=0), "dp-cp") == pytest.approx(2 * 4 * parameters * 15 / 16)
    assert only(replace(WORK, cp=4, dp=4), "dp-cp") == pytest.approx(parameters * (2 * 4 + 2) * 15 / 16)
    assert only(replace(WORK, framework="megatron"), "dp-cp") == pytest.approx(parameters * (4 + 2) * 15 / 16)


def test_replicated_kv_heads_have_their_gradients_summed() -> None:
    work = replace(WORK, tp=8, dp=2)
    weight = 64 * 1024 * 2
    assert only(work, "kv-replica") == 4 * 8 * 2 * 2 * 1 / 2 * weight


def test_the_ring_sends_keys_values_and_their_gradients() -> None:
    work = replace(WORK, cp=4, dp=4)
    hop = 2 * 4 * 64 * (2 * 2048 // 4) * 2
    assert only(work, "cp") == 4 * 8 * 3 * hop * (2 + 2)


def test_the_published_figures_of_a_350m_model_in_fp32_are_kept() -> None:
    """Entrenar's: 4 MiB · 2 · 24 all-reduced in forward, and 2 MiB of keys and values sent in each of 24 layers."""
    shape = llama_shape(layers=24, hidden=1024, heads=16, kv_heads=4, width=4096, vocab=32000, tied=False)
    settings = {"shape": shape, "nodes": 1, "micro_batch": 1, "micro_batches": 1, "dp": 1, "element_bytes": 4}
    tensor = replace(WORK, **settings, tp=2, sequence_length=1024)
    ends = 2 * 4 * 1024**2 + 3 * 4 * 1024
    assert only(tensor, "tp") == 2 * 201_326_592 + ends
    # Backward sends keys and values once more, and their gradients with them.
    assert only(replace(WORK, **settings, cp=2, sequence_length=2048), "cp") == 3 * 24 * 2_097_152


def test_a_stage_between_two_others_sends_both_ways_and_one_at_an_end_one_way() -> None:
    hidden = 2 * 2048 * 1024 * 2
    assert only(replace(WORK, pp=2, dp=8), "pp") == 4 * hidden
    assert only(replace(WORK, pp=4, dp=4), "pp") == 2 * 4 * hidden


def test_a_group_of_one_rank_sends_nothing() -> None:
    assert traffic(replace(WORK, dp=1, nodes=1)) == ()


def test_links_follow_where_the_ranks_lie() -> None:
    links = {one.group: one.link.name for one in traffic(replace(WORK, tp=8, dp=2))}
    assert links == {"tp": "nvlink4", "kv-replica": "nvlink4", "dp-cp": "ndr-8x"}


def test_no_collective_is_faster_than_the_hardware() -> None:
    terms, machine = step_terms(WORK), find_accelerator("h100-sxm")
    fastest = {**START, "node_link": TIME["node_link"].high, "network_link": TIME["network_link"].high}
    fastest |= {"network_ports": 1.0, "network_scale": 0.0}
    for stride, ranks in ((1, 8), (1, 16), (4, 4), (8, 2)):
        speed = bandwidth(terms, stride, ranks, fastest)
        assert speed <= machine.node_link.bytes_per_s
        if stride * ranks > 8:
            assert speed <= machine.network_link.bytes_per_s * max(1, 8 // stride)


def test_the_parts_of_a_step_add_up_and_the_bubble_is_p_minus_1_over_m() -> None:
    small = llama_shape(layers=8, hidden=1024, heads=16, kv_heads=4, width=4096, vocab=128, tied=False)
    work = replace(WORK, pp=2, dp=8, shape=small)
    step = step_time(step_terms(work), START)
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    busy = step.seconds - step.bubble - step.exchange - step.gradients - step.optimizer
    assert step.bubble / busy == pytest.approx(1 / 4, rel=0.01)


def test_a_layer_that_launches_more_kernels_takes_longer_to_launch_and_so_does_one_that_is_computed_twice() -> None:
    small = llama_shape(layers=8, hidden=64, heads=4, kv_heads=4, width=64, vocab=128, tied=False)
    values = {**START, "launch_seconds": 4e-3}

    def launching(model_type: str, **changes: object) -> float:
        step = step_time(step_terms(replace(WORK, shape=replace(small, model_type=model_type), **changes)), values)
        return step.launch + step.compute

    llama = launching("llama")
    assert llama == pytest.approx(4 * 8 * 4e-3, rel=0.02)
    assert launching("olmo2") == pytest.approx(1.53 * llama, rel=0.02)
    assert launching("llama", recompute="full") == pytest.approx(1.31 * llama, rel=0.02)
    assert launching("olmo2", framework="nanotron") == pytest.approx(llama, rel=0.02)


@pytest.mark.parametrize(("layout", "chunks"), [("contiguous", 129), ("zigzag", 130)])  # of 8224, or of twice 4112
def test_layers_that_carry_a_state_launch_kernels_for_each_chunk_of_it(layout: str, chunks: int) -> None:
    model = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"intermediate_size": 64, "max_position_embeddings": 64, "vocab_size": 128}
    shape = shape_from_config({"model_type": "qwen3_5_text", **model, **sizes})
    work = replace(WORK, shape=shape, dp=8, cp=2, cp_layout=layout, sequence_length=2 * 8224)
    step = step_time(step_terms(work), {**START, "launch_seconds": 4e-3})
    counted = shipped("parcompile.cost", "launches.json")["qwen3_5_text"]
    state, chunk, other = (counted[key][0] for key in ("states", "chunk", "others"))
    launches = 6 * (state + chunks * chunk) + 2 * other
    assert step.launch + step.compute + step.context == pytest.approx(4 * launches * 4e-3, rel=1e-3)


def test_utilisation_follows_its_convention() -> None:
    timed = timing(WORK)
    per_token = 6 * matmul_parameters(SHAPE) + 12 * 8 * 16 * 64 * 2048
    assert model_flops_per_token(SHAPE, 2048) == per_token
    rate = WORK.tokens_per_step / timed.step.seconds / 16
    assert timed.utilisation == pytest.approx(rate * per_token / find_accelerator("h100-sxm").flops_per_s)
    assert 0 < timed.utilisation < 1


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2_moe", "moe_intermediate_size": 96, "shared_expert_intermediate_size": 384},
        {"model_type": "deepseek_v2", "moe_intermediate_size": 96, "n_shared_experts": 2, "kv_lora_rank": 32},
        {"model_type": "mixtral"},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_token_passes_its_routed_experts_and_the_whole_shared_ones(config: dict[str, object]) -> None:
    sizes = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 640}
    counts = {"vocab_size": 512, "max_position_embeddings": 64, "num_experts_per_tok": 2, "num_key_value_heads": 8}
    shape = shape_from_config(sizes | counts | config)
    assert shape.moe is not None
    share = shape.moe.num_experts_per_token / shape.moe.num_experts
    active = 0.0
    for one in parameter_table(shape):
        # Norms and biases have one dim; the embedding only looks rows up, and the gate of a shared expert has one row.
        if len(one.shape) > 1 and "embed" not in one.name and one.shape[0] > 1:
            active += one.numel * one.count * (share if one.expert_dim is not None else 1)
    assert matmul_parameters(shape) == pytest.approx(active)


def test_matmul_parameters_are_those_of_the_model_without_embedding_and_norms() -> None:
    shape = gpt_shape(24, 2304, 24)
    assert matmul_parameters(shape) == 24 * 12 * 2304**2 + 51200 * 2304


def test_every_figure_of_an_accelerator_has_a_source() -> None:
    for machine in accelerators().values():
        assert machine.sources.get("bf16_flops_per_s")
        assert machine.sources.get("memory_bytes_per_s")
        assert machine.memory_bytes is None or machine.sources.get("memory_mib")
        assert machine.node_link.source
        assert machine.network_link.source


def test_an_unknown_accelerator_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="'h1000'; there are: a100-40gb"):
        find_accelerator("h1000")
