"""Column- and row-parallel linears on live ranks, against the full layers in the same process.

Tolerances: sums over ranks are formed in another order than in one matmul, which costs a few units in the last place:
1e-12 relative (L2) in float64, 3e-6 in float32.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from closeness import assert_within
from torch import Tensor, nn

from parcompile.runtime.collectives import (
    copy_to_group,
    gather_from_group,
    gather_from_sequence,
    scatter_to_group,
)
from parcompile.runtime.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    is_sharded,
)

from .world import World, relative_error, shard_weight

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp64", "fp32"])


def assert_close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None and expected is not None
    assert actual.dtype == expected.dtype
    assert_within(relative_error(actual, expected), TOLERANCE[expected.dtype])


def shard(full: Tensor | None, dim: int) -> Tensor:
    assert full is not None
    return shard_weight(full, dim, dist.get_rank(), dist.get_world_size())


def check_column_then_row(dtype: torch.dtype, sequence_parallel: bool) -> None:
    """8 → 16 → 4 on [2, 5 or 8, 8]: outputs, the input's gradient, and every weight's."""
    torch.manual_seed(0)
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    up, down = nn.Linear(8, 16, dtype=dtype), nn.Linear(16, 4, dtype=dtype)
    x = torch.randn(2, 8 if sequence_parallel else 5, 8, dtype=dtype)
    weight = torch.randn(2, x.shape[1], 4, dtype=dtype)
    x_full = x.clone().requires_grad_()
    y_full = down(nn.functional.gelu(up(x_full)))
    y_full.backward(weight)

    column = ColumnParallelLinear.from_linear(up, group=group, sequence_parallel=sequence_parallel)
    row = RowParallelLinear.from_linear(down, group=group, sequence_parallel=sequence_parallel)
    assert column.weight.shape == (16 // ranks, 8) and row.weight.shape == (4, 16 // ranks)
    if sequence_parallel:
        x, weight = (t.chunk(ranks, 1)[rank] for t in (x, weight))
    x_local = x.clone().requires_grad_()
    y_local = row(nn.functional.gelu(column(x_local)))
    y_local.backward(weight)

    own = (lambda t: t.chunk(ranks, 1)[rank]) if sequence_parallel else (lambda t: t)
    assert_close(y_local, own(y_full))
    assert_close(x_local.grad, own(x_full.grad))
    assert_close(column.weight.grad, shard(up.weight.grad, 0))
    assert_close(column.bias.grad, shard(up.bias.grad, 0))
    assert_close(row.weight.grad, shard(down.weight.grad, 1))
    assert_close(row.bias.grad, down.bias.grad)
    if not sequence_parallel:
        others = gather_from_group(y_local.detach().unsqueeze(0), 0, group)
        assert all(torch.equal(other, y_local) for other in others), "replicated outputs differ between ranks"


def check_options() -> None:
    torch.manual_seed(0)
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    linear, dtype = nn.Linear(8, 4, dtype=torch.float64), torch.float64
    x = torch.ones(5, 8, dtype=dtype)
    local = ColumnParallelLinear.from_linear(linear, group=group)(x)
    assert local.shape == (5, 4 // ranks)
    assert_close(local, linear(x).chunk(ranks, -1)[rank])

    x_full, x_local = x.clone().requires_grad_(), x.clone().requires_grad_()
    cutting = RowParallelLinear.from_linear(linear, group=group, input_is_parallel=False)
    assert_close(cutting(x_local), linear(x_full))
    cutting(x_local).square().sum().backward()
    linear(x_full).square().sum().backward()
    assert_close(x_local.grad, x_full.grad)
    assert_close(cutting.weight.grad, shard(linear.weight.grad, 1))


def check_shared_entry(sequence_parallel: bool) -> None:
    """q, k and v on an input that was gathered (or copied) once."""
    torch.manual_seed(0)
    group = dist.group.WORLD
    linears = [nn.Linear(8, size, bias=False, dtype=torch.float64) for size in (16, 8, 8)]
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    x_full, x_local = x.clone().requires_grad_(), x.clone().requires_grad_()
    sum(linear(x_full).square().sum() for linear in linears).backward()

    columns = [ColumnParallelLinear.from_linear(linear, group=group, input_is_ready=True) for linear in linears]
    if sequence_parallel:
        ready = gather_from_sequence(scatter_to_group(x_local, 1, group), 1, group)
    else:
        ready = copy_to_group(x_local, group)
    sum(column(ready).square().sum() for column in columns).backward()
    assert_close(x_local.grad, x_full.grad)
    for column, linear in zip(columns, linears, strict=True):
        assert_close(column.weight.grad, shard(linear.weight.grad, 0))


def check_kv_replication(bias: bool) -> None:
    """Four q and two kv heads of size 2 on four ranks: ranks 0, 1 hold kv head 0, ranks 2, 3 hold kv head 1."""
    torch.manual_seed(0)
    group, rank = dist.group.WORLD, dist.get_rank()
    replica_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    head = rank // 2
    k_full = nn.Linear(8, 4, bias=bias, dtype=torch.float64)
    x = torch.randn(3, 8, dtype=torch.float64)
    by_q_head = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)  # what each q head does with its kv head
    keys = k_full(x).view(3, 2, 2).repeat_interleave(2, 1)
    (keys.sin() * by_q_head.view(1, 4, 1)).sum().backward()

    k = ColumnParallelLinear.from_linear(
        k_full, group=group, ranges=[(2 * head, 2 * head + 2)], replica_group=replica_groups[head]
    )
    (k(x).sin() * by_q_head[rank]).sum().backward()
    rows = slice(2 * head, 2 * head + 2)
    assert_close(k.weight.grad, k_full.weight.grad[rows])
    assert k.weight.tensor_model_parallel is (rank % 2 == 0)
    counted = k.weight.grad.square().sum() * k.weight.tensor_model_parallel
    if bias:
        assert_close(k.bias.grad, k_full.bias.grad[rows])
        assert k.bias.tensor_model_parallel is (rank % 2 == 0)
    dist.all_reduce(counted)
    assert_close(counted, k_full.weight.grad.square().sum())
    replicas = gather_from_group(k.weight.grad.unsqueeze(0), 0, replica_groups[head])
    assert torch.equal(replicas[0], replicas[1])
    for replica_group in replica_groups:
        dist.destroy_process_group(replica_group)


def check_packed_ranges() -> None:
    """A packed gate-up weight [gate; up]: each rank takes its part of both."""
    torch.manual_seed(0)
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    packed, down = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)
    x = torch.randn(3, 8, dtype=torch.float64)
    size = 8 // ranks
    ranges = [(rank * size, (rank + 1) * size), (8 + rank * size, 8 + (rank + 1) * size)]
    column = ColumnParallelLinear.from_linear(packed, group=group, ranges=ranges)
    row = RowParallelLinear.from_linear(down, group=group)
    gate, up = column(x).split(column.part_sizes, -1)
    row(gate.sigmoid() * up).square().sum().backward()
    gate, up = packed(x).chunk(2, -1)
    down(gate.sigmoid() * up).square().sum().backward()
    assert_close(column.weight.grad, torch.cat([packed.weight.grad[start:stop] for start, stop in ranges]))
    assert_close(row.weight.grad, shard(down.weight.grad, 1))


def check_initialization() -> list[Tensor]:
    group = dist.group.WORLD
    torch.manual_seed(7)
    column = ColumnParallelLinear(8, 600, group=group)
    row = RowParallelLinear(600, 8, group=group)
    return [column.weight.detach(), column.bias.detach(), row.weight.detach(), row.bias.detach()]


def check_frozen_and_half() -> None:
    group = dist.group.WORLD
    linear = nn.Linear(8, 8).bfloat16()
    linear.weight.requires_grad_(False)
    for layer in (
        ColumnParallelLinear.from_linear(linear, group=group),
        RowParallelLinear.from_linear(linear, group=group, input_is_parallel=False),
    ):
        layer(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        assert layer.weight.dtype == torch.bfloat16 and not layer.weight.requires_grad and layer.weight.grad is None
        assert layer.bias.grad is not None


@pytest.mark.ranks
@DTYPES
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
def test_column_then_row_equals_the_full_layers(ranks: World, dtype: torch.dtype, sequence_parallel: bool) -> None:
    ranks.run(check_column_then_row, dtype, sequence_parallel)


@pytest.mark.ranks
def test_a_row_layer_that_cuts_its_input_equals_the_full_layer(ranks: World) -> None:
    ranks.run(check_options)


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
def test_several_columns_share_one_entry(ranks: World, sequence_parallel: bool) -> None:
    ranks.run(check_shared_entry, sequence_parallel)


@pytest.mark.ranks
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_kv_heads_are_replicated_when_tp_exceeds_them(four_ranks: World, bias: bool) -> None:
    four_ranks.run(check_kv_replication, bias)


@pytest.mark.ranks
def test_packed_weights_follow_their_ranges(ranks: World) -> None:
    ranks.run(check_packed_ranges)


@pytest.mark.ranks
def test_any_layout_starts_from_the_same_weights(ranks: World) -> None:
    torch.manual_seed(7)
    full = [*ColumnParallelLinear(8, 600).parameters(), *RowParallelLinear(600, 8).parameters()]
    shards = ranks.run(check_initialization)
    for index, (parameter, dim) in enumerate(zip(full, (0, 0, 1, None), strict=True)):
        pieces = [shard[index] for shard in shards]
        assert torch.equal(pieces[0] if dim is None else torch.cat(pieces, dim), parameter)


def test_a_meta_layer_is_materialised_with_the_same_weights_slice_by_slice() -> None:
    torch.manual_seed(7)
    expected = RowParallelLinear(600, 300, ranges=[(10, 20)]).weight
    torch.manual_seed(7)
    layer = RowParallelLinear(600, 300, ranges=[(10, 20)], device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert torch.equal(layer.weight, expected) and layer.weight.tensor_model_parallel is True


@pytest.mark.ranks
def test_frozen_and_half_precision_weights_stay_so(two_ranks: World) -> None:
    two_ranks.run(check_frozen_and_half)


def test_drawn_weights_are_distributed_as_those_of_a_plain_linear() -> None:
    torch.manual_seed(0)
    weight = ColumnParallelLinear(64, 3000).weight.detach()
    assert weight.abs().max() <= 64**-0.5
    assert abs(float(weight.std()) / (64**-0.5 / 3**0.5) - 1) < 0.01
    assert not torch.equal(weight[:256], weight[256:512])


def test_one_rank_is_a_plain_linear() -> None:
    linear = nn.Linear(8, 4, dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64)
    for layer in (ColumnParallelLinear.from_linear(linear), RowParallelLinear.from_linear(linear)):
        y = layer(x)
        assert y.shape == (5, 4) and torch.equal(y, linear(x))
        assert type(y.grad_fn) is type(linear(x).grad_fn)  # not one operation more


def test_shards_are_marked_and_replicated_biases_are_not() -> None:
    column, row = ColumnParallelLinear(8, 4), RowParallelLinear(8, 4)
    assert [is_sharded(p) for p in (column.weight, column.bias, row.weight, row.bias)] == [True, True, True, False]


def test_marks_outlive_a_change_of_device() -> None:
    column = ColumnParallelLinear(8, 4, device="meta").to_empty(device="cpu").to(torch.bfloat16)
    assert column.weight.tensor_model_parallel is True and column.bias.tensor_model_parallel is True


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ColumnParallelLinear(8, 4, replica_group=object()), "replica_group needs ranges"),
        (lambda: RowParallelLinear(8, 4, ranges=[(0, 2)], input_is_parallel=False), "takes equal slices"),
        (lambda: RowParallelLinear.from_linear(nn.Linear(8, 4), padded_out_features=6), "only the output features"),
        (
            lambda: ColumnParallelLinear.from_linear(nn.Linear(8, 4), ranges=[(2, 6)]),
            r"range 2\.\.6 is not within 0\.\.4",
        ),
    ],
    ids=["replicas", "cut", "padding", "range"],
)
def test_contradictions_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_ranks_share_no_slice_of_a_row_layer() -> None:
    with pytest.raises(TypeError, match="takes no replica_group"):
        RowParallelLinear(4, 4, replica_group=None)
