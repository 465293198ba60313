"""Local attention: each kernel, the merging of blocks, and the ring of one rank, against attention in float64."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attention_cases import Case, errors, reference, relative_error
from closeness import assert_within
from ranks import run_ranks
from torch import Tensor

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.ring_attention import attention, ring_attention
from parcompile.runtime.ring_attention.kernels import CAUSAL, Tile, blocks, selection
from parcompile.runtime.ring_attention.kernels.blocks import (
    RunningAttention,
    add_gradients,
    attend,
    unseen_rows_to_infinity,
)
from parcompile.runtime.ring_attention.kernels.cpu_tiles import CpuTileKernel
from parcompile.runtime.ring_attention.kernels.fused import CpuFlashKernel
from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Kernel, Queries, Terms
from parcompile.runtime.ring_attention.kernels.plain import PlainKernel, padded
from parcompile.runtime.ring_attention.kernels.selection import _announce, select_kernel

KERNELS: dict[str, Kernel] = {
    "cpu-flash": CpuFlashKernel(),
    "cpu-flash-64-rows": CpuFlashKernel(backward_rows=64),
    "cpu-tiles": CpuTileKernel(),
    "cpu-tiles-from-50": CpuFlashKernel(tiles_from=50),
    "plain": PlainKernel(),
    "cpu-flash, padded to 24": padded(CpuFlashKernel(), 24),
}


def _draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _inputs(
    length: int, value_dim: int = 16, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key = _draw(2, 6, length, 16, dtype=dtype), _draw(2, 2, length, 16, dtype=dtype, seed=1)
    value, grad = (
        _draw(2, 2, length, value_dim, dtype=dtype, seed=2),
        _draw(2, 6, length, value_dim, dtype=dtype, seed=3),
    )
    return query, key, value, grad


def _by_tiles(
    kernel: Kernel, tiles: list[Tile], query: Tensor, key: Tensor, value: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Gradients]:
    scale = query.shape[3] ** -0.5
    out = query.new_full((*query.shape[:3], value.shape[3]), math.nan, dtype=torch.float64)
    running = RunningAttention(out, query.new_full(query.shape[:3], math.nan, dtype=torch.float64))
    attend(kernel, tiles, query, key, value, running, scale)
    out, lse = running.finish()
    queries = Queries(query, grad, out.to(query.dtype), unseen_rows_to_infinity(lse).to(query.dtype), scale)
    sums = Gradients(*(torch.zeros_like(tensor, dtype=torch.float64) for tensor in (query, key, value)))
    add_gradients(kernel, tiles, queries, key, value, sums)
    return out, lse, sums


def _full(queries: slice, keys: slice) -> Tile:
    return Tile(queries, keys)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize("length", [2, 3, 130, 1200])
def test_tiles_add_up_to_causal_attention(kernel: Kernel, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BACKWARD_KEY_NUMBERS", 100 * 16)  # keys are cut where rows are
    half = length // 2
    # As in a zigzag ring: the second half sees the first in another step than itself.
    tiles = [
        Tile(slice(0, half), slice(0, half), CAUSAL),
        Tile(slice(half, length), slice(half, length), CAUSAL),
        _full(slice(half, length), slice(0, half)),
    ]
    query, key, value, grad = _inputs(length)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    wanted = reference(*leaves, causal=True)
    wanted.backward(grad)
    out, _, sums = _by_tiles(kernel, tiles, query, key, value, grad)
    assert_within(relative_error(out, wanted.detach()), 1e-12)
    for got, leaf in zip((sums.query, sums.key, sums.value), leaves, strict=True):
        assert_within(relative_error(got, leaf.grad), 1e-12)


def test_values_narrower_than_keys_are_padded_for_a_kernel_that_wants_one_width() -> None:
    inputs = _inputs(48, value_dim=8)
    found = _by_tiles(padded(CpuFlashKernel(), 16), [Tile(slice(0, 48), slice(0, 48), CAUSAL)], *inputs)
    wanted = _by_tiles(PlainKernel(), [Tile(slice(0, 48), slice(0, 48), CAUSAL)], *inputs)
    pairs = [(found[0], wanted[0]), (found[1], wanted[1])]
    pairs += [(getattr(found[2], name), getattr(wanted[2], name)) for name in ("query", "key", "value")]
    for one, other in pairs:
        assert one.shape == other.shape
        assert relative_error(one, other) < 1e-12  # both in fp64


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_queries_without_keys_give_zeros_and_no_gradient(kernel: Kernel) -> None:
    query, key, value, grad = _inputs(100)
    tiles = [_full(slice(40, 60), slice(10, 30))]
    out, lse, sums = _by_tiles(kernel, tiles, query, key, value, grad)
    unseen = [*range(40), *range(60, 100)]
    assert not out[:, :, unseen].any()
    assert (lse[:, :, unseen] == -math.inf).all()
    assert not sums.query[:, :, unseen].any()
    assert torch.isfinite(torch.cat([sums.query, sums.key, sums.value], 1)).all()
    wanted = reference(query[:, :, 40:60], key[:, :, 10:30], value[:, :, 10:30], causal=False)
    assert_within(relative_error(out[:, :, 40:60], wanted), 1e-12)


def test_queries_of_which_a_bias_hides_all_keys_give_zeros_and_no_gradient() -> None:
    query, key, value, grad = _inputs(300)
    bias = torch.zeros(1, 1, 300, 300)
    bias[..., 130:140, :] = -math.inf
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    out = ring_attention(*leaves, bias=bias)
    grads = torch.autograd.grad(out, leaves, grad)
    assert not out[:, :, 130:140].any()
    assert not grads[0][:, :, 130:140].any()
    assert all(torch.isfinite(each).all() for each in grads)
    wanted = reference(query, key, value, causal=True)[:, :, 140:]
    assert_within(relative_error(out[:, :, 140:].detach(), wanted), 1e-12)


def test_dropout_masks_are_even_and_unrelated() -> None:
    numbers = [torch.arange(size) for size in (500, 600, 2, 3)]
    dropped = [Terms(*numbers, dropout=0.25, seed=seed).weight_factors(torch.float64) == 0 for seed in (1, 2, 1 << 40)]
    # 3.6e6 draws: a standard deviation of 2.3e-4 for all, of 0.02 for one row or column.
    for mask in dropped:
        assert abs(float(mask.double().mean()) - 0.25) < 1e-3
        for dim in (2, 3):
            assert (mask.double().mean(dim) - 0.25).abs().max() < 0.1
    pairs = [(dropped[0], dropped[1]), (dropped[0], dropped[2]), (dropped[0][0], dropped[0][1])]
    neighbours = [(dropped[0][..., :-1], dropped[0][..., 1:]), (dropped[0][:, :, :-1], dropped[0][:, :, 1:])]
    for one, other in [*pairs, *neighbours, (dropped[0][:, 0], dropped[0][:, 1])]:
        assert abs(float((one & other).double().mean()) - 0.25**2) < 1e-3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout": 0.1}, "dropout wants a dropout_seed"),
        ({"dropout": 1.0, "dropout_seed": 0}, "dropout 1.0 must be at least 0 and below 1"),
        ({"alibi_slopes": torch.ones(2)}, r"alibi_slopes \[2\] must be one for each of 6 query heads"),
        (
            {"bias": torch.ones(1, 1, 8, 4)},
            r"bias \[1, 1, 8, 4\] must be \[1 or 2, 1 or 6, 8 local tokens, 8 · 1 ranks",
        ),
        ({"bias": torch.ones(1, 1, 8, 8, requires_grad=True)}, r"bias would get no gradient: give bias.detach\(\)"),
    ],
)
def test_terms_that_do_not_fit_are_named(options: dict[str, Any], words: str) -> None:
    query, key, value, _ = _inputs(8)
    with pytest.raises(ValueError, match=words):
        ring_attention(query, key, value, **options)


def test_implementations_have_names() -> None:
    query, key, value, _ = _inputs(8)
    assert torch.equal(attention(query, key, value, implementation="all_gather"), attention(query, key, value))
    with pytest.raises(ValueError, match="no implementation 'rings'; there are ring, double_ring, all_gather"):
        attention(query, key, value, implementation="rings")


def test_merging_many_blocks_does_not_drift() -> None:
    blocks = 512
    query, key, value, _ = _inputs(4 * blocks, dtype=torch.float32)
    out, lse = torch.empty(2, 6, 8, 16), torch.empty(2, 6, 8)
    running = RunningAttention(out, lse)
    for start in range(0, 4 * blocks, 4):
        tiles = [_full(slice(0, 8), slice(start, start + 4))]
        attend(CpuFlashKernel(), tiles, query[:, :, :8], key, value, running, 0.25)
    # 512 roundings that cancel partly; one fp32 kernel call over all keys has about 3e-7.
    assert_within(relative_error(running.finish()[0], reference(query[:, :, :8], key, value, causal=False)), 1e-5)


def test_merging_keeps_nan_and_huge_scores() -> None:
    out, lse = torch.empty(1, 1, 2, 1), torch.empty(1, 1, 2)
    running = RunningAttention(out, lse)
    running.add(slice(None), torch.tensor([[[[1.0], [1.0]]]]), torch.tensor([[[1e30, 0.0]]]))
    running.add(slice(None), torch.tensor([[[[5.0], [math.nan]]]]), torch.tensor([[[-1e30, math.nan]]]))
    running.finish()
    assert out[0, 0, 0, 0] == 1.0
    assert torch.isnan(out[0, 0, 1, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_plain_kernel_computes_in_high_precision(dtype: torch.dtype) -> None:
    query, key, value, _ = _inputs(300, value_dim=24, dtype=dtype)
    out, lse = PlainKernel().forward(query, key, value, band=CAUSAL, scale=0.25)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    rounding = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert_within(relative_error(out, reference(query, key, value, causal=True)), rounding)


@pytest.mark.parametrize(
    ("products", "threads", "bf16"),
    [(True, 1, ("cpu-tiles", None)), (True, 2, ("cpu-flash", 1536)), (False, 1, ("cpu-flash", 1536))],
)
def test_the_kernel_of_cpus_is_the_faster_one(
    products: bool, threads: int, bf16: tuple[str, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "has_bf16_products_alone", lambda: products)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    query, _, value, _ = _inputs(10)
    for dtype, wanted in ((torch.float64, ("cpu-flash", None)), (torch.bfloat16, bf16)):
        kernel = select_kernel(query.to(dtype), value.to(dtype), banded=True, added=True)
        assert (kernel.name, kernel.backward_rows) == wanted
    # Where nothing is computed, shapes are those of a fused kernel.
    assert select_kernel(query.to("meta"), value.to("meta")).name == "cpu-flash"


@pytest.mark.parametrize(
    ("supported", "wanted"), [((True, False), True), ((True, True), False), ((False, False), False)]
)
def test_a_matrix_unit_is_for_the_fused_kernel(
    supported: tuple[bool, bool], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, here in zip(("avx512_bf16", "amx_tile"), supported, strict=True):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda here=here: here, raising=False)
    assert selection.has_bf16_products_alone.__wrapped__() is wanted


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [True, False])
def test_without_a_group_it_is_plain_local_attention(layout: str, causal: bool) -> None:
    measured = errors(Case(layout=layout, causal=causal, chunk=51), None, 1, 0)
    assert_within(max(measured.values()), 1e-12)


def test_one_rank_takes_any_number_of_tokens() -> None:
    query, key, value, _ = _inputs(7)
    assert_within(relative_error(ring_attention(query, key, value), reference(query, key, value, causal=True)), 1e-12)


def test_a_slower_kernel_is_announced_once_with_the_reason() -> None:
    query, _, value, _ = _inputs(10)
    _announce.cache_clear()
    with pytest.warns(UserWarning, match="slower: the dropout of fused kernels depends on how the sequence is split"):
        select_kernel(query, value, dropout=True)
    with pytest.warns(UserWarning, match="slower: cpu-flash has no soft-capping") as seen:
        for _ in range(3):
            assert select_kernel(query, value, softcap=30.0).name == "plain"
    assert len(seen) == 1


def warnings_of_rank(_: int) -> int:
    """How many warnings two attentions with one reason give."""
    query, _, value, _ = _inputs(10)
    _announce.cache_clear()
    dist.init_process_group("gloo")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            select_kernel(query, value, softcap=30.0)
    dist.destroy_process_group()
    return sum("cpu-flash has no soft-capping" in str(one.message) for one in seen)


@pytest.mark.ranks
def test_one_rank_of_a_host_announces_a_slower_kernel() -> None:
    assert sum(run_ranks(3, warnings_of_rank)) == 1


def test_values_may_have_another_head_dim() -> None:
    query, key, value, grad = _inputs(90, value_dim=40)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    wanted = torch.autograd.grad(reference(*leaves, causal=True), leaves, grad)
    got = torch.autograd.grad(ring_attention(*leaves), leaves, grad)
    assert_within(max(relative_error(*pair) for pair in zip(got, wanted, strict=True)), 1e-12)


def test_inputs_may_have_any_strides() -> None:
    query, key, value, grad = _inputs(64)
    wanted = ring_attention(query, key, value)
    last_dim_apart = (tensor.mT.contiguous().mT for tensor in (query, key, value))
    token_major = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value))
    assert torch.equal(ring_attention(*last_dim_apart), wanted)
    assert torch.equal(ring_attention(*token_major), wanted)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    grads = torch.autograd.grad(ring_attention(*leaves), leaves, grad)
    strided = torch.autograd.grad(ring_attention(*leaves), leaves, grad.mT.contiguous().mT)
    assert all(torch.equal(*pair) for pair in zip(grads, strided, strict=True))


def test_empty_batches_and_sequences_do_not_crash() -> None:
    for shape in ((0, 2, 8, 16), (1, 2, 0, 16)):
        leaves = [torch.empty(shape, requires_grad=True) for _ in range(3)]
        out = ring_attention(*leaves)
        out.sum().backward()
        assert out.shape == shape
        assert all(leaf.grad is not None and leaf.grad.shape == shape for leaf in leaves)


def test_autocast_casts_as_it_does_for_torch_attention() -> None:
    query, key, value, _ = (tensor.float() for tensor in _inputs(32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ring_attention(query, key.bfloat16(), value.bfloat16()).dtype == torch.bfloat16
        assert ring_attention(query.double(), key.double(), value.double()).dtype == torch.float64


def test_second_derivatives_are_refused() -> None:
    query = _draw(1, 1, 4, 8).requires_grad_()
    (grad,) = torch.autograd.grad(ring_attention(query, query, query).square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((1, 3, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4)), "3 query heads are no multiple of 2 key/value heads"),
        (
            ((1, 2, 8, 4), (1, 2, 6, 4), (1, 2, 6, 4)),
            r"local tokens must be equal, got query \[1, 2, 8, 4\], key \[1, 2, 6, 4\]",
        ),
        (((1, 2, 8, 4), (1, 2, 8, 6), (1, 2, 8, 6)), "query and key must have one head dim"),
        (((2, 8, 4), (2, 8, 4), (2, 8, 4)), r"expected \[batch, heads, local tokens, head dim\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes: tuple[tuple[int, ...], ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ring_attention(*(torch.zeros(shape) for shape in shapes))


def test_dtypes_and_layouts_that_do_not_fit_are_named() -> None:
    query, key, value, _ = _inputs(8)
    with pytest.raises(
        ValueError, match=r"one dtype and one device, got query torch\.float64 on cpu, key torch\.float32"
    ):
        ring_attention(query, key.float(), value)
    with pytest.raises(ValueError, match=r"floating-point dtype, got torch\.int64"):
        ring_attention(query.long(), key.long(), value.long())
    with pytest.raises(ValueError, match="'zigzig'"):
        ring_attention(query, key, value, layout="zigzig")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ring_attention(query, key, value, layout=CpLayout.CONTIGUOUS)
