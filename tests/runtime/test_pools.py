"""An indexer chooses the same pools of keys in every layout as in one process, and pools begin anew in each document.

The reference is transformers' own model, which takes each document alone. Whole models in every layout:
test_families.py; generation: test_generation.py.
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
from parcompile.model.blocks.indexer import FULL, SHARED
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.presets import left_out, text_part
from parcompile.plan import Plan
from parcompile.runtime.model.text_head import causal_model
from parcompile.runtime.ring_attention import PackedCollator, order_of_sequence, split_sequence

FAMILY, RANKS = "glm5_next_text", 2
BORDERS = [[0, 1, 8, 16], [0, 11, 13, 16]]
"""Documents of two rows: shorter than a pool of 2 tokens, with tokens behind the last pool, and over both ranks."""
PACKED = (9, 4, 12, 3)
"""Lengths of documents that are packed for the ranks."""


def documents_of_rows() -> list[Tensor]:
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(3))
    return [ids[row, start:stop] for row, edges in enumerate(BORDERS) for start, stop in itertools.pairwise(edges)]


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 61, (length,), generator=generator) for length in PACKED]


def rows() -> dict[str, Tensor]:
    """The documents of two rows, each counted from its own beginning."""
    every = [documents_of_rows()[:3], documents_of_rows()[3:]]
    labels = [[torch.cat([one[1:], torch.tensor([-100])]) for one in row] for row in every]
    return {
        "input_ids": torch.stack([torch.cat(row) for row in every]),
        "position_ids": torch.stack([torch.cat([torch.arange(len(one)) for one in row]) for row in every]),
        "labels": (shifted := torch.stack([torch.cat(row) for row in labels])),
        "shift_labels": shifted,
    }


def gradients(model: nn.Module, *batches: dict[str, Any]) -> dict[str, Tensor]:
    """Of the sum of the losses of all labels."""
    model.zero_grad()
    count = sum(int((one["labels"][:, 1:] != -100).sum()) for one in batches) if len(batches) > 1 else 1
    for batch in batches:
        share = int((batch["labels"][:, 1:] != -100).sum()) / count if len(batches) > 1 else 1.0
        if share:
            (model(**batch, use_cache=False).loss * share).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def chosen_over_ranks(rank: int, plan: Plan) -> list[dict[str, Tensor]]:
    from parcompile.runtime import join
    from parcompile.runtime.inject import inject
    from parcompile.runtime.inject.regions import recompute_as_planned

    mesh = join(plan)
    model = inject(drawn_model(plan), mesh)
    recompute_as_planned(model, plan, rank)
    own = {name: split_sequence(one, 1, "zigzag", RANKS, rank) for name, one in rows().items()}
    batches = {**own, "documents": BORDERS}, PackedCollator(RANKS, rank, 0)(documents())
    found = [gradients(model, one) for one in batches]
    for one in found:
        for gradient in one.values():
            dist.all_reduce(gradient)
    return found


@pytest.mark.ranks
def test_packed_documents_choose_pools_as_each_alone_and_recompute_what_they_chose() -> None:
    plan = family_plan(FAMILY, RANKS, {"cp": RANKS})
    training = replace(plan.spec.training, activation_checkpointing="full")
    ranks = run_ranks(RANKS, chosen_over_ranks, replace(plan, spec=replace(plan.spec, training=training)), timeout=120)
    for place, given in enumerate((documents_of_rows(), documents())):

        def alone(seed: int | None, given: list[Tensor] = given) -> dict[str, Tensor]:
            model = drawn_model(family_plan(FAMILY, 1, {}))
            nudge(model, seed)
            return gradients(model, *({"input_ids": one[None], "labels": one[None]} for one in given if len(one) > 1))

        expected = alone(None)
        assert not [name for name in expected if ".indexer." in name], "transformers trains no indexer"
        # A gradient that is next to nothing beside the others is their rounding.
        least = 1e-2 * max(float(one.norm()) for one in expected.values())
        for rank in ranks:
            real = {name: one[: len(expected[name])] for name, one in rank[place].items()}  # without padded rows
            assert_close(real, expected, rerun=alone, least=least, about=str(place))


@pytest.mark.parametrize("layout", list(CpLayout))
def test_runs_are_all_tokens_of_a_rank_that_follow_one_another_in_a_document(layout: CpLayout) -> None:
    length, ranks, borders = 8, 3, ((0, 5, 24), (0, 24))
    for rank in range(ranks):
        order = order_of_sequence(length, layout, ranks, rank, borders, torch.device("cpu"))
        for row, edges in enumerate(borders):
            runs = [run for run in order.runs() if run.rows == slice(row, row + 1)]
            assert [place for run in runs for place in range(run.tokens.start, run.tokens.stop)] == list(range(length))
            for run in runs:
                places = order.places[run.tokens].tolist()
                assert places == list(range(run.end - len(places), run.end))
                assert (run.first, run.stop) in itertools.pairwise(edges)
                assert run.first <= places[0]
                assert run.end <= run.stop


def whole_sizes(**changes: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The parameters of the model that transformers builds."""
    from transformers import Glm5NextTextConfig

    config = tiny_config(FAMILY, **changes)
    with torch.device("meta"):
        model = causal_model(Glm5NextTextConfig(**{key: value for key, value in config.items() if key != "model_type"}))
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"linear_attn_config": {"num_heads": 2, "head_dim": 10, "short_conv_kernel_size": 3, "gate_lower_bound": -1.0}},
        {"layer_types": ["linear_attention", "full_attention"] * 2, "indexer_types": None},
        {"layer_types": None, "indexer_types": None, "mlp_layer_types": None, "num_hidden_layers": 9},
        {"indexer_types": None, "index_topk_pattern": "FSFF"},
        {"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 2},
        {"attention_bias": True, "tie_word_embeddings": True, "n_shared_experts": 3, "head_dim": 12},
        {"layer_types": ["linear_attention"] * 4},
        {"layer_types": ["indexed_attention"] * 4},
    ],
)
def test_the_ways_to_write_a_configuration_describe_the_model_that_transformers_builds(changes: dict[str, Any]) -> None:
    table = parameter_table(shape_from_config(tiny_config(FAMILY, **changes)))
    assert [(name, parameter.shape) for name, parameter in table.expanded()] == whole_sizes(**changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"qk_rope_head_dim": 4}, "qk_rope_head_dim"),
        ({"index_kpool": 3}, "index_topk"),
        ({"index_kpool": 0}, "index_kpool"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
        ({"layer_types": ["attention", *["linear_attention"] * 3]}, "layer_types"),
        ({"layer_types": ["indexed_attention", "conv"] * 2}, "layer_types"),
        ({"indexer_types": [FULL, SHARED, SHARED, SHARED]}, "indexer_types"),
        ({"indexer_types": [SHARED, FULL, FULL, FULL]}, "indexer_types"),
        ({"indexer_types": None, "index_topk_freq": 4, "layer_types": None}, "index_topk_freq"),
        ({"linear_attn_config": {"num_heads": 0}}, "linear_attn_config"),
        ({"linear_attn_config": {"num_heads": None}}, "linear_attn_config"),
        ({"linear_attn_config": {"gate_lower_bound": -5}}, "linear_attn_config"),
        ({"linear_attn_config": []}, "linear_attn_config"),
        ({"mlp_layer_types": ["dense", "moe", "sparse", "sparse"]}, "mlp_layer_types"),
        ({"n_group": 3}, "n_group"),
    ],
)
def test_what_transformers_cannot_build_or_run_is_refused_by_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        shape_from_config(tiny_config(FAMILY, **changes))
    assert error.value.key == key


