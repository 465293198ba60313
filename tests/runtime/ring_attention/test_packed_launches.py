"""Packed documents on a GPU: one launch for all documents in each step of the ring, and nothing that waits.

No GPU is needed: FlashAttention's packed form is stood in for by what it is defined to compute, and what a GPU would
be told is counted on stand-ins of its tensors.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close
from device_waits import DeviceCounter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.ring_attention import all_gather_attention, local_positions, ring_attention, split_sequence
from parcompile.runtime.ring_attention.execution import attention_call
from parcompile.runtime.ring_attention.kernels import selection
from parcompile.runtime.ring_attention.kernels.blocks import (
    RunningAttention,
    add_gradients,
    attend,
    unseen_rows_to_infinity,
)
from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Kernel, Queries, QueriesOfPass
from parcompile.runtime.ring_attention.kernels.packs import Launch, PackedTiles
from parcompile.runtime.ring_attention.kernels.plain import PlainKernel
from parcompile.runtime.ring_attention.kernels.selection import CudaFlashKernel, FlashAttn3Kernel, FlashAttnKernel
from parcompile.runtime.ring_attention.route import Masking, plan_gather, plan_route

LAYOUTS = list(CpLayout)
SCALE = 0.4


@st.composite
def _documents(draw: st.DrawFn) -> tuple[CpLayout, int, int, Masking]:
    layout, size = draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 4))
    causal, window = draw(st.booleans()), draw(st.none() | st.integers(1, 12))
    unit = layout.chunks_per_rank * size
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
        borders = tuple(itertools.accumulate((length * unit for length in lengths), initial=0))
        return layout, size, borders[-1] // size, Masking(causal, window, borders, per_document=True)
    local = draw(st.integers(1, 10)) * layout.chunks_per_rank
    cuts = draw(st.lists(st.integers(0, local * size), max_size=8))
    return layout, size, local, Masking(causal, window, (0, *sorted(cuts), local * size))


def _wanted(length: int, masking: Masking) -> Tensor:
    """Who sees whom in the whole sequence."""
    position = torch.arange(length)
    distance = position - position.unsqueeze(-1)
    document = torch.bucketize(position, torch.tensor(masking.documents), right=True)
    wanted = document == document.unsqueeze(-1)
    if masking.causal:
        wanted &= distance <= 0
    if masking.window is not None:
        wanted &= distance.abs() < masking.window
    return wanted


def _sequences(launch: Launch) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, keys and who sees whom of each sequence, as FlashAttention's packed form defines them."""
    left, right = launch.window
    borders = zip(launch.cum_queries.tolist(), launch.cum_keys.tolist(), strict=True)
    for (first, start), (last, stop) in itertools.pairwise(borders):
        rows, columns = last - first, stop - start
        assert 0 <= rows <= launch.most_queries
        assert 0 <= columns <= launch.most_keys
        distance = torch.arange(columns) - torch.arange(rows).unsqueeze(-1) - (columns - rows)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            seen &= distance >= -left
        if right >= 0:
            seen &= distance <= right
        yield slice(first, last), slice(start, stop), seen


@settings(max_examples=150, deadline=None)
@given(_documents())
def test_launches_cover_what_the_masks_leave_exactly_once(ring: tuple[CpLayout, int, int, Masking]) -> None:
    layout, size, local, masking = ring
    dealt = masking.documents if masking.per_document else None
    positions = [local_positions(layout, size, rank, local * size, dealt) for rank in range(size)]
    around, at_once = (torch.zeros(local * size, local * size, dtype=torch.int64) for _ in range(2))
    for rank in range(size):
        gathering = plan_gather(layout, size, rank, local, masking)
        gathered = torch.cat([positions[gathering.sources[piece.part]][piece.keys] for piece in gathering.pieces])
        held = [(step.tiles, positions[step.source], around) for step in plan_route(layout, size, rank, local, masking)]
        for tiles, keys, computed in [*held, (gathering.tiles, gathered, at_once)]:
            assert isinstance(tiles, PackedTiles)
            for launch in tiles.launches(local, len(keys), torch.device("cpu")):
                for ends, total in ((launch.cum_queries, local), (launch.cum_keys, len(keys))):
                    assert ends.dtype is torch.int32
                    assert (int(ends[0]), int(ends[-1])) == (0, total), "a row of the result is left unwritten"
                for rows, columns, seen in _sequences(launch):
                    computed[positions[rank][rows].unsqueeze(-1), keys[columns]] += seen
    wanted = _wanted(local * size, masking).long()
    assert torch.equal(around, wanted)
    assert torch.equal(at_once, wanted)


