"""Implementations of context parallelism: what each sends and costs, which is chosen, and what targets make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from published_runs import llama_shape

from parcompile.backends import torchtitan
from parcompile.backends.megatron import write as megatron
from parcompile.cost.context_exchanges import context_exchanges
from parcompile.cost.context_time import candidates, cheapest, costs
from parcompile.cost.traffic import traffic
from parcompile.cost.workload import Workload
from parcompile.layout.sequence import ContextParallel, CpImplementation, CpLayout, ring_holder, ring_source
from parcompile.model.layers import LayerAttention, LayerShape, kinds_of_layers
from parcompile.plan import Plan, compile_plan, plan_tree
from parcompile.rules import check, example_spec
from parcompile.spec.resolve import Resolution

SHAPE = llama_shape(layers=8, hidden=1024, heads=16, kv_heads=4, width=4096, vocab=32000, tied=False)
WORK = Workload(
    shape=SHAPE,
    nodes=2,
    gpus_per_node=8,
    accelerator="h100-sxm",
    sequence_length=65536,
    micro_batch=1,
    micro_batches=4,
    cp=16,
)
LOCAL = 65536 // 16
KEYS = LOCAL * 4 * 2 * 64 * 2
"""Bytes of keys and values of a rank: tokens, heads, both, head dim, bf16."""
QUERIES = LOCAL * 16 * 2 * 64 * 2
"""The same of queries and outputs."""


def sent(implementation: str, sizes: tuple[int, int] | None = None, **changes: Any) -> dict[str, float]:
    """Bytes of a layer and micro-batch, by the kind of groups."""
    work = replace(WORK, cp_implementation=implementation, cp_sizes=sizes, **changes)
    return {one.group: one.wire_bytes for one in context_exchanges(work)}


def test_bytes_of_each_implementation() -> None:
    # Forward keys; backward keys again, with fp32 gradients, of twice their size.
    assert sent("ring") == sent("all_gather") == {"cp": 15 * KEYS * 4}
    assert sent("double_ring", (8, 2)) == {"cp-inner": 14 * KEYS * 4, "cp-outer": 1 * KEYS * 4}
    # Four key/value heads are repeated for eight and for sixteen ranks.
    assert sent("usp", (8, 2)) == {"cp-inner": 2 * (QUERIES + 2 * KEYS) * 7 / 8, "cp-outer": 2 * KEYS * 4}
    assert sent("usp", (4, 4)) == {"cp-inner": 2 * (QUERIES + KEYS) * 3 / 4, "cp-outer": 3 * KEYS * 4}
    assert sent("ulysses") == {"cp": 2 * (QUERIES + 4 * KEYS) * 15 / 16}
    # A recomputed layer exchanges heads once more; the ring's result is kept.
    assert sent("ulysses", recompute="full") == {"cp": 3 * (QUERIES + 4 * KEYS) * 15 / 16}
    assert sent("ring", recompute="full") == sent("ring")


def test_keys_go_around_as_far_as_a_window_reaches_where_every_layer_has_it() -> None:
    """Neighbouring pieces of a zigzag are one step apart, or one step back. Of gpt_oss other layers see all keys."""
    for model_type, hops in (("mistral", 2), ("gpt_oss", 15)):
        shape = replace(SHAPE, model_type=model_type, attention=LayerAttention(sliding_window=1024))
        assert sent("ring", shape=shape) == sent("all_gather", shape=shape) == {"cp": hops * KEYS * 4}
        assert sum(sent("double_ring", (8, 2), shape=shape).values()) == 15 * KEYS * 4


def test_levels_use_the_links_on_which_they_lie() -> None:
    work = replace(WORK, cp_implementation="usp", cp_sizes=(8, 2))
    links = {one.group: (one.link.name, one.leaves_node) for one in traffic(work) if one.group.startswith("cp-")}
    assert links == {"cp-inner": ("nvlink4", False), "cp-outer": ("ndr-8x", True)}


def test_a_double_ring_crosses_nodes_in_few_steps_and_never_costs_more_than_the_ring() -> None:
    short = replace(WORK, sequence_length=8192)
    seconds = {one.context.name: one.seconds for one in costs(short, candidates(short)[0])}
    assert seconds["double_ring 8 × 2"] < seconds["ring"]
    assert seconds["double_ring 8 × 2"] <= min(seconds["double_ring 4 × 4"], seconds["double_ring 2 × 8"])


def test_of_equally_fast_ones_the_simplest_is_chosen() -> None:
    work = replace(WORK, nodes=1, cp=8, sequence_length=262_144)
    possible, refused = candidates(work)
    assert refused == []
    assert cheapest(work, possible).context == ContextParallel(CpImplementation.RING, 8)


def test_contiguous_chunks_are_even_once_heads_are_exchanged() -> None:
    ring, ulysses = (ContextParallel(CpImplementation(name), 4) for name in ("ring", "ulysses"))
    assert ulysses.balance(CpLayout.CONTIGUOUS) == 1 > ring.balance(CpLayout.CONTIGUOUS)
    contiguous = replace(WORK, nodes=1, cp=4, cp_layout="contiguous", sequence_length=131_072)
    assert cheapest(contiguous, candidates(contiguous)[0]).context.implementation is CpImplementation.ULYSSES


@pytest.mark.parametrize(("size", "inner"), [(4, 4), (4, 2), (6, 3), (8, 2), (8, 4)])
def test_every_place_of_a_ring_meets_each_source_once_and_the_holder_knows_it(size: int, inner: int) -> None:
    for place in range(size):
        sources = [ring_source(step, place, size, inner) for step in range(size)]
        assert sources[0] == place
        assert sorted(sources) == list(range(size))
        assert all(ring_holder(step, source, size, inner) == place for step, source in enumerate(sources))


OWN = LayerShape(
    SHAPE.num_key_value_heads, SHAPE.head_dim, SHAPE.intermediate_size, attention=LayerAttention(sliding_window=1024)
)
WIDE = replace(OWN, num_key_value_heads=2, head_dim=4 * SHAPE.head_dim, attention=LayerAttention())


def test_each_exchange_hides_behind_the_attention_of_its_own_layer() -> None:
    work = replace(WORK, nodes=1, cp=4, shape=replace(SHAPE, kinds=kinds_of_layers([OWN, OWN, OWN, WIDE])))
    ring = ContextParallel(CpImplementation.RING, 4)
    (narrow, wide), mixed = (
        [costs(replace(work, shape=one), [ring])[0] for _, one in work.shape.by_kind],
        costs(work, [ring])[0],
    )
    assert wide.exposed == 0 < narrow.exposed, "a window leaves too little attention to hide the ring behind"
    assert mixed.exposed == pytest.approx(3 / 4 * narrow.exposed)
    assert mixed.seconds == pytest.approx((3 * narrow.seconds + wide.seconds) / 4)
    assert mixed.wire_bytes == pytest.approx(
        sum(one.wire_bytes for one in context_exchanges(replace(work, cp_implementation="ring")))
    )


def test_heads_are_exchanged_only_where_those_of_every_layer_can_be() -> None:
    shape = replace(SHAPE, num_attention_heads=12, num_key_value_heads=12)
    few = replace(OWN, num_key_value_heads=4)
    kinds = kinds_of_layers([replace(OWN, num_key_value_heads=12), few])
    work = replace(WORK, nodes=1, cp=6, shape=replace(shape, kinds=kinds))
    refused = {kind: why for kind, _, why in candidates(work)[1]}
    assert refused[CpImplementation.ULYSSES] == "4 key/value heads and 6 ranks: neither is a multiple of the other"
    assert CpImplementation.ULYSSES not in {kind for kind, _, _ in candidates(replace(work, shape=shape))[1]}


def test_c005_reads_the_heads_of_every_kind_of_layer() -> None:
    model = {
        "model_type": "gemma4_text",
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size": 262144,
        "max_position_embeddings": 131072,
    }
    tree = {
        "version": 1,
        "model": model,
        "cluster": {"nodes": 1, "gpus_per_node": 6, "accelerator": "h100-sxm"},
        "parallelism": {"cp": 6, "cp_implementation": "ulysses"},
        "training": {"sequence_length": 6144, "global_batch_size": 6},
    }
    (found,) = [one for one in check(Resolution(tree)) if one.code == "C005"]
    assert "4 key/value heads and 6 ranks: neither is a multiple of the other" in found.message
    assert "possible: 1, 2, 4, 12 ranks" in found.message
    alike = {**tree, "model": {**model, "num_global_key_value_heads": 12}}
    assert not [one for one in check(Resolution(alike)) if one.code == "C005"]


def plan_of(**parallelism: Any) -> Plan:
    tree = example_spec(
        {"cluster": {"nodes": 2}, "parallelism": parallelism, "training": {"sequence_length": 16384}},
    )
    resolution = Resolution(tree)
    found = check(resolution)
    assert not [one.message for one in found if one.is_error]
    return compile_plan(resolution.spec(), tree, found)


def test_auto_is_decided_with_its_reasons_and_the_costs_of_the_others() -> None:
    plan = plan_of(cp=16, cp_implementation="auto")
    tree = plan_tree(plan)
    assert '"auto"' not in json.dumps(tree)
    name = tree["parallelism"]["cp_implementation"]
    why = tree["provenance"]["parallelism.cp_implementation"]
    assert (why["value"], why["origin"]) == (name, "derived")
    for implementation in CpImplementation:
        assert f"{implementation.value} " in why["detail"]
    rows = tree["sequence"]["implementation"]["choices"]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert {row["name"] for row in rows} == {one.value for one in CpImplementation}


def test_sizes_that_are_left_out_keep_the_inner_level_on_a_node() -> None:
    plan = plan_of(tp=2, cp=8, cp_implementation="usp")
    assert plan.spec.parallelism.hierarchical_cp_sizes == (4, 2)
    groups = plan.groups
    assert {"cp-inner", "cp-outer"} <= set(groups.names)
    assert groups.of_rank("cp-inner", 9) == (9, 11, 13, 15)
    assert groups.of_rank("cp-outer", 9) == (1, 9)
    # Nothing but usp needs these groups.
    assert not {"cp-inner", "cp-outer"} & set(plan_of(tp=2, cp=8, cp_implementation="double_ring").groups.all_names)


@pytest.mark.parametrize(
    ("implementation", "kind"),
    [("ring", "p2p"), ("double_ring", "p2p"), ("all_gather", "all_gather"), ("ulysses", "a2a"), ("usp", "a2a+p2p")],
)
def test_megatrons_name_of_an_implementation(implementation: str, kind: str) -> None:
    plan = plan_of(tp=2, cp=4, cp_implementation=implementation)
    found = megatron.arguments(plan)
    assert found["cp_comm_type"] == [kind]
    assert found.get("hierarchical_context_parallel_sizes") == ([2, 2] if implementation == "usp" else None)
    lost = [one.what for one in megatron.losses(plan)]
    assert ("cp_implementation double_ring" in lost) == (implementation == "double_ring")


def test_what_other_launchers_cannot_do_is_said() -> None:
    plan = plan_of(tp=4, cp=4, cp_implementation="ulysses", cp_layout="striped")
    fatal = [one.what for one in megatron.losses(plan) if one.fatal]
    assert fatal == ["cp_implementation ulysses with 2 key/value heads on a rank"]
    assert {"cp_layout striped", "cp_implementation ulysses"} <= {one.what for one in torchtitan.losses(plan)}
