"""Cutting and merging weights. The figures are those of the systems that this project started from."""

from __future__ import annotations

import pytest
import torch

from parcompile.runtime.tensor_parallel import even_range, merge_ranges, take_ranges

from .world import shard_weight


def test_rows_of_8_by_4_are_halved_into_0_to_15_and_16_to_31() -> None:
    full = torch.arange(32.0).view(8, 4)
    first, second = (shard_weight(full, 0, rank, 2) for rank in range(2))
    assert first.shape == second.shape == (4, 4)
    assert first.flatten().tolist() == list(range(16))
    assert second.flatten().tolist() == list(range(16, 32))
    assert torch.equal(merge_ranges([first, second], 0, [[(0, 4)], [(4, 8)]], 8), full)


def test_columns_of_2_by_4_are_halved() -> None:
    full = torch.arange(1.0, 9.0).view(2, 4)
    assert shard_weight(full, 1, 0, 2).flatten().tolist() == [1, 2, 5, 6]
    assert shard_weight(full, 1, 1, 2).flatten().tolist() == [3, 4, 7, 8]


def test_rows_of_4_by_2_are_halved() -> None:
    full = torch.arange(1.0, 9.0).view(4, 2)
    assert shard_weight(full, 0, 0, 2).flatten().tolist() == [1, 2, 3, 4]
    assert shard_weight(full, 0, 1, 2).flatten().tolist() == [5, 6, 7, 8]


def test_half_of_1024_squared_has_524288_elements() -> None:
    assert [even_range(1024, rank, 2) for rank in range(2)] == [(0, 512), (512, 1024)]
    assert shard_weight(torch.empty(1024, 1024, device="meta"), 0, 1, 2).numel() == 524_288


def test_a_strided_weight_is_cut_into_contiguous_storage_of_its_own() -> None:
    full = torch.arange(32.0).view(4, 8).t()
    shard = shard_weight(full, 0, 1, 2)
    assert shard.is_contiguous() and torch.equal(shard, full[4:])
    shard.zero_()
    assert full[4, 0] == 4.0


def test_ranges_may_repeat_and_interleave() -> None:
    # A packed gate-up weight: the second half of the gate, then the second half of up.
    full = torch.arange(8.0).view(8, 1)
    assert take_ranges(full, 0, [(2, 4), (6, 8)]).flatten().tolist() == [2, 3, 6, 7]
    assert take_ranges(full, 0, [(1, 2), (1, 2)]).flatten().tolist() == [1, 1]


def test_a_padded_weight_continues_with_zeros() -> None:
    full = torch.ones(7, 2)
    assert torch.equal(take_ranges(full, 0, [(6, 12)], padded_size=12), torch.tensor([[1.0, 1.0]] + [[0.0, 0.0]] * 5))
    assert torch.equal(take_ranges(full, 0, [(8, 12)], padded_size=12), torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 2), "rank 2 is not in 0..1"),
        ((0, -1, 2), "rank -1 is not in 0..1"),
        ((0, 0, 0), "there must be at least one rank"),
        ((0, 0, 3), "8 % 3 = 2; pad to 9"),
    ],
)
def test_a_bad_cut_is_refused_with_its_numbers(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match="^.*" + message.replace("(", r"\(").replace(")", r"\)")):
        shard_weight(torch.zeros(8, 4), *arguments)


def test_a_range_outside_the_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"range 6\.\.9 is not within 0\.\.8"):
        take_ranges(torch.zeros(8, 4), 0, [(6, 9)])
    with pytest.raises(ValueError, match=r"dim 2 is out of range for shape \(8, 4\)"):
        take_ranges(torch.zeros(8, 4), 2, [(0, 1)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_packed_replicated_and_padded_slices_go_back_where_they_came_from(dtype: torch.dtype, dim: int) -> None:
    full = torch.arange(7 * 7).view(7, 7).to(dtype)
    # Two packed parts, an index that both ranks hold, and one row of padding.
    ranges = [[(0, 2), (3, 5)], [(2, 4), (5, 8)]]
    shards = [take_ranges(full, dim, held, padded_size=8) for held in ranges]
    assert torch.equal(merge_ranges(shards, dim, ranges, 7), full)


def test_slices_that_do_not_make_a_whole_are_refused() -> None:
    full = torch.arange(8.0)
    first, second = take_ranges(full, 0, [(0, 5)]), take_ranges(full, 0, [(4, 8)])
    with pytest.raises(ValueError, match="no rank holds index 5 of dim 0"):
        merge_ranges([first], 0, [[(0, 5)]], 8)
    with pytest.raises(ValueError, match="its ranges have 4"):
        merge_ranges([first], 0, [[(0, 4)]], 4)
    with pytest.raises(ValueError, match=r"rank 1 and a rank before it hold different values in 4\.\.8"):
        merge_ranges([first, second + 1], 0, [[(0, 5)], [(4, 8)]], 8)
    with pytest.raises(ValueError, match="1 shards, but ranges for 2 ranks"):
        merge_ranges([first], 0, [[(0, 5)], [(4, 8)]], 8)
