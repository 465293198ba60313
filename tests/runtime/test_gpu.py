"""What only a GPU can show: kernels against fp64, no host that waits, several ranks on a device. `make gpu` runs it.

It has run on one H200 (docs/cuda.md).
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.ring_attention import ring_attention, split_sequence
from parcompile.runtime.ring_attention.kernels import CAUSAL, FULL, Band
from parcompile.runtime.ring_attention.kernels.blocks import (
    RunningAttention,
    add_gradients,
    attend,
    unseen_rows_to_infinity,
)
from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Queries, QueriesOfPass
from parcompile.runtime.ring_attention.kernels.plain import PlainKernel
from parcompile.runtime.ring_attention.kernels.selection import select_kernel
from parcompile.runtime.ring_attention.route import Masking, plan_route
from parcompile.runtime.tensor_parallel import ColumnParallelLinear, RowParallelLinear, vocab_parallel_cross_entropy

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
"""Relative L2 error: a few units in the last place of the inputs' type, over sums of hundreds of terms."""
SCALE = 0.1


def _draw(length: int, dtype: torch.dtype, rows: int = 1) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(rows, length, heads, 64, generator=generator, device="cuda", dtype=dtype).transpose(1, 2)
        for heads in (8, 2, 2, 8)
    ]


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-99, 0), Band(-300, 200)], ids=str)
def test_a_kernel_gives_the_numbers_of_fp64(dtype: torch.dtype, band: Band) -> None:
    query, key, value, grad = _draw(768, dtype)
    kernel, exact = select_kernel(query, value, banded=band not in (FULL, CAUSAL)), PlainKernel()
    wide = [tensor.double() for tensor in (query, key, value)]
    wanted, wanted_lse = exact.forward(*wide, band=band, scale=SCALE)
    out, lse = kernel.forward(query, key, value, band=band, scale=SCALE, terms=None)
    sums = Gradients(*(torch.zeros_like(tensor, dtype=torch.float32) for tensor in wide))
    wanted_sums = Gradients(*map(torch.zeros_like, wide))
    exact.backward(Queries(wide[0], grad.double(), wanted, wanted_lse, SCALE), *wide[1:], band=band, into=wanted_sums)
    kernel.backward(Queries(query, grad, out, lse, SCALE), key, value, band=band, terms=None, into=sums)
    assert _error(out, wanted) < TOLERANCE[dtype]
    assert float((lse.double() - wanted_lse).abs().max()) < TOLERANCE[dtype]
    for name in ("query", "key", "value"):
        assert _error(getattr(sums, name), getattr(wanted_sums, name)) < TOLERANCE[dtype], name


def _borders(length: int, count: int, unit: int) -> tuple[int, ...]:
    cuts = random.Random(1).sample(range(1, length // unit), count - 1)
    return (0, *sorted(unit * cut for cut in cuts), length)


def _whole(tensors: list[Tensor], documents: tuple[int, ...] | None) -> list[Tensor]:
    """Output and gradients of causal attention over the whole sequence in fp64."""
    leaves = [tensor.double().requires_grad_() for tensor in tensors[:3]]
    length = leaves[0].shape[2]
    position = torch.arange(length, device="cuda")
    seen = position <= position.unsqueeze(-1)
    if documents is not None:
        document = torch.bucketize(position, torch.tensor(documents, device="cuda"), right=True)
        seen &= document == document.unsqueeze(-1)
    key, value = (leaf.repeat_interleave(4, 1) for leaf in leaves[1:])
    scores = (leaves[0] @ key.mT * SCALE).masked_fill(~seen, -math.inf)
    out = scores.softmax(-1) @ value
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3].double())]


@pytest.mark.parametrize("layout", list(CpLayout))
@pytest.mark.parametrize("documents", [None, "whole sequence", "each document"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_ring_on_one_gpu_gives_the_numbers_of_fp64(layout: CpLayout, documents: str | None, rows: int) -> None:
    """Every rank's tiles, packed launches and merges, with the keys of the others at hand."""
    ranks, length = 4, 1024
    alone = documents == "each document"
    borders = None if documents is None else _borders(length, 12, 2 * ranks if alone else 1)
    masking = Masking(documents=borders, per_document=alone)
    tensors = _draw(length, torch.bfloat16, rows)
    dealt = borders if alone else None
    parts = [[split_sequence(one, 2, layout, ranks, rank, dealt) for one in tensors] for rank in range(ranks)]
    wanted = [
        [split_sequence(one, 2, layout, ranks, rank, dealt) for one in _whole(tensors, borders)]
        for rank in range(ranks)
    ]
    kernel = select_kernel(tensors[0], tensors[2], banded=masking.has_bands(layout))
    sums = [[torch.zeros_like(tensor, dtype=torch.float32) for tensor in part[:3]] for part in parts]
    for rank, (query, _, _, grad) in enumerate(parts):
        steps = plan_route(layout, ranks, rank, length // ranks, masking)
        running = RunningAttention(torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32))
        for step in steps:
            attend(kernel, step.tiles, query, *parts[step.source][1:3], running, SCALE)
        out, lse = running.finish()
        assert _error(out, wanted[rank][0]) < TOLERANCE[torch.bfloat16]
        queries = QueriesOfPass(query, grad, out, unseen_rows_to_infinity(lse), SCALE)
        for step in steps:
            into = Gradients(sums[rank][0], *sums[step.source][1:])
            add_gradients(kernel, step.tiles, queries, *parts[step.source][1:3], into)
    for rank in range(ranks):
        for found, right in zip(sums[rank], wanted[rank][1:], strict=True):
            assert _error(found, right) < TOLERANCE[torch.bfloat16]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Within it every wait of the host for the GPU is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_attention_and_loss_never_wait_for_the_gpu(no_waiting: None) -> None:
    query, key, value, grad = (tensor.requires_grad_() for tensor in _draw(1024, torch.bfloat16))
    for options in ({}, {"documents": [0, 100, 101, 700, 1024]}, {"window": 100}):
        out = ring_attention(query, key, value, **options)  # type: ignore[call-overload]
        torch.autograd.grad(out, (query, key, value), grad)
    logits = torch.randn(2, 16, 64, device="cuda", requires_grad=True)
    labels = torch.zeros(2, 16, dtype=torch.long, device="cuda")
    vocab_parallel_cross_entropy(logits, labels, group=None, vocab_size=64).sum().backward()


def _block(group: Any) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(ColumnParallelLinear(64, 128, group=group), nn.GELU(), RowParallelLinear(128, 64, group=group))


def _on_shared_gpu(rank: int, ranks: int, folder: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(5)).cuda()
    found = []
    for group in (None, dist.group.WORLD):
        block, leaf = _block(group).cuda().bfloat16(), x.bfloat16().requires_grad_()
        out = block(leaf)
        out.float().square().sum().backward()
        found.append((out.detach(), leaf.grad))
    for split, whole in zip(found[1], found[0], strict=True):
        assert split is not None
        assert whole is not None
        assert _error(split, whole.double()) < 2e-2
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu_give_the_numbers_of_one(ranks: int, tmp_path: Path) -> None:
    """gloo with tensors on CUDA, which has all-reduce there and little else: tensor parallelism in bf16."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    mp.spawn(_on_shared_gpu, (ranks, str(tmp_path)), nprocs=ranks)  # type: ignore[no-untyped-call]
