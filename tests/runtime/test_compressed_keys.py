"""Keys that stand for windows of tokens: attention over them, packed documents, and what a plan says of them.

The reference is transformers' own model, which takes each document alone. Whole models in every layout:
test_families.py; experts that are looked up by tokens over ep: test_expert_parallel.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from closeness import assert_close, judge, nudge
from families import tiny_config
from family_runs import CLIPPING, STEPS, drawn_model, family_plan, named, optimizer_of, train_injected
from ranks import run_ranks
from torch import Tensor, nn
from training_runs import compared

from parcompile.cost.blocks import window_tokens
from parcompile.cost.context_exchanges import windowed_hops
from parcompile.layout.sequence import CpLayout
from parcompile.runtime import RunError
from parcompile.runtime.preflight import preflight
from parcompile.runtime.ring_attention import attention_beside, windows_of
from parcompile.runtime.ring_attention.route import Masking, needed_steps
from parcompile.spec.values import Precision

FAMILY = "deepseek_v4"
BORDERS, SHORT = ((0, 1, 4, 16), (0, 11, 13, 16)), (0, 4, 8, 12, 16)
"""Documents of two rows: shorter than a window of 2 or 5 tokens, with tokens behind the last whole one, and of one
window and more."""


def dense(query: Tensor, key: Tensor, further: Tensor, bias: Tensor, sinks: Tensor, window: int) -> Tensor:
    """What transformers' eager attention gives."""
    length = query.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    own = torch.zeros(length, length).masked_fill((distance < 0) | (distance >= window), -math.inf)
    mask = torch.cat([own.expand(len(query), 1, -1, -1), bias], -1)
    keys = torch.cat([key, further], 2)
    scores = query @ keys.transpose(2, 3) * query.shape[3] ** -0.5 + mask
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(len(query), -1, length, 1)], -1)
    return scores.softmax(-1)[..., :-1] @ keys


