"""The vocabulary-parallel embedding on live ranks, against the full table in the same process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parcompile.runtime.tensor_parallel import VocabParallelEmbedding

from .world import World, shard_weight


def check_lookup(num_embeddings: int, padded: int | None, sequence_parallel: bool, padding_idx: int | None) -> None:
    torch.manual_seed(0)
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    full = nn.Embedding(num_embeddings, 16, padding_idx, dtype=torch.float64)
    tokens = torch.randint(num_embeddings, (2, 8))
    expected = full(tokens)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    table = VocabParallelEmbedding.from_embedding(
        full, group=group, padded_num_embeddings=padded, sequence_parallel=sequence_parallel
    )
    actual = table(tokens)
    if sequence_parallel:
        expected, upstream = (t.chunk(ranks, 1)[rank] for t in (expected, upstream))
    assert torch.equal(actual, expected)  # one rank has the row, the others add zeros: exact
    actual.backward(upstream)
    rows = padded or num_embeddings
    grad = torch.cat([full.weight.grad, torch.zeros(rows - num_embeddings, 16, dtype=torch.float64)])
    assert torch.equal(table.weight.grad, shard_weight(grad, 0, rank, ranks))
    assert table.weight.tensor_model_parallel is True


def check_seed_facts() -> None:
    table = VocabParallelEmbedding(8, 16, group=dist.group.WORLD)
    assert table(torch.tensor([0, 1, 3, 7])).shape == (4, 16)
    assert torch.equal(table(torch.tensor([3])), table(torch.tensor([3])))
    for token in (8, -1):
        with pytest.raises(ValueError, match=rf"token {token} is outside the vocabulary of 8: ids are 0\.\.7"):
            table(torch.tensor([0, token]))
    with pytest.raises(ValueError, match="num_embeddings = 7 is not divisible by 2 ranks: 7 % 2 = 1; pad to 8"):
        VocabParallelEmbedding(7, 4, group=dist.group.WORLD)


def check_initialization(padded: int | None) -> torch.Tensor:
    torch.manual_seed(3)
    return VocabParallelEmbedding(700, 4, 5, group=dist.group.WORLD, padded_num_embeddings=padded).weight.detach()


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
@pytest.mark.parametrize(("num_embeddings", "padded", "padding_idx"), [(8, None, None), (9, 16, None), (8, None, 5)])
def test_the_lookup_equals_the_full_table(ranks, num_embeddings, padded, padding_idx, sequence_parallel) -> None:
    ranks.run(check_lookup, num_embeddings, padded, sequence_parallel, padding_idx)


@pytest.mark.ranks
def test_a_table_of_8_by_16_takes_tokens_0_to_7_and_refuses_8(two_ranks: World) -> None:
    two_ranks.run(check_seed_facts)


@pytest.mark.ranks
@pytest.mark.parametrize("padded", [None, 704])
def test_any_layout_starts_from_the_same_table(ranks: World, padded: int | None) -> None:
    torch.manual_seed(3)
    full = VocabParallelEmbedding(700, 4, 5).weight
    merged = torch.cat(ranks.run(check_initialization, padded))
    assert torch.equal(merged[:700], full) and not merged[700:].any() and not merged[5].any()


def test_one_rank_is_a_plain_embedding() -> None:
    full = nn.Embedding(100, 32, 3)
    table, tokens = VocabParallelEmbedding.from_embedding(full), torch.tensor([[0, 3, 99]])
    assert (table.num_embeddings, table.embedding_dim) == (100, 32)
    assert torch.equal(table(tokens), full(tokens))
    assert type(table(tokens).grad_fn) is type(full(tokens).grad_fn)


def test_the_search_for_bad_tokens_can_be_left_out() -> None:
    table = VocabParallelEmbedding(8, 4, padded_num_embeddings=10, check_tokens=False)
    assert not table(torch.tensor([9])).any()


def test_an_embedding_without_a_parallel_counterpart_is_refused() -> None:
    with pytest.raises(ValueError, match="max_norm"):
        VocabParallelEmbedding.from_embedding(nn.Embedding(8, 4, max_norm=1.0))