def _varlen_forward(query: Tensor, key: Tensor, value: Tensor, launch: Launch, scale: float) -> tuple[Tensor, Tensor]:
    """[Q, H, D] and [S, K, D]: as FlashAttention-2, with 0 and +inf for a query that has no key."""
    share = query.shape[1] // key.shape[1]
    out, lse = torch.zeros_like(query), query.new_full(query.shape[1::-1], math.inf)
    for rows, columns, seen in _sequences(launch):
        if seen.numel():
            keys, values = (tensor[columns].repeat_interleave(share, 1) for tensor in (key, value))
            scores = torch.einsum("qhd,shd->hqs", query[rows], keys) * scale
            scores = scores.masked_fill(~seen, -math.inf)
            out[rows] = torch.einsum("hqs,shd->qhd", scores.softmax(-1), values)
            lse[:, rows] = scores.logsumexp(-1)
    return out, lse


def _varlen_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, launch: Launch, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    assert out.is_contiguous(), "the operator copies what is not contiguous"
    assert grad.is_contiguous(), "the operator copies what is not contiguous"
    assert lse.is_contiguous()
    share = query.shape[1] // key.shape[1]
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for rows, columns, seen in _sequences(launch):
        if seen.numel():
            keys, values = (tensor[columns].repeat_interleave(share, 1) for tensor in (key, value))
            scores = (torch.einsum("qhd,shd->hqs", query[rows], keys) * scale).masked_fill(~seen, -math.inf)
            weights = torch.exp(scores - lse[:, rows].unsqueeze(-1))
            delta = (grad[rows] * out[rows]).sum(-1).T.unsqueeze(-1)
            of_scores = weights * (torch.einsum("qhd,shd->hqs", grad[rows], values) - delta) * scale
            grads[0][rows] = torch.einsum("hqs,shd->qhd", of_scores, keys)
            for target, left, right in ((grads[1], of_scores, query), (grads[2], weights, grad)):
                product = torch.einsum("hqs,qhd->shd", left, right[rows])
                target[columns] = product.unflatten(1, (-1, share)).sum(2)
    return grads


def _torch_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float, **window: int) -> Any:
    *lengths, dropout, causal, debug = rest
    sides = window["window_size_left"], window["window_size_right"]
    assert (dropout, causal, debug) == (0.0, sides == (-1, 0), False)
    return *_varlen_forward(query, key, value, Launch(*lengths, sides), scale), None, None, None


def _torch_backward(*tensors: Any, scale: float, **window: int) -> Any:
    *inputs, cum_q, cum_k, most_q, most_k, dropout, causal, _, _ = tensors
    sides = window["window_size_left"], window["window_size_right"]
    assert (dropout, causal) == (0.0, sides == (-1, 0))
    return _varlen_backward(*inputs, Launch(cum_q, cum_k, most_q, most_k, sides), scale)


def _of_package(named: dict[str, Any]) -> tuple[Launch, float]:
    assert named["dropout_p"] == 0.0
    assert named["softcap"] == 0.0
    sides = named["window_size_left"], named["window_size_right"]
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return Launch(*(named[name] for name in names), sides), named["softmax_scale"]


