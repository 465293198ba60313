"""Ring attention on live ranks against attention in float64 on one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from attention_cases import Case, Errors, errors, reference, relative_error, ring_results
from closeness import assert_within
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from parcompile.runtime.ring_attention import (
    IMPLEMENTATIONS,
    PackingCosts,
    gather_sequence,
    local_positions,
    pack_documents,
    pack_tensors,
    packed_attention,
    ring_attention,
    split_sequence,
)

pytestmark = pytest.mark.ranks

WORLDS = (2, 3, 4)
TIMEOUT_SECONDS = 120

# fp64 and fp32: sums of a few hundred terms in another order. 16 bit: neighbouring numbers are 8e-3 (bf16) or 1e-3
# (fp16) apart, and inputs, the outputs of blocks and the results are each rounded to them.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

CASES = [
    *(
        Case(layout=layout, causal=causal, heads=heads, kv_heads=kv_heads)
        for layout, causal, (heads, kv_heads) in itertools.product(
            ("zigzag", "contiguous"), (True, False), ((4, 4), (4, 2), (4, 1))
        )
    ),
    *(Case(layout=layout, dtype=dtype) for layout in ("zigzag", "contiguous") for dtype in list(TOLERANCES)[1:]),
    Case(chunk=1),
    Case(layout="contiguous", chunk=1, batch=1),
    Case(chunk=37, head_dim=7, batch=1),
    Case(layout="contiguous", chunk=53, head_dim=24, batch=3),
    Case(chunk=31, head_dim=5, dtype=torch.float32),
    Case(scale=0.3),
    *(
        Case(heads=4, kv_heads=kv_heads, heads_at_once=at_once, dtype=dtype)
        for kv_heads, at_once in ((4, 1), (4, 2), (2, 1))
        for dtype in (torch.float64, torch.bfloat16)
    ),
]

# What masks and the like leave of the schedule.
PACKED = ((3, 1, 7, 2, 5),)
MASKED_CASES = [
    *(
        Case(layout=layout, causal=causal, window=window)
        for layout, causal, window in itertools.product(("zigzag", "contiguous"), (True, False), (2, 30, 100))
    ),
    *(
        Case(layout=layout, causal=causal, documents=documents, window=window)
        for layout, causal in itertools.product(("zigzag", "contiguous"), (True, False))
        for documents, window in ((PACKED, None), (((1,) * 23,), None), (PACKED, 25))
    ),
    *(
        Case(layout=layout, causal=causal, documents=PACKED, per_document=True, window=window)
        for layout, causal, window in itertools.product(("zigzag", "contiguous"), (True, False), (None, 19))
    ),
    Case(documents=((1, 2), (3, 1))),
    Case(documents=((1, 1, 1), (1, 1, 1), (2, 1, 2)), batch=3, causal=False, layout="contiguous"),
    Case(documents=PACKED, per_document=True, dtype=torch.bfloat16),
    Case(window=70, dtype=torch.bfloat16),
    Case(sinks=True),
    Case(sinks=True, window=40, heads_at_once=1, dtype=torch.float32),
    Case(softcap=2.0),
    Case(softcap=1.0, causal=False, documents=PACKED, layout="contiguous"),
    Case(value_dim=24),
    Case(value_dim=8, window=33, heads_at_once=1),
]

# 12 heads for 2, 3 and 4 ranks.
ULYSSES_CASES = [
    *(
        Case(implementation="ulysses", heads=12, kv_heads=kv_heads, layout=layout, causal=causal)
        for kv_heads, layout, causal in ((12, "zigzag", True), (12, "striped", True), (1, "zigzag", True))
    ),
    Case(implementation="ulysses", heads=12, kv_heads=12, documents=PACKED, dtype=torch.bfloat16),
    Case(implementation="ulysses", heads=12, kv_heads=12, documents=PACKED, per_document=True, window=30, sinks=True),
    Case(implementation="ulysses", heads=12, kv_heads=12, documents=((1, 2), (3, 1)), softcap=3.0, dtype=torch.float32),
]

STRIPED_CASES = [
    *(Case(layout="striped", dtype=dtype) for dtype in TOLERANCES),
    Case(layout="striped", causal=False, kv_heads=1),
    Case(layout="striped", chunk=1),
    *(Case(layout="striped", causal=causal, window=window) for causal in (True, False) for window in (2, 30)),
    *(Case(layout="striped", documents=PACKED, per_document=alone, window=25) for alone in (True, False)),
    Case(layout="striped", causal=False, documents=((1, 2), (3, 1))),
]

GATHER_CASES = [
    *(
        Case(implementation="all_gather", layout=layout, causal=causal)
        for layout in ("zigzag", "contiguous", "striped")
        for causal in (True, False)
    ),
    Case(implementation="all_gather", heads_at_once=1, dtype=torch.bfloat16),
    Case(implementation="all_gather", heads_at_once=1, window=20, sinks=True),
    Case(implementation="all_gather", heads_at_once=1, documents=((1, 2), (3, 1))),
    *(
        Case(implementation="all_gather", layout=layout, documents=PACKED, per_document=alone, window=19)
        for layout in ("zigzag", "striped")
        for alone in (True, False)
    ),
]

TERMS_CASES = [
    *(Case(alibi=True, layout=layout, causal=causal) for layout, causal in (("zigzag", True), ("striped", False))),
    Case(alibi=True, kv_heads=1, heads_at_once=1, window=30, dtype=torch.bfloat16, implementation="all_gather"),
    Case(bias=(1, 1), documents=PACKED, per_document=True),
    Case(bias=(2, 4), heads_at_once=1, causal=False, implementation="all_gather"),
    Case(bias=(2, 1), alibi=True, documents=((1, 2), (3, 1)), softcap=2.0),
    Case(dropout=0.3, heads_at_once=1),
    Case(dropout=0.3, layout="striped", sinks=True, implementation="all_gather"),
    Case(dropout=0.5, documents=((1, 2), (3, 1)), dtype=torch.float32),
    Case(dropout=0.3, heads=12, kv_heads=12, implementation="ulysses", alibi=True, bias=(1, 1)),
    Case(heads=12, kv_heads=12, implementation="ulysses", bias=(2, 12), layout="contiguous"),
]

# On 4 ranks: two rings of two neighbours.
GRID_CASES = [
    Case(implementation="double_ring", inner_ranks=2),
    Case(implementation="double_ring", inner_ranks=2, layout="striped", heads_at_once=1, dtype=torch.float32),
    Case(implementation="double_ring", inner_ranks=2, layout="contiguous", window=40),
    Case(implementation="double_ring", inner_ranks=4, documents=PACKED),
    Case(implementation="usp", inner_ranks=2),
    Case(implementation="usp", inner_ranks=2, dropout=0.3, alibi=True, bias=(1, 4)),
    Case(implementation="usp", inner_ranks=2, kv_heads=1, layout="contiguous", window=40, sinks=True),
    Case(implementation="usp", inner_ranks=2, documents=PACKED, per_document=True, dtype=torch.float32),
    Case(implementation="usp", inner_ranks=4, causal=False),
    Case(implementation="usp", inner_ranks=1, causal=False),
]

# More than one slice of query rows on each rank: for gradients in 16 bit, and for windows.
LONG_CASES = [
    Case(window=600, chunk=700, heads=2, kv_heads=1, batch=1, dtype=torch.float32),
    *(
        Case(layout=layout, causal=causal, heads=2, kv_heads=1, chunk=chunk, batch=1, dtype=torch.bfloat16)
        for layout, causal, chunk in (("zigzag", True, 600), ("contiguous", False, 1100))
    ),
]


def _join_world() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))


def _world(rank: int, cases: list[Case]) -> list[Errors]:
    _join_world()
    return [errors(case, dist.group.WORLD, dist.get_world_size(), rank) for case in cases]


def _cases(world_size: int) -> list[Case]:
    extra = {2: LONG_CASES, 4: GRID_CASES}.get(world_size, [])
    return CASES + MASKED_CASES + ULYSSES_CASES + STRIPED_CASES + GATHER_CASES + TERMS_CASES + extra


@functools.lru_cache
def _measured(world_size: int) -> dict[Case, list[Errors]]:
    """Errors of each case on each rank; the ranks are started once for all cases."""
    cases = _cases(world_size)
    by_rank = run_ranks(world_size, _world, cases, timeout=TIMEOUT_SECONDS)
    return {case: [rank[index] for rank in by_rank] for index, case in enumerate(cases)}


@pytest.mark.parametrize(
    ("world_size", "case"),
    [pytest.param(size, case, id=f"{size}-{case}") for size in WORLDS for case in _cases(size)],
)
def test_output_and_gradients_equal_those_of_one_process(world_size: int, case: Case) -> None:
    for rank, measured in enumerate(_measured(world_size)[case]):
        assert_within(max(measured.values()), TOLERANCES[case.dtype], f"rank {rank}: {measured}")


@st.composite
def _drawn_cases(draw: st.DrawFn, implementation: str) -> Case:
    """Whatever fits together on 8 ranks."""
    inner = draw(st.sampled_from([2, 4]))
    layout = draw(st.sampled_from(["zigzag", "contiguous", *(["striped"] if implementation != "usp" else [])]))
    batch, chunk = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    row = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)
    per_document = draw(st.booleans())
    # The whole tensors are split by one list of borders.
    rows = 1 if per_document else batch
    documents = draw(st.none() | st.lists(row, min_size=rows, max_size=rows))
    head_dim = draw(st.integers(1, 9))
    return Case(
        implementation=implementation,
        inner_ranks=inner if implementation in ("double_ring", "usp") else None,
        layout=layout,
        causal=draw(st.booleans()),
        heads=8,
        kv_heads=draw(st.sampled_from([8, 4, 2, 1])),
        head_dim=head_dim,
        value_dim=draw(st.sampled_from([None, None, 3])),
        chunk=chunk,
        batch=batch,
        dtype=draw(st.sampled_from([torch.float64, torch.float64, torch.float32])),
        scale=draw(st.sampled_from([None, 0.7])),
        window=draw(st.none() | st.integers(2, 60)),
        documents=None if documents is None else tuple(documents),
        per_document=per_document and documents is not None,
        sinks=draw(st.booleans()),
        softcap=draw(st.sampled_from([None, None, 3.0])),
        alibi=draw(st.booleans()),
        bias=draw(st.sampled_from([None, None, (1, 1), (batch, 8)])),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.4])),
        heads_at_once=draw(st.sampled_from([None, 1])),
    )


def test_eight_ranks_equal_one_process_in_whatever_is_drawn() -> None:
    cases: list[Case] = []

    @settings(max_examples=8, phases=[Phase.generate], database=None, derandomize=True, deadline=None)
    @given(st.tuples(*map(_drawn_cases, IMPLEMENTATIONS)))
    def draw(one_of_each: tuple[Case, ...]) -> None:
        cases.extend(one_of_each)

    draw()
    # Errors of nearly nothing, such as the gradients of one token alone, are absolute: wider than in the matrix.
    tolerances = {torch.float64: 2e-14, torch.float32: 4e-6}
    for rank, measured in enumerate(run_ranks(8, _world, cases, timeout=TIMEOUT_SECONDS)):
        for case, found in zip(cases, measured, strict=True):
            assert max(found.values()) <= tolerances[case.dtype], f"rank {rank}, {case}: {found}"


def _refusal(attend: Callable[[], object]) -> str:
    try:
        attend()
    except ValueError as error:
        return str(error)
    return ""


def _subgroups(rank: int) -> tuple[list[Errors], str]:
    _join_world()
    # Every rank creates every group; ring order is not the order of the global ranks' numbers from 0.
    groups = [dist.new_group(ranks) for ranks in ([1, 2, 3], [0, 3])]
    inside = groups[0] if rank else None
    measured = (
        [] if inside is None else [errors(case, inside, 3, dist.get_rank(inside)) for case in (Case(), Case(chunk=9))]
    )
    if rank in (0, 3):
        measured.append(errors(Case(), groups[1], 2, dist.get_rank(groups[1])))
    return measured, _refusal(lambda: ring_results(Case(), groups[0], 3, 0)) if rank == 0 else ""


def test_any_part_of_the_world_can_be_the_ring() -> None:
    results = run_ranks(4, _subgroups, timeout=TIMEOUT_SECONDS)
    assert [len(measured) for measured, _ in results] == [1, 2, 2, 3]
    for measured, _ in results:
        assert_within(max(max(case.values()) for case in measured), TOLERANCES[torch.float64])
    assert "global rank 0 is not in the group" in results[0][1]


def _properties(rank: int) -> dict[str, bool]:
    _join_world()
    group, cp = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    case = Case(dtype=torch.float32, chunk=200)
    first, second = (ring_results(case, group, cp, rank) for _ in range(2))
    full = torch.arange(2 * 24 * 3).view(2, 24, 3)
    odd = torch.zeros(1, 1, 5, 4)
    message = _refusal(lambda: ring_attention(odd, odd, odd, group=group))
    refused = _refusal(lambda: ring_results(Case(implementation="ulysses"), group, cp, rank))
    facts = {
        "odd lengths are refused": "5 local tokens cannot be split into 2 equal chunks" in message and "= 6" in message,
        "repeats bit by bit": all(torch.equal(first[name], second[name]) for name in first),
        "ulysses names heads it cannot deal": "4 query heads cannot be dealt to 3 ranks" in refused,
        "packed documents are as each one alone": max(_packed(rank, group, cp).values()) < 4e-15,
        "tokens of a head lie together": first["out"].transpose(1, 2).is_contiguous(),
    }
    for layout in ("zigzag", "contiguous", "striped"):
        local = split_sequence(full, 1, layout, cp, rank)
        facts[f"{layout} gathers"] = torch.equal(gather_sequence(local, 1, layout, group), full)
        facts[f"{layout} positions"] = torch.equal(full[:, local_positions(layout, cp, rank, 24)], local)
    return facts


def _packed(rank: int, group: dist.ProcessGroup, cp: int) -> dict[str, float]:
    """Packed documents on live ranks against each document alone: errors of output and gradients."""
    lengths = [100, 1, 12, 17, 12, 16, 3]
    packing = pack_documents(lengths, cp, costs=PackingCosts(linear_pairs=10, wire_pairs=10))
    assert 0 < len(packing.dealt) < len(lengths)
    generator = torch.Generator().manual_seed(3)
    documents = [
        [torch.randn(length, heads, 8, generator=generator, dtype=torch.float64) for length in lengths]
        for heads in (4, 2, 2, 4)
    ]
    wanted: list[list[torch.Tensor]] = []
    for one in zip(*documents, strict=True):
        *leaves, grad = (tensor.transpose(0, 1).unsqueeze(0).requires_grad_() for tensor in one)
        out = reference(*leaves, causal=True)
        wanted.append([out.detach(), *torch.autograd.grad(out, leaves, grad.detach())])
    *leaves, grad = (
        pack_tensors(column, packing, rank).transpose(0, 1).unsqueeze(0).requires_grad_() for column in documents
    )
    out = packed_attention(*leaves, packing, rank=rank, group=group)
    got = [out.detach(), *torch.autograd.grad(out, leaves, grad.detach())]
    found = {}
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        column = [tensors[index][0].transpose(0, 1) for tensors in wanted]
        here = pack_tensors([torch.ones(length) for length in lengths], packing, rank).bool()
        found[name] = relative_error(got[index][0].transpose(0, 1)[here], pack_tensors(column, packing, rank)[here])
    return found


def test_results_repeat_and_sequences_are_put_together_again() -> None:
    for rank, facts in enumerate(run_ranks(3, _properties, timeout=TIMEOUT_SECONDS)):
        assert all(facts.values()), f"rank {rank}: {facts}"
