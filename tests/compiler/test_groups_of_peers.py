"""The groups against those of Megatron-Core, DeepSpeed and torch, where these are installed."""

from __future__ import annotations

import itertools

import pytest
from layout_cases import AXES, orders

from parcompile.layout.groups import EXPERT_AXES, GROUP_AXES, MEGATRON_AXES, Grid, expert_grid

SIZES = ((2, 2, 2, 2), (4, 1, 2, 3), (1, 3, 4, 2), (2, 4, 1, 3))


def test_groups_equal_megatron_cores_rank_generator() -> None:
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    masks = GROUP_AXES | MEGATRON_AXES
    for sizes, order in itertools.product(SIZES, orders()):
        named = dict(zip(AXES, sizes, strict=True))
        generator = parallel_state.RankGenerator(ep=1, order="-".join(order), **named)
        grid = Grid.of(order, named)
        for axes in masks.values():
            assert [list(group) for group in grid.groups(axes)] == generator.get_ranks("-".join(axes)), (order, axes)
        shared = named["dp"] * named["cp"]
        for ep in (ep for ep in (1, 2, 4) if shared % ep == 0):
            with_ep = (*order[:2], "ep", *order[2:])
            experts = parallel_state.RankGenerator(
                tp=named["tp"], ep=ep, dp=shared // ep, pp=named["pp"], cp=1, order="-".join(with_ep)
            )
            grid = expert_grid(Grid.of(with_ep, named), ep)
            for axes in EXPERT_AXES.values():
                assert [list(group) for group in grid.groups(axes)] == experts.get_ranks("-".join(axes))


def test_groups_equal_deepspeeds_topology() -> None:
    topology = pytest.importorskip("deepspeed.runtime.pipe.topology")
    for sizes, order in itertools.product(SIZES, orders()):
        named = dict(zip(AXES, sizes, strict=True))
        outermost_first = list(reversed(order))
        peer = topology.ProcessTopology(outermost_first, [named[axis] for axis in outermost_first])
        grid = Grid.of(order, named)
        for axis in AXES:
            lists = peer.get_axis_comm_lists(axis)
            # DeepSpeed makes no lists for an axis of size 1 and orders lists by coordinates, not by their first rank.
            if named[axis] > 1:
                assert sorted(map(list, grid.groups((axis,)))) == sorted(lists)


def test_groups_equal_torchs_device_mesh() -> None:
    torch = pytest.importorskip("torch")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.device_mesh import DeviceMesh

    sizes = {"tp": 2, "cp": 3, "dp": 2, "pp": 2}
    torch.distributed.init_process_group("fake", rank=5, world_size=24, store=fake.FakeStore())
    try:
        for order in orders():
            outermost_first = tuple(reversed(order))
            ranks = torch.arange(24).view([sizes[axis] for axis in outermost_first])
            mesh = DeviceMesh("cpu", ranks, mesh_dim_names=outermost_first)
            grid = Grid.of(order, sizes)
            assert dict(zip(outermost_first, mesh.get_coordinate(), strict=True)) == grid.coordinates(5)
            for axis in AXES:
                assert tuple(mesh[axis].mesh.tolist()) == grid.group(5, (axis,))
    finally:
        torch.distributed.destroy_process_group()