def _third_forward(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    sides = named["window_size_left"], named["window_size_right"]
    assert named.pop("causal") == (sides == (-1, 0))
    return _package_forward(q, k, v, dropout_p=0.0, **named)


def _third_backward(*tensors: Tensor, **named: Any) -> None:
    sides = named["window_size_left"], named["window_size_right"]
    assert named.pop("is_causal") == (sides == (-1, 0))
    _package_backward(*tensors, *(named.pop(name) for name in ("dq", "dk", "dv")), dropout_p=0.0, **named)


def _package_forward(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    return *_varlen_forward(q, k, v, *_of_package(named)), None, None


def _package_backward(*tensors: Tensor, **named: Any) -> None:
    for target, grad in zip(tensors[6:], _varlen_backward(*tensors[:6], *_of_package(named)), strict=True):
        target.copy_(grad)


TORCH = SimpleNamespace(_flash_attention_forward=_torch_forward, _flash_attention_backward=_torch_backward)
PACKAGE = SimpleNamespace(_flash_attn_varlen_forward=_package_forward, _flash_attn_varlen_backward=_package_backward)
THIRD = SimpleNamespace(_flash_attn_forward=_third_forward, _flash_attn_backward=_third_backward)


def _draw(rows: int, length: int) -> list[Tensor]:
    """Query, key, value, and the gradient of the output, of the whole sequence."""
    generator = torch.Generator().manual_seed(7)
    heads = (4, 2, 2, 4)
    return [torch.randn(rows, count, length, 8, generator=generator, dtype=torch.float64) for count in heads]


def _one_process(whole: list[Tensor], masking: Masking) -> list[Tensor]:
    """Output and gradients of attention over the whole sequence, by autograd."""
    leaves = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    query, key, value = leaves[0], *(tensor.repeat_interleave(2, 1) for tensor in leaves[1:])
    scores = (query @ key.mT * SCALE).masked_fill(~_wanted(query.shape[2], masking), -math.inf)
    out = scores.softmax(-1) @ value
    return [out.detach(), *torch.autograd.grad(out, leaves, whole[3])]


def _ring(whole: list[Tensor], kernel: Kernel, layout: CpLayout, size: int, masking: Masking) -> list[Tensor]:
    """The same, computed as each of `size` ranks does, with the keys of the others as the ring brings them."""
    length = whole[0].shape[2]
    dealt = masking.documents if masking.per_document else None
    parts = [[split_sequence(one, 2, layout, size, rank, dealt) for one in whole] for rank in range(size)]
    sums = [[torch.zeros_like(tensor) for tensor in part[:3]] for part in parts]
    outs = []
    for rank, (query, _, _, grad) in enumerate(parts):
        steps = plan_route(layout, size, rank, length // size, masking)
        running = RunningAttention(torch.empty_like(query), query.new_empty(query.shape[:3]))
        for step in steps:
            attend(kernel, step.tiles, query, *parts[step.source][1:3], running, SCALE)
        out, lse = running.finish()
        outs.append(out)
        queries = Queries(query, *(_token_major(tensor) for tensor in (grad, out)), unseen_rows_to_infinity(lse), SCALE)
        for step in steps:
            into = Gradients(sums[rank][0], *sums[step.source][1:])
            add_gradients(kernel, step.tiles, queries, *parts[step.source][1:3], into)
    order = torch.cat([local_positions(layout, size, rank, length, dealt) for rank in range(size)])
    found = [outs, *(list(each) for each in zip(*sums, strict=True))]
    return [torch.cat(each, 2).index_select(2, torch.argsort(order)) for each in found]


def _token_major(x_BHQD: Tensor) -> Tensor:
    return x_BHQD.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize(
    "kernel",
    [CudaFlashKernel(), FlashAttnKernel(PACKAGE), FlashAttn3Kernel(THIRD)],
    ids=["torch", "flash_attn", "flash_attn_3"],
)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("layout", "masking"),
    [
        (CpLayout.ZIGZAG, Masking(documents=(0, 5, 6, 21, 40, 41, 48))),
        (CpLayout.ZIGZAG, Masking(documents=(0, 8, 32, 48), per_document=True)),
        (CpLayout.ZIGZAG, Masking(window=5, documents=(0, 3, 20, 27, 28, 48))),
        (CpLayout.CONTIGUOUS, Masking(causal=False, documents=(0, 5, 6, 21, 40, 41, 48))),
        (CpLayout.STRIPED, Masking(documents=(0, 5, 6, 21, 40, 41, 48))),
    ],
)
def test_packed_launches_equal_attention_of_one_process(
    kernel: Kernel, rows: int, layout: CpLayout, masking: Masking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp64, 1e-12: forward and backward through the launches of every rank."""
    monkeypatch.setattr(selection, "_aten", TORCH)
    # The form for single tiles is not stood in for: every step goes through packed launches, or has one tile.
    plain = PlainKernel()
    for name in ("forward", "backward"):
        monkeypatch.setattr(type(kernel), name, staticmethod(getattr(plain, name)))
    whole = _draw(rows, 48)
    wanted = _one_process(whole, masking)
    for got, right in zip(_ring(whole, kernel, layout, 4, masking), wanted, strict=True):
        assert_close(got, right, limit=1e-11, least=right.numel() ** 0.5)


@pytest.fixture
def ring_of_eight() -> Iterator[dist.ProcessGroup]:
    """Rank 3 of 8, whose messages go nowhere."""
    dist.init_process_group("meta:fake,cpu:fake", store=FakeStore(), rank=3, world_size=8)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _borders(length: int, count: int, unit: int) -> list[int]:
    return [0, *sorted(unit * cut for cut in random.Random(1).sample(range(1, length // unit), count - 1)), length]


@pytest.mark.parametrize("per_document", [False, True])
def test_a_step_of_the_ring_is_one_launch_for_200_documents(per_document: bool, ring_of_eight: Any) -> None:
    """cp 8, 131,072 tokens: 1,600 tiles a layer where documents are dealt one by one."""
    borders = _borders(131_072, 200, 16 if per_document else 1)
    route = plan_route(CpLayout.ZIGZAG, 8, 3, 16_384, Masking(documents=tuple(borders), per_document=per_document))
    with DeviceCounter() as device:
        passes = _forward_and_backward(
            1, 16_384, "ring", group=ring_of_eight, documents=borders, per_document=per_document
        )
    assert device.launches["aten._flash_attention_forward"] == len(route) * passes
    assert device.launches["aten._flash_attention_backward"] == len(route) * passes
    assert sum(len(step.tiles) for step in route) == (1600 if per_document else len(route) - 1 + len(route[0].tiles))
    assert device.waits == []


@pytest.mark.parametrize("carrier", ["ring", "all_gather"])
@pytest.mark.parametrize("options", [{}, {"window": 700}, {"causal": False}, {"documents": [0, 300, 2000, 8192]}])
def test_attention_over_ranks_never_waits_for_the_device(
    carrier: str, options: dict[str, Any], ring_of_eight: Any
) -> None:
    with DeviceCounter() as device:
        _forward_and_backward(2, 1024, carrier, group=ring_of_eight, **options)
    assert device.launches["aten._flash_attention_backward"] > 0
    assert device.waits == []


def _forward_and_backward(rows: int, length: int, carrier: str, **options: Any) -> int:
    """Attention with sinks and 8 query heads on 2 key/value heads; returns in how many passes."""
    query, key, value = (
        torch.empty(rows, length, heads, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        for heads in (8, 2, 2)
    )
    sinks = torch.empty(8, device="meta", dtype=torch.bfloat16)
    call = attention_call(query, key, value, carrier, sinks=sinks, **options)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, sinks)]
    attend_over_ranks = ring_attention if carrier == "ring" else all_gather_attention
    out = attend_over_ranks(*leaves[:3], sinks=sinks, **options)
    out.backward(torch.empty_like(out))
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)
    return len(call.passes)


def test_output_and_its_gradient_are_laid_out_once_for_all_tiles_of_a_pass() -> None:
    """torch's operator copies both in each call where they are not contiguous."""
    with DeviceCounter() as device:
        shape = 2, 256, 8, 64
        tensors = [torch.empty(shape, device="meta", dtype=torch.bfloat16).transpose(1, 2)[:, :4] for _ in range(3)]
        read = QueriesOfPass(*tensors, torch.empty(2, 8, 256, device="meta")[:, :4], 1.0)
        parts = [read.part(slice(None), slice(128, 256)) for _ in range(5)]
        assert all(part is parts[0] for part in parts)
        assert parts[0].out.transpose(1, 2).is_contiguous()
        assert parts[0].grad_out.transpose(1, 2).is_contiguous()
        assert parts[0].lse.is_contiguous()
        assert device.launches["aten.clone"] == 3
