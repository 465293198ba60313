"""Under `torch.compile` attention over ranks is one operator, and it gives its log-sum-exp where that is asked for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close, assert_within
from ranks import run_ranks
from torch import Tensor

from parcompile.runtime.ring_attention import UspGroups, attention, blockwise, ring_attention, split_sequence
from parcompile.runtime.ring_attention.execution import attention_call

LENGTH = 24
TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window, documents of each row": {"window": 5, "documents": [[0, 7, LENGTH], [0, LENGTH]]},
    "documents of all rows, soft-capped": {"documents": [0, 3, LENGTH], "softcap": 2.0},
    "bidirectional": {"causal": False, "scale": 0.3},
    "alibi, dropout": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.1]), "dropout": 0.3, "dropout_seed": 7},
}
NAMES = ("ring", "double_ring", "all_gather", "ulysses", "usp")


def inputs(sinks: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 8), *([(4,)] if sinks else [])]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def step(function: Any, tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Output, log-sum-exp and gradients of something that reads the output."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]

    def loss(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, ...]:
        out, lse = ring_attention(2 * query, key, value, sinks=sinks, return_lse=True, **options)
        return (out.square() * 3).sum(), out, lse

    total, out, lse = function(loss)(*leaves)
    total.backward()
    return [out.detach(), lse.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def whole_graph(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", TERMS)
def test_a_compiled_graph_has_the_same_numbers(kind: str, sinks: bool) -> None:
    torch._dynamo.reset()
    tensors = inputs(sinks)
    eager, compiled = (step(how, tensors, TERMS[kind]) for how in (lambda function: function, whole_graph))
    assert len(eager) == len(compiled) == 5 + sinks
    for one, other in zip(eager, compiled, strict=True):
        assert torch.equal(one, other)


def test_the_operator_is_what_torch_expects_of_one() -> None:
    query, key, value, sinks = inputs(True)
    options = ("ring", "", "zigzag", True, None, 5, None, None, False, None, 0.0, None, 0, 0, None)
    torch.library.opcheck(blockwise._operator, (query, key, value, sinks, None, None, *options))
    torch.library.opcheck(blockwise._operator, (query, key, value, None, None, None, *options))


def test_documents_as_tensors_are_refused_in_a_graph() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="documents are lists of numbers, not tensors"):
        step(whole_graph, inputs(False), {"documents": torch.tensor([0, 3, LENGTH])})


@pytest.mark.parametrize("sinks", [False, True])
def test_the_log_sum_exp_is_that_of_all_scores_that_a_query_sees(sinks: bool) -> None:
    query, key, value, *sink = inputs(sinks)
    given = {"sinks": sink[0]} if sinks else {}
    _, lse = ring_attention(query, key, value, window=5, return_lse=True, **given)
    scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
    place = torch.arange(LENGTH)
    apart = place[:, None] - place
    scores = scores.masked_fill((apart < 0) | (apart >= 5), -torch.inf)
    if sinks:
        scores = torch.cat([scores, sink[0].view(1, 4, 1, 1).expand(2, 4, LENGTH, 1)], -1)
    assert not lse.requires_grad
    assert_close(lse, scores.logsumexp(-1))


def on_a_rank(rank: int) -> dict[str, Any]:
    """How far results of this rank are from those of one process, eager and compiled."""
    dist.init_process_group("gloo")
    group, ranks, found = dist.group.WORLD, dist.get_world_size(), {}
    assert group is not None
    whole = inputs(False)
    expected = ring_attention(*whole, window=7, return_lse=True)
    local = [split_sequence(one.detach(), 2, "zigzag", ranks, rank) for one in whole]
    for name in NAMES:
        place: dict[str, Any] = {"groups": UspGroups.of(group, 2)} if name == "usp" else {"group": group}
        place |= {"inner_ranks": 2} if name == "double_ring" else {}
        given = attention(*local, implementation=name, window=7, return_lse=True, **place)
        pairs = zip(given, (split_sequence(one, 2, "zigzag", ranks, rank) for one in expected), strict=True)
        found[name] = max(float((one - other).abs().max()) for one, other in pairs)
    for inner in (None, 2):
        options = {"group": group, "window": 7, "inner_ranks": inner}
        eager, compiled = (step(how, local, options) for how in (lambda function: function, whole_graph))
        same = [torch.equal(one, other) for one, other in zip(eager, compiled, strict=True)]
        found[f"compiled, inner ranks {inner}"] = float(not all(same))
    return found


@pytest.mark.ranks
def test_ranks_agree_with_one_process_eager_and_compiled() -> None:
    for found in run_ranks(4, on_a_rank):
        assert len(found) == len(NAMES) + 2
        for name, error in found.items():
            assert_within(error, 1e-5, name)


def test_options_that_nobody_gives_are_those_of_the_call() -> None:
    called = inspect.signature(attention_call).parameters
    assert [*blockwise._PLAIN] == [option.split()[1] for option in blockwise._OPTIONS.split(", ")[3:]]
    for name, value in blockwise._PLAIN.items():
        assert value == (called[name].default if name in called else None)