def test_a_choice_is_shared_by_the_next_layer_only() -> None:
    """Where it is refused, transformers' model finds no choice."""
    from transformers import Glm5NextTextConfig

    config = tiny_config(FAMILY, layer_types=["indexed_attention"] * 4, indexer_types=[FULL, SHARED, SHARED, FULL])
    with pytest.raises(ModelConfigError, match=r"layer 2 is shared, and the layer before it has no indexer"):
        shape_from_config(config)
    model = causal_model(Glm5NextTextConfig(**{key: value for key, value in config.items() if key != "model_type"}))
    with pytest.raises(ValueError, match="top-k indices from a previous full indexer layer"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))


def test_a_file_of_text_alone_is_the_text_part_that_transformers_makes_of_it() -> None:
    from transformers import Glm5NextConfig

    sizes = {key: value for key, value in tiny_config(FAMILY).items() if key != "model_type"}
    flat = {"model_type": "glm5_next", "image_start_token_id": 3, "tie_word_embeddings": True, **sizes}
    made = Glm5NextConfig(**{key: value for key, value in flat.items() if key != "model_type"})
    assert text_part(flat) == {**sizes, "model_type": FAMILY, "tie_word_embeddings": True}
    assert left_out(flat) == ("image_start_token_id",)
    stored = json.loads(made.to_json_string(use_diff=False))
    shapes = [shape_from_config(text_part(one)) for one in (flat, stored)]
    assert [parameter_table(one).numel for one in shapes] == [parameter_table(shapes[0]).numel] * 2
    assert made.get_text_config().hidden_size == shapes[0].hidden_size
