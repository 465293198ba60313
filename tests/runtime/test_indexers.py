"""An indexer chooses the same keys in every layout as in one process: packed documents, recomputed layers, bad input.

The reference is transformers' own model on the whole batch. Whole models in every layout: test_families.py; generation:
test_generation.py.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close, nudge
from families import tiny_config
from family_runs import drawn_model, family_plan
from ranks import run_ranks
from torch import Tensor, nn

from parcompile.layout.sequence import CpLayout
from parcompile.model.blocks.indexer import Indexer
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.plan import Plan
from parcompile.runtime.ring_attention import (
    PackedCollator,
    order_of_packing,
    order_of_sequence,
    pack_documents,
    pack_tensors,
    packed_attention,
    ring_attention,
    split_sequence,
)

FAMILY, RANKS = "glm_moe_dsa, shared choice", 2
BORDERS = [[0, 3, 16], [0, 9, 16]]
"""Documents of two rows, shorter and longer than the 5 keys that an indexer chooses."""

PACKED = (9, 4, 12, 3)
"""Lengths of documents that are packed for each rank."""

CPU = torch.device("cpu")


def rows_of_documents() -> dict[str, Tensor]:
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(3))
    return _batch(ids, [[stop - start for start, stop in itertools.pairwise(row)] for row in BORDERS])


def joined_documents() -> dict[str, Tensor]:
    return _batch(torch.cat(documents())[None], [list(PACKED)])


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 61, (length,), generator=generator) for length in PACKED]


def _batch(ids: Tensor, lengths: list[list[int]]) -> dict[str, Tensor]:
    positions, labels = torch.empty_like(ids), torch.full_like(ids, -100)
    for row, of_row in enumerate(lengths):
        start = 0
        for length in of_row:
            positions[row, start : start + length] = torch.arange(length)
            labels[row, start : start + length - 1] = ids[row, start + 1 : start + length]
            start += length
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "shift_labels": labels}


def gradients(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch, use_cache=False).loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def chosen_over_ranks(rank: int, plan: Plan) -> list[dict[str, Tensor]]:
    from parcompile.runtime import join
    from parcompile.runtime.inject import inject
    from parcompile.runtime.inject.regions import recompute_as_planned

    mesh = join(plan)
    model = inject(drawn_model(plan), mesh)
    recompute_as_planned(model, plan, rank)
    rows = {name: split_sequence(one, 1, "zigzag", RANKS, rank) for name, one in rows_of_documents().items()}
    batches = {**rows, "documents": BORDERS}, PackedCollator(RANKS, rank, 0)(documents())
    found = [gradients(model, batch) for batch in batches]
    for one in found:
        for gradient in one.values():
            dist.all_reduce(gradient)
    return found


@pytest.mark.ranks
def test_packed_documents_choose_as_in_one_process_and_recompute_what_they_chose() -> None:
    plan = family_plan(FAMILY, RANKS, {"cp": RANKS})
    training = replace(plan.spec.training, activation_checkpointing="full")
    ranks = run_ranks(RANKS, chosen_over_ranks, replace(plan, spec=replace(plan.spec, training=training)), timeout=120)
    for place, batch in enumerate((rows_of_documents(), joined_documents())):

        def alone(seed: int | None, batch: dict[str, Tensor] = batch) -> dict[str, Tensor]:
            model = drawn_model(family_plan(FAMILY, 1, {}))
            nudge(model, seed)
            return gradients(model, batch)

        expected = alone(None)
        assert not [name for name in expected if ".indexer." in name], "transformers trains no indexer"
        for rank in ranks:
            real = {name: one[: len(expected[name])] for name, one in rank[place].items()}  # without padded rows
            assert_close(real, expected, rerun=alone, about=str(place))


@pytest.mark.parametrize("layout", list(CpLayout))
def test_every_rank_knows_the_place_of_its_tokens_and_the_keys_of_their_documents(layout: CpLayout) -> None:
    length, ranks, borders = 8, 3, ((0, 5, 24), (0, 24))
    every = torch.arange(24)
    orders = [order_of_sequence(length, layout, ranks, rank, borders, CPU) for rank in range(ranks)]
    held = torch.cat([order.places for order in orders])
    assert torch.equal(held[orders[0].gathered], every)
    for order in orders:
        seen = order.seen(slice(None))
        for row, edges in enumerate(borders):
            for place, keys in zip(order.places.tolist(), seen[row], strict=True):
                first = max(edge for edge in edges if edge <= place)
                assert keys.nonzero().flatten().tolist() == list(range(first, place + 1))


def test_packed_documents_are_in_the_order_of_the_batch_and_padding_sees_nothing() -> None:
    packing = pack_documents(PACKED, RANKS)
    firsts = [0, 9, 13, 25]
    places = [torch.arange(first, first + length) for first, length in zip(firsts, PACKED, strict=True)]
    for rank in range(RANKS):
        order, own = order_of_packing(packing, rank, CPU), pack_tensors(places, packing, rank, -1)
        assert torch.equal(order.places, own)
        assert order.length == sum(PACKED)
        seen = order.seen(slice(None))[0].sum(1)
        for place, count in zip(own.tolist(), seen.tolist(), strict=True):
            assert count == (0 if place < 0 else 1 + place - max(first for first in firsts if first <= place))


def test_a_bias_of_packed_documents_has_the_columns_of_the_documents() -> None:
    packing = pack_documents(PACKED, 1)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 2, packing.local_tokens, 8, generator=generator) for _ in range(3))
    total = sum(PACKED)
    bias = torch.randn(1, 1, total, total, generator=generator)
    order = order_of_packing(packing, 0, CPU)
    real = order.places >= 0
    out = packed_attention(query, key, value, packing, rank=0, bias=bias[:, :, order.places.clamp(min=0)])
    natural = [one[:, :, order.gathered] for one in (query, key, value)]
    edges = [0, *itertools.accumulate(PACKED)]
    expected = ring_attention(*natural, documents=edges, bias=bias)
    assert_close(out[:, :, real], expected[:, :, order.places[real]])


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v32", {"num_experts": 4}, "num_experts"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("deepseek_v32", {"index_head_dim": 2}, "index_head_dim"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "indexer_types"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full"]}, "indexer_types"),
        ("glm_moe_dsa", {"index_topk_pattern": "FX"}, "index_topk_pattern"),
        ("glm_moe_dsa", {"index_topk_freq": "2"}, "index_topk_freq"),
        ("axk2", {"topk_group": None}, "n_group"),
        ("axk2", {"mlp_layer_types": None, "moe_layer_freq": 0}, "moe_layer_freq"),
        ("hy_v4", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("hy_v4", {"swiglu_limit": 0.0}, "swiglu_limit"),
        ("hy_v4", {"indexer_types": ["shared", "full"]}, "indexer_types"),
        ("hy_v4", {"indexer_types": "FF"}, "indexer_types"),
        ("dots3_note_text", {"layer_types": ["indexed_attention"]}, "layer_types"),
        ("dots3_note_text", {"layer_types": ["indexed_attention", "conv"]}, "layer_types"),
        ("dots3_note_text", {"swa_num_key_value_heads": 1}, "swa_num_key_value_heads"),
        ("dots3_note_text", {"mlp_layer_types": None, "moe_layer_freq": [0, 1, 0]}, "moe_layer_freq"),
        ("dots3_note_text", {"per_layer_config": {"1": {"hidden_size": 8}}}, "per_layer_config.1."),
    ],
)
def test_what_an_indexer_cannot_be_built_from_is_refused_by_key(family: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        shape_from_config(tiny_config(family, **changes))
    assert error.value.key == key


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_dsa": False},
        {"layer_types": None, "num_hidden_layers": 6, "mlp_layer_types": None, "moe_layer_freq": [0, 0, *[1] * 4]},
        {"layer_types": None, "use_sliding_window": False},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {
            "swa_qk_rope_head_dim": 8,
            "swa_head_dim": 14,
            "moe_shared_expert_intermediate_size": 28,
            "n_shared_experts": 3,
        },
    ],
)
def test_files_of_before_and_what_transformers_saves_of_them_describe_the_same_model(changes: dict[str, Any]) -> None:
    from transformers import Dots3NoteForCausalLM, Dots3NoteTextConfig

    config = tiny_config("dots3_note_text", **changes)
    if "moe_layer_freq" in changes:
        config |= {"first_k_dense_replace": 2}
    built = Dots3NoteTextConfig(**{key: value for key, value in config.items() if key != "model_type"})
    with torch.device("meta"):
        model = Dots3NoteForCausalLM(built)
    expected = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    for one in (config, json.loads(built.to_json_string(use_diff=False))):
        table = parameter_table(shape_from_config(one))
        assert [(name, parameter.shape) for name, parameter in table.expanded()] == expected


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"index_topk_freq": 2},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"index_topk_freq": 4, "index_skip_topk_offset": 4},
        {"index_topk_pattern": "FSSFSFS"},
        {"index_topk_pattern": ["full", *["shared"] * 6], "index_topk_freq": 2},
    ],
)
def test_the_layers_with_an_indexer_are_those_of_transformers(schedule: dict[str, Any]) -> None:
    from transformers import GlmMoeDsaConfig

    config = tiny_config("glm_moe_dsa", num_hidden_layers=7, mlp_layer_types=["sparse"] * 7, **schedule)
    indexer = shape_from_config(config).part(Indexer)
    assert indexer is not None
    kinds = GlmMoeDsaConfig(**{key: value for key, value in config.items() if key != "model_type"}).indexer_types
    assert indexer.layers == tuple(layer for layer, kind in enumerate(kinds) if kind == "full")
