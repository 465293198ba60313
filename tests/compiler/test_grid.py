import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import AXES, divisor_tuples, enumerated, orders

from parcompile.layout.groups import AXES as ALL_AXES
from parcompile.layout.groups import CP_LEVELS, KV_REPLICA, Axis, AxisGroups, Grid, Groups

MASKS = (
    ("tp",),
    ("cp",),
    ("dp",),
    ("pp",),
    ("cp", "dp"),
    ("tp", "pp"),
    ("tp", "cp"),
    ("tp", "dp"),
    ("tp", "cp", "dp"),
    ("tp", "cp", "dp", "pp"),
)


def distinct(order: tuple[str, ...], sizes: dict[str, int]) -> bool:
    """Whether the order is the first of those that differ only in where axes of size 1 stand."""
    small = [axis for axis in order if sizes[axis] == 1]
    return order[len(order) - len(small) :] == tuple(sorted(small))


def check(order: tuple[str, ...], sizes: dict[str, int]) -> None:
    grid = Grid.of(order, sizes)
    for axes in MASKS:
        family = AxisGroups(grid, axes)
        assert [list(group) for group in family.all()] == enumerated(order, sizes, axes).tolist(), (order, sizes, axes)


@pytest.mark.parametrize("worlds", [range(1, 65), range(65, 129)], ids=str)
def test_groups_equal_a_brute_force_enumeration_for_every_order_and_divisor_tuple(worlds) -> None:
    count = 0
    for world in worlds:
        for sizes in divisor_tuples(world):
            named = dict(zip(AXES, sizes, strict=True))
            for order in orders():
                if distinct(order, named):
                    check(order, named)
                    count += 1
    assert count > 5000


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_rank_is_a_member_of_its_own_group_in_any_world(data) -> None:
    sizes = {axis: data.draw(st.integers(1, 40), axis) for axis in ("tp", "cp", "pp")} | {"dp": 64}
    grid = Grid.of(data.draw(st.permutations(AXES).map(tuple)), sizes)
    rank = data.draw(st.integers(0, grid.world_size - 1))
    axes = data.draw(st.sampled_from(MASKS[:-1]))
    group = grid.group(rank, axes)
    assert len(group) == len(set(group)) == grid.size(axes)
    assert list(group) == sorted(group)
    assert rank in group
    here = grid.coordinates(rank)
    for member in group[:: max(1, len(group) // 16)]:
        there = grid.coordinates(member)
        assert all(there[axis] == here[axis] for axis in AXES if axis not in axes)
        assert grid.rank(there) == member
        assert grid.group(member, axes) == group


@pytest.mark.parametrize("order", orders())
def test_a_million_ranks_are_covered_exactly_once_without_listing_them(order) -> None:
    """Sizes and strides are a mixed-radix system over starts and members together: each rank has one representation."""
    grid = Grid.of(order, {"tp": 8, "cp": 16, "dp": 512, "pp": 16})
    assert grid.world_size == 1_048_576
    for axes in MASKS:
        family = AxisGroups(grid, axes)
        steps = sorted((*family.members, *family.starts), key=lambda step: step[1])
        expected = 1
        for size, stride in steps:
            assert stride == expected
            expected *= size
        assert expected == grid.world_size
        assert family.size * family.count == grid.world_size


@pytest.mark.parametrize("rank", [-1, 8, 1 << 40])
def test_a_rank_outside_the_world_is_refused(rank) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} is not in a world of 8: it needs 0 ≤ rank < 8"):
        Grid.of(AXES, {"tp": 8}).group(rank, ("tp",))


def test_hierarchical_context_parallel_levels_are_slices_of_the_factored_axis() -> None:
    grid = Grid.of(("tp", "cp", "dp", "pp"), {"tp": 2, "cp": 8, "dp": 2})
    inner, outer = (Groups(grid, cp_sizes=(2, 4)).family(name) for name in CP_LEVELS)
    assert inner.of_rank(0) == (0, 2)
    assert outer.of_rank(0) == (0, 4, 8, 12)
    # The definition of Megatron-Core: a cp group as an array [outer, inner], its rows and its columns.
    for group in grid.groups(("cp",)):
        for level, family in ((0, inner), (1, outer)):
            for rank in group:
                index = group.index(rank)
                expected = group[index // 2 * 2 : index // 2 * 2 + 2] if level == 0 else group[index % 2 :: 2]
                assert family.of_rank(rank) == expected
    # The grid under it, on the example of Megatron-Core's create_hierarchical_groups: sixteen ranks, 2 · 2 · 4.
    names = ("inner", "middle", "outer")
    factored = Grid.of((Axis.CP,), {Axis.CP: 16}).factored(Axis.CP, names, (2, 2, 4))
    levels = [list(AxisGroups(factored, (name,)).all()) for name in names]
    assert levels[0] == [(first, first + 1) for first in range(0, 16, 2)]
    assert levels[1] == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert levels[2] == [(first, first + 4, first + 8, first + 12) for first in range(4)]
    with pytest.raises(ValueError, match="2 · 3 = 6 ≠ cp 8"):
        Groups(grid, cp_sizes=(2, 3)).family(CP_LEVELS[0])


@pytest.mark.parametrize(("tp", "replicas"), [(4, 2), (8, 4), (8, 8)])
def test_kv_replicas_are_runs_of_each_tp_group(tp, replicas) -> None:
    grid = Grid.of(("cp", "tp", "dp", "pp"), {"tp": tp, "cp": 2, "dp": 2})
    family = Groups(grid, replicas).family(KV_REPLICA)
    runs = {
        group[start : start + replicas] for group in grid.groups(("tp",)) for start in range(0, len(group), replicas)
    }
    assert set(family.all()) == runs
    assert sum(map(len, family.all())) == grid.world_size == math.prod((tp, 2, 2))


class TestAxis:
    def test_is_its_value_wherever_it_is_written(self) -> None:
        axis = Axis.TP
        assert [str(axis), f"{axis}", f"{axis:>4}", "{}".format(axis)] == ["tp", "tp", "  tp", "tp"]  # noqa: UP032
        assert "-".join(ALL_AXES) == "tp-cp-ep-dp-pp"
        assert json.dumps({axis: [axis]}) == '{"tp": ["tp"]}'

    def test_is_found_under_its_value(self) -> None:
        assert {"tp": 1}[Axis.TP] == 1
        assert Axis("tp") is Axis.TP
