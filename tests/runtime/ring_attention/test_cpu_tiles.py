"""The tiles of CPUs: any band, head counts and scores, against the plain kernel in float64, and their precision."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import relative_error
from closeness import assert_close, assert_within
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parcompile.runtime.ring_attention.kernels import CAUSAL, FULL, Band, Tile, cpu_tiles
from parcompile.runtime.ring_attention.kernels import cpu_tiles as cpu_products
from parcompile.runtime.ring_attention.kernels.cpu_tiles import CpuTileKernel
from parcompile.runtime.ring_attention.kernels.fused import CpuFlashKernel
from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Kernel, Queries
from parcompile.runtime.ring_attention.kernels.plain import PlainKernel


def _everything(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, band: Band, scale: float
) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and the gradients of query, key and value."""
    out, lse = kernel.forward(query, key, value, band=band, scale=scale, terms=None)
    sums = Gradients(*(torch.zeros_like(each, dtype=lse.dtype) for each in (query, key, value)))
    kernel.backward(Queries(query, grad, out, lse, scale), key, value, band=band, terms=None, into=sums)
    return out, lse, sums.query, sums.key, sums.value


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=120, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    lower=st.none() | st.integers(-40, 40),
    upper=st.none() | st.integers(-40, 40),
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 3),
    value_dim=st.sampled_from([4, 8]),
    steepness=st.sampled_from([0.0, 1.0, 300.0, -300.0]),
    tile=st.tuples(st.integers(1, 24), st.integers(1, 24)),
)
def test_every_band_equals_the_plain_kernel(
    rows: int,
    columns: int,
    lower: int | None,
    upper: int | None,
    kv_heads: int,
    share: int,
    value_dim: int,
    steepness: float,
    tile: tuple[int, int],
) -> None:
    trimmed = Tile(slice(0, rows), slice(0, columns), Band(lower, upper)).trimmed()
    if trimmed is None:
        return
    rows, columns = trimmed.queries.stop - trimmed.queries.start, trimmed.keys.stop - trimmed.keys.start
    query, grad = _draw(2, kv_heads * share, rows, 8, seed=1), _draw(2, kv_heads * share, rows, value_dim, seed=2)
    key, value = _draw(2, kv_heads, columns, 8, seed=3), _draw(2, kv_heads, columns, value_dim, seed=4)
    # Scores that rise or fall by hundreds from the first key to the last.
    query[..., 0] = 1.0
    key[..., 0] = steepness * torch.arange(columns)
    with pytest.MonkeyPatch.context() as patch:
        for name, number in zip(("_ROWS", "_KEYS"), tile, strict=True):
            patch.setattr(cpu_tiles, name, number)
        patch.setattr(cpu_tiles, "_DIAGONAL_QUERIES", 3)
        patch.setattr(cpu_tiles, "_DIAGONAL_ROWS", 5)
        got = _everything(CpuTileKernel(), query, key, value, grad, trimmed.band, 0.3)
    for one, other in zip(got, _everything(PlainKernel(), query, key, value, grad, trimmed.band, 0.3), strict=True):
        assert_close(one, other, limit=1e-11, least=other.numel() ** 0.5)  # some are zeros but for rounding


@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-700, 0)], ids=["full", "causal", "window"])
def test_sums_over_tiles_are_not_rounded_to_bf16(band: Band) -> None:
    tensors = [_draw(1, heads, 1500, 64, seed=heads + seed).bfloat16() for seed, heads in enumerate((8, 2, 2, 8))]
    wide = [tensor.double() for tensor in tensors]
    exact = _everything(PlainKernel(), *wide, band, 0.125)
    errors = [
        relative_error(got, wanted)
        for got, wanted in zip(_everything(CpuTileKernel(), *tensors, band, 0.125), exact, strict=True)
    ]
    # bf16 rounds to 1.7e-3 in the mean: the output once more than the fused kernel, sums and log-sum-exp never.
    assert_within(errors[0], 1e-2, "output")
    assert_within(errors[1], 3e-6, "log-sum-exp")
    assert_within(max(errors[2:]), 2e-2, "sums")
    if band == CAUSAL:
        # The fused kernel of CPUs sums the gradients of keys and values in bf16.
        fused = _everything(CpuFlashKernel(), *tensors, band, 0.125)
        assert all(errors[i] < 0.7 * relative_error(fused[i], exact[i]) for i in (3, 4))


def test_what_is_not_a_number_is_not_hidden_and_stays_in_its_heads() -> None:
    query, key, value = (_draw(1, heads, 12, 8, seed=heads) for heads in (4, 2, 2))
    key[0, 0, 5] = math.nan
    out, lse = CpuTileKernel().forward(query, key, value, band=CAUSAL, scale=0.3)
    assert torch.isnan(out[0, :2, 5:]).all()
    assert torch.isnan(lse[0, :2, 5:]).all()
    assert torch.isfinite(out[0, 2:]).all()
    assert torch.isfinite(lse[0, 2:]).all()


def test_blocks_take_their_memory_from_those_before_and_give_it_back() -> None:
    query, key, value = (_draw(1, heads, 12, 8, seed=heads) for heads in (4, 2, 2))

    def forward() -> dict[object, int]:
        CpuTileKernel().forward(query, key, value, band=CAUSAL, scale=0.3)
        held = getattr(cpu_products._memory, "held", None) or {}
        return {use: tensor.data_ptr() for use, tensor in held.items()}

    assert not forward()
    with cpu_products.kept_memory():
        first = forward()
        with cpu_products.kept_memory():
            assert forward() == first
        assert forward() == first != {}
    assert not forward()
