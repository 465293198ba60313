"""Embeddings of n-grams and keys that an indexer chooses by blocks: hashes, choices, packed documents, estimates.

The reference is transformers' own model, which takes each document alone. Whole models in every layout:
test_families.py; tables of as many rows as primes say: test_tables_of_ngrams.py and test_tables_of_models.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close, nudge
from family_runs import drawn_model, family_plan
from ranks import run_ranks
from torch import Tensor, nn

from parcompile.layout.sequence import ContextParallel, CpImplementation, CpLayout
from parcompile.plan import Plan
from parcompile.runtime import RunError
from parcompile.runtime.inject.mechanisms.indexers import choose_blocks
from parcompile.runtime.inject.mechanisms.ngrams import _with_tokens, hashed
from parcompile.runtime.inject.ring_place import RingPlace
from parcompile.runtime.micro_batch import ALONE, begin, end
from parcompile.runtime.preflight import preflight

FAMILY = "qwen4_exp_text"
END = 2
BORDERS = [[0, 1, 4, 16], [0, 9, 13, 16]]
"""Documents of two rows: shorter than an n-gram or a block, with tokens behind the last whole block, over several
pieces of the sequence."""
WHOLE = RingPlace(None, ContextParallel(CpImplementation.RING, 1, None), CpLayout.ZIGZAG, 16)


def tokens() -> Tensor:
    """With ends of texts inside of documents."""
    ids = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(3))
    ids[0, 6], ids[0, 7], ids[1, 4], ids[1, 12] = END, END, END, END
    return ids


def inner(model: nn.Module, layer: int) -> Any:
    return model.get_submodule(f"model.layers.{layer}")


def test_rows_of_ngrams_are_those_that_transformers_looks_up() -> None:
    model = drawn_model(family_plan(FAMILY, 1, {}))
    looked_up: list[Tensor] = []
    for layer in (0, 2):
        embedding = inner(model, layer).ple.ple_embedding
        handle = embedding.ngram_embedding.register_forward_hook(lambda _, args, __: looked_up.append(args[0]))
        embedding(tokens(), None)
        handle.remove()
        assert torch.equal(hashed(embedding, WHOLE, tokens()), looked_up[-1])
    assert not torch.equal(*looked_up), "layers hash with numbers of their own"


@pytest.mark.parametrize("budget", [2, 4, 6, 16])
def test_blocks_are_chosen_as_transformers_chooses_them(budget: int) -> None:
    model = drawn_model(family_plan(FAMILY, 1, {}, indexer_budget=budget))
    indexer = inner(model, 1).self_attn.indexer
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 16, 32, generator=generator)
    positions = torch.arange(16).expand(3, 2, -1)
    turned = model.get_submodule("model.rotary_emb")(hidden, positions)
    causal = torch.ones(16, 16, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    expected = indexer(hidden, turned, causal, None) & causal
    found = choose_blocks(indexer, WHOLE, hidden, turned)
    assert torch.equal(found, expected)
    assert bool((found.sum(-1) < causal.sum(-1)).any()) == (budget < 16)


def gradients(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def over_ranks(rank: int, plan: Plan) -> tuple[float, dict[str, Tensor]]:
    """The loss of packed documents, and gradients of what no rank of tp has a part of."""
    from parcompile.runtime import join, split_batch
    from parcompile.runtime.inject import inject
    from parcompile.runtime.loss import loss_of_step

    mesh = join(plan)
    model = inject(drawn_model(plan), mesh)
    ids = tokens()
    positions, labels = torch.empty_like(ids), ids.clone()
    for row, borders in enumerate(BORDERS):
        for start, stop in itertools.pairwise(borders):
            positions[row, start:stop] = torch.arange(stop - start)
            labels[row, start] = -100
    batch = split_batch({"input_ids": ids, "position_ids": positions, "labels": labels}, mesh)
    loss = model(**batch).loss
    loss.backward()
    found = {}
    for name, parameter in plan.parameters.expanded():
        own = dict(model.named_parameters())[name]
        if own.grad is not None and parameter.split is None:
            dist.all_reduce(own.grad, group=mesh.group("dp-cp"))
            found[name] = own.grad
    return float(loss_of_step([loss.detach()], 1, mesh)), found


@pytest.mark.ranks
@pytest.mark.parametrize(
    "parallelism", [{"cp": 2}, {"cp": 2, "cp_layout": "contiguous"}, {"tp": 2, "sequence_parallel": True}]
)
def test_ngrams_blocks_and_states_of_packed_documents_begin_anew_in_each(parallelism: dict[str, Any]) -> None:
    """transformers' own n-grams and convolutions see the document before: it gets each alone."""
    plan = family_plan(FAMILY, 2, parallelism)
    loss, found = run_ranks(2, over_ranks, plan, timeout=120)[0]
    expected = each_document_alone()
    assert not [name for name in expected["gradients"] if ".indexer." in name], "transformers trains no indexer"
    assert any(name.endswith("ple.conv1d.weight") for name in found)
    assert_close(loss, expected["loss"])
    # A gradient that is next to nothing beside the others is their rounding.
    least = 1e-2 * max(float(one.norm()) for one in expected["gradients"].values())

    def of_found(seed: int | None) -> dict[str, Tensor]:
        gradients = each_document_alone(seed)["gradients"]
        return {name: gradients[name] for name in found}

    assert_close(found, of_found(None), rerun=of_found, least=least)


def each_document_alone(seed: int | None = None) -> dict[str, Any]:
    """The loss and the gradients of transformers' own model."""
    model, ids = drawn_model(family_plan(FAMILY, 1, {})), tokens()
    nudge(model, seed)
    documents = [
        ids[row : row + 1, start:stop]
        for row, borders in enumerate(BORDERS)
        for start, stop in itertools.pairwise(borders)
        if stop - start > 1
    ]
    count, total = sum(one.shape[1] - 1 for one in documents), 0.0
    model.zero_grad()
    for one in documents:
        part = model(input_ids=one, labels=one).loss * (one.shape[1] - 1) / count
        part.backward()
        total += float(part.detach())
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": total, "gradients": gradients}


SIZES = {
    "hidden_size": 256,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "hc_count": 4,
    "hc_lowrank": 32,
    "ple_embed_dim": 256,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 1000,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "indexer_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


@pytest.mark.parametrize(
    ("parallelism", "recompute"),
    [
        ({}, "none"),
        ({"tp": 2, "cp": 2, "sequence_parallel": True}, "full"),
        ({"tp": 2}, "full"),
        ({"pp": 2}, "none"),
    ],
)
def test_preflight_counts_what_the_estimate_says(parallelism: dict[str, Any], recompute: str) -> None:
    plan = family_plan(FAMILY, math.prod(parallelism.get(axis, 1) for axis in ("tp", "cp", "pp")), parallelism, **SIZES)
    training = replace(plan.spec.training, sequence_length=256, activation_checkpointing=recompute)
    report = preflight(replace(plan, spec=replace(plan.spec, training=training)))
    assert report.agrees, report.text()


@pytest.mark.parametrize(
    ("called", "words"),
    [({ALONE: True, "input_ids": tokens()}, "parcompile checkpoint export"), ({}, "call the model with input_ids")],
)
def test_calls_without_the_tokens_of_a_whole_micro_batch_are_refused(called: dict[str, Any], words: str) -> None:
    begin((), called)
    try:
        with pytest.raises(RunError, match=words):
            _with_tokens(nn.Identity(), (), {})
    finally:
        end()