@pytest.mark.parametrize("tiled", [False, True])
def test_further_keys_are_one_more_block_of_attention(tiled: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    rate, length = 3, 20
    shapes = {"query": (2, 4, length, 8), "key": (2, 1, length, 8), "further": (2, 1, length // rate, 8), "sinks": (4,)}
    given = {name: torch.randn(shape, generator=generator, requires_grad=True) for name, shape in shapes.items()}
    ready = (torch.arange(length) + 1)[:, None] // rate > torch.arange(length // rate)
    hidden = ~ready | (torch.rand(2, 1, length, length // rate, generator=generator) < 0.3)
    bias = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
    assert bool(hidden.all(-1).any()), "some queries see no further key"
    tiles = [(slice(start, start + 5), slice(0, (start + 5) // rate)) for start in range(0, length, 5)]
    out = attention_beside(
        given["query"], given["key"], given["key"], given["further"], bias,
        tiles=tiles if tiled else None, sinks=given["sinks"], window=5,
    )  # fmt: skip
    expected = dense(given["query"], given["key"], given["further"], bias, given["sinks"], 5)
    assert_close(out, expected)
    weights = torch.randn(out.shape, generator=generator)
    found, wanted = (torch.autograd.grad((one * weights).sum(), list(given.values())) for one in (out, expected))
    assert_close(dict(zip(given, found, strict=True)), dict(zip(given, wanted, strict=True)))


def tokens() -> Tensor:
    return torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(3))


def packed(rows: tuple[tuple[int, ...], ...] = BORDERS) -> dict[str, Tensor]:
    """The rows of documents, each counted from its own beginning."""
    ids = tokens()
    positions = torch.stack(
        [torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(borders)]) for borders in rows]
    )
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


@cache
def alone(seed: int | None = None) -> dict[str, Any]:
    """transformers' model, which gets each document alone: its compressor would make windows over their ends."""
    model, ids = drawn_model(family_plan(FAMILY, 1, {})), tokens()
    nudge(model, seed)
    documents = [
        ids[row : row + 1, start:stop]
        for row, borders in enumerate(BORDERS)
        for start, stop in itertools.pairwise(borders)
        if stop - start > 1
    ]
    count = sum(one.shape[1] - 1 for one in documents)
    optimizer, found = optimizer_of(model), {"losses": [], "norms": []}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack(
            [model(input_ids=one, labels=one).loss * (one.shape[1] - 1) / count for one in documents]
        ).sum()
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
    assert not [name for name, one in model.named_parameters() if ".indexer." in name and one.grad is not None]
    return {**found, "parameters": named(model)}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "parallelism",
    [
        {"tp": 2, "sequence_parallel": True},
        {"cp": 2},
        {"cp": 2, "cp_layout": "contiguous"},
        {"cp": 2, "cp_implementation": "all_gather"},
        {"tp": 2, "cp": 2, "sequence_parallel": True},
    ],
    ids=str,
)
def test_windows_of_packed_documents_begin_anew_in_each(parallelism: dict[str, Any]) -> None:
    size = math.prod(parallelism.get(axis, 1) for axis in ("tp", "cp"))
    plan = family_plan(FAMILY, size, parallelism)
    ranks = [found for (found,) in run_ranks(size, train_injected, [plan], packed(), timeout=120)]
    assert "error" not in ranks[0], ranks[0]["error"]
    judge(compared(plan, ranks, alone))


@pytest.mark.ranks
@pytest.mark.parametrize(("parallelism", "rows"), [({"dp": 2}, (SHORT, (0, 16))), ({"cp": 2}, (SHORT, SHORT))], ids=str)
def test_weights_have_gradients_where_no_document_has_a_window(
    parallelism: dict[str, int], rows: tuple[tuple[int, ...], ...]
) -> None:
    """Ranks reduce gradients together: of the same weights, though the documents of one are shorter than 5 tokens."""
    plan = family_plan(FAMILY, 2, parallelism)
    for (found,) in run_ranks(2, train_injected, [plan], packed(rows), timeout=120):
        assert "error" not in found, found["error"]


@pytest.mark.parametrize(
    ("parallelism", "recompute"),
    [
        ({}, "none"),
        ({"tp": 2, "sequence_parallel": True}, "full"),
        ({"tp": 2}, "full"),
        ({"pp": 2}, "none"),
        ({"cp": 4}, "none"),
        ({"cp": 4, "cp_layout": "contiguous"}, "none"),
        ({"cp": 4, "cp_implementation": "all_gather"}, "none"),
        ({"tp": 2, "cp": 2, "sequence_parallel": True}, "full"),
    ],
)
def test_preflight_counts_what_the_estimate_says(parallelism: dict[str, Any], recompute: str) -> None:
    sizes = {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "head_dim": 64,
        "q_lora_rank": 96,
        "o_groups": 4,
        "o_lora_rank": 48,
        "moe_intermediate_size": 128,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "sliding_window": 128,
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 64,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 36},
    }
    plan = family_plan(FAMILY, math.prod(parallelism.get(axis, 1) for axis in ("tp", "cp", "pp")), parallelism, **sizes)
    training = replace(
        plan.spec.training, sequence_length=1024, activation_checkpointing=recompute, precision=Precision.BF16
    )
    report = preflight(replace(plan, spec=replace(plan.spec, training=training)), [0, plan.world_size - 1])
    assert report.agrees, report.text()


@pytest.mark.parametrize("layout", [CpLayout.ZIGZAG, CpLayout.CONTIGUOUS])
@pytest.mark.parametrize(
    ("length", "cp", "rate", "series"), [(64, 4, 4, 2), (48, 4, 5, 2), (24, 3, 7, 2), (48, 2, 9, 1)]
)
def test_the_cost_counts_the_tokens_that_ranks_exchange(
    layout: CpLayout, length: int, cp: int, rate: int, series: int
) -> None:
    """Windows over one and several borders of pieces, which are 3 to 16 tokens long."""
    device = torch.device("cpu")
    every = [windows_of(rate, series, 1, length // cp, layout, cp, rank, None, device) for rank in range(cp)]
    sent, received, most = window_tokens(rate, series, length, cp, layout.value)
    assert sent == tuple(sum(one.send) for one in every)
    assert received == tuple(sum(one.receive) for one in every)
    assert {most} == {len(one.places) for one in every}
    assert sum(len(one.tokens) for one in every) == every[0].count == length // rate


@pytest.mark.parametrize("layout", CpLayout)
def test_the_cost_counts_the_hops_that_a_window_leaves(layout: CpLayout) -> None:
    for cp, window in itertools.product((2, 3, 4, 8), (2, 3, 5, 6, 7, 12, 13, 24, 47)):
        steps = needed_steps(layout, cp, 48 // cp, Masking(window=window))
        assert windowed_hops(layout, cp, 48, window) == len(steps) - 1, (cp, window)


def test_generation_is_refused_with_what_to_do_instead() -> None:
    from parcompile.runtime.inject.mechanisms.compressed import _with_mask
    from parcompile.runtime.micro_batch import ALONE, begin, end

    begin((), {"input_ids": tokens(), ALONE: True})
    try:
        with pytest.raises(RunError, match="parcompile checkpoint export"):
            _with_mask(nn.Identity(), (), {"hidden_states": torch.zeros(1, 2, 3)}, compressed=True)
    finally:
        end()


def test_tables_of_experts_that_are_zeros_are_told() -> None:
    from parcompile.runtime import build_model
    from parcompile.runtime.expert_parallel import warn_of_empty_tables

    plan = family_plan(FAMILY, 1, {})
    with pytest.warns(UserWarning, match="every token visits expert 0"):
        warn_of_empty_tables(build_model(plan))
    assert tiny_config(FAMILY)["mlp_layer_types"].count("hash_moe") == 2
