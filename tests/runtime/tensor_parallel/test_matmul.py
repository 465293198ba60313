"""A gated MLP and q, k, v on the overlapped matmuls, in the ways in which training calls them.

Tolerances as in test_linear; bf16: the distance of the parallel result from a float64 run may be 1.5 times that of the
one-process result, which is what another order of summation does.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from closeness import assert_within
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parcompile.runtime.collectives import gather_from_group
from parcompile.runtime.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
)
from parcompile.runtime.transport import MOST_PIECES, PendingGather

from .world import World, as_on_gpus, each_transport, relative_error, shard_weight

CUT = {"gate": 0, "up": 0, "down": 1}


class GatedMlp(nn.Module):
    """[.., 16] → [.., 16] through 32, with a bias on gate only."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(16, 32, dtype=dtype),
            nn.Linear(16, 32, bias=False, dtype=dtype),
            nn.Linear(32, 16, bias=False, dtype=dtype),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ParallelMlp(nn.Module):
    def __init__(self, full: GatedMlp, **options) -> None:
        super().__init__()
        row_options = {key: value for key, value in options.items() if key != "keep_gathered"}
        self.gate, self.up = (ColumnParallelLinear.from_linear(linear, **options) for linear in (full.gate, full.up))
        self.down = RowParallelLinear.from_linear(full.down, **row_options)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = column_parallel(x, (self.gate, self.up))
        return self.down(F.silu(gate) * up)


def inputs(dtype: torch.dtype, shape: tuple[int, ...] = (2, 8, 16)) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(shape, dtype=torch.float64).to(dtype), torch.randn(shape, dtype=torch.float64).to(dtype)


def step(model: nn.Module, x: Tensor, upstream: Tensor, call=None) -> dict[str, Tensor]:
    """The output and every gradient."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x) if call is None else call(x)
    y.backward(upstream.to(y.dtype))
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def merged(local: dict[str, Tensor], sequence_dim: int | None) -> dict[str, Tensor]:
    group, dims = dist.group.WORLD, {"y": sequence_dim, "x": sequence_dim}
    dims |= {f"{name}.weight": dim for name, dim in CUT.items()} | {"gate.bias": 0}
    return {
        name: tensor if dims[name] is None else gather_from_group(tensor, dims[name], group)
        for name, tensor in local.items()
    }


def both(
    dtype: torch.dtype, sequence_dim: int | None, shape=(2, 8, 16), **options
) -> tuple[GatedMlp, ParallelMlp, list]:
    torch.manual_seed(0)
    full = GatedMlp(dtype)
    if sequence_dim is not None:
        options |= {"sequence_parallel": True, "sequence_dim": sequence_dim}
    parallel = ParallelMlp(full, group=dist.group.WORLD, **options)
    tensors = inputs(dtype, shape)
    own = (
        tensors
        if sequence_dim is None
        else [shard_weight(tensor, sequence_dim, dist.get_rank(), dist.get_world_size()) for tensor in tensors]
    )
    return full, parallel, [tensors, own]


def check_mlp(dtype: torch.dtype, sequence_dim: int | None, shape: tuple[int, ...], keep_gathered: bool) -> float:
    full, parallel, (tensors, own) = both(dtype, sequence_dim, shape, keep_gathered=keep_gathered)
    expected, errors = step(full, *tensors), []
    for _ in each_transport():
        actual = merged(step(parallel, *own), sequence_dim)
        errors += [relative_error(actual[name], expected[name]) for name in expected]
    with as_on_gpus(), CountCollectives() as sent:
        local = step(parallel, *own)
    actual = merged(local, sequence_dim)
    errors += [relative_error(actual[name], expected[name]) for name in expected]
    if sequence_dim is not None:
        rows = math.prod(shape[: sequence_dim % len(shape)])
        pieces = rows if rows > 1 else min(MOST_PIECES, math.prod(own[0].shape[:-1]))
        # In pieces: x forward, y forward, dy backward. Whole: dx, and x once more unless it was kept.
        assert sent.count == 3 * pieces + (1 if keep_gathered else 2)
        assert pieces > 1
    return max(errors)


def check_bf16(sequence_dim: int | None) -> None:
    full, parallel, (tensors, own) = both(torch.bfloat16, sequence_dim, (4, 64, 16))
    truth = GatedMlp(torch.float64)
    truth.load_state_dict({name: value.double() for name, value in full.state_dict().items()})
    exact = step(truth, *(t.double() for t in tensors))
    one, many = step(full, *tensors), merged(step(parallel, *own), sequence_dim)
    for name in exact:
        spread = relative_error(one[name], exact[name])
        error = relative_error(many[name], exact[name])
        assert error <= 1.5 * spread, f"{name}: {error:.2e} against {spread:.2e} in one process"


def check_autocast(sequence_dim: int | None) -> None:
    full, parallel, (tensors, own) = both(torch.float32, sequence_dim, (4, 64, 16))
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = step(full, *tensors), merged(step(parallel, *own), sequence_dim)
    assert actual["y"].dtype == torch.bfloat16
    for name in expected:
        assert actual[name].dtype == expected[name].dtype
        assert_within(relative_error(actual[name], expected[name]), 2e-2, name)


def check_checkpointing(sequence_dim: int | None) -> None:
    _, parallel, (_, own) = both(torch.float32, sequence_dim)
    plain = step(parallel, *own)
    for reentrant in (False, True):
        again = step(parallel, *own, lambda x, mode=reentrant: checkpoint(parallel, x, use_reentrant=mode))
        for name in plain:
            assert torch.equal(again[name], plain[name]), name


def check_accumulation_and_frozen_weights() -> None:
    _, parallel, (_, own) = both(torch.float64, 1)
    once = step(parallel, *own)
    for _ in range(2):
        parallel(own[0]).backward(own[1])
    for name, parameter in parallel.named_parameters():
        assert_within(relative_error(parameter.grad, 3 * once[name]), 1e-12)
    parallel.gate.weight.requires_grad_(False)
    parallel.zero_grad()
    parallel(own[0]).backward(own[1])
    assert parallel.gate.weight.grad is None
    assert torch.equal(parallel.up.weight.grad, once["up.weight"])


COLLECTIVES = ("allreduce_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")


class CountCollectives(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        namespace, name = function._schema.name.split("::")
        self.count += namespace == "c10d" and name in COLLECTIVES
        return function(*args, **(kwargs or {}))


def check_clipping(sequence_dim: int | None) -> None:
    """OLMo clips queries, keys and values in place."""
    _, parallel, (_, (x, _)) = both(torch.float64, sequence_dim)
    for _ in each_transport():
        kept = column_parallel(x.clone().requires_grad_(), (parallel.gate, parallel.up))
        clipped = column_parallel(x.clone().requires_grad_(), (parallel.gate, parallel.up))
        for one, other in zip(kept, clipped, strict=True):
            assert torch.equal(one.clamp(-0.1, 0.1), other.clamp_(-0.1, 0.1))


def check_compile() -> None:
    for sequence_dim in (None, 1):
        _, parallel, (_, own) = both(torch.float32, sequence_dim)
        plain = step(parallel, *own)
        torch._dynamo.reset()
        compiled = step(parallel, *own, torch.compile(parallel, backend="aot_eager", fullgraph=True))
        for name in plain:
            assert_within(relative_error(compiled[name], plain[name]), 3e-6, name)


def check_one_copy(rows: int) -> None:
    """What several rows are joined into is what backward keeps."""
    joined, real = [], PendingGather.wait

    def wait(self: PendingGather, dim: int) -> Tensor:
        joined.append(real(self, dim))
        return joined[-1]

    kept: list[Tensor] = []
    options = {"group": dist.group.WORLD, "sequence_parallel": True, "sequence_dim": 1, "keep_gathered": True}
    layer = ColumnParallelLinear(16, 32, bias=False, **options)
    PendingGather.wait = wait
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            layer(torch.randn(rows, 8, 16, requires_grad=True))
    finally:
        PendingGather.wait = real
    assert len(joined) == 1
    assert joined[0].data_ptr() in [one.data_ptr() for one in kept]


def check_disagreement() -> None:
    group = dist.group.WORLD
    layers = [ColumnParallelLinear(8, 8, group=group, sequence_parallel=flag) for flag in (True, False)]
    with pytest.raises(ValueError, match=r"these have sequence_parallel = .True, False."):
        column_parallel(torch.zeros(2, 2, 8), layers)


pytestmark = pytest.mark.ranks
MODES = pytest.mark.parametrize("sequence_dim", [None, 1], ids=["tp", "tp+sp"])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)], ids=["fp64", "fp32"])
@pytest.mark.parametrize(
    ("sequence_dim", "shape", "keep_gathered"),
    [
        (None, (2, 7, 16), False),
        (1, (2, 8, 16), False),
        (1, (1, 8, 16), False),  # one sequence: pieces are written in place
        (0, (8, 2, 16), False),
        (-2, (2, 8, 16), True),
        (0, (8, 16), True),
    ],
    ids=["tp", "sp dim 1", "sp one sequence", "sp dim 0", "sp kept", "sp 2-d kept"],
)
def test_a_gated_mlp_equals_the_full_one(ranks, dtype, tolerance, sequence_dim, shape, keep_gathered) -> None:
    assert max(ranks.run(check_mlp, dtype, sequence_dim, shape, keep_gathered)) <= tolerance


@MODES
def test_bf16_is_as_exact_as_in_one_process(ranks: World, sequence_dim: int | None) -> None:
    ranks.run(check_bf16, sequence_dim)


@MODES
def test_autocast_gives_what_it_gives_for_plain_linears(two_ranks: World, sequence_dim: int | None) -> None:
    two_ranks.run(check_autocast, sequence_dim)


@MODES
def test_activation_checkpointing_gives_identical_gradients(two_ranks: World, sequence_dim: int | None) -> None:
    two_ranks.run(check_checkpointing, sequence_dim)


def test_gradients_accumulate_and_frozen_weights_get_none(two_ranks: World) -> None:
    two_ranks.run(check_accumulation_and_frozen_weights)


@MODES
def test_a_model_may_write_into_what_column_layers_return(two_ranks: World, sequence_dim: int | None) -> None:
    two_ranks.run(check_clipping, sequence_dim)


def test_a_block_compiles_into_one_graph_with_the_same_numbers(two_ranks: World) -> None:
    two_ranks.run(check_compile)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_gathered_input_that_is_kept_is_put_together_once(two_ranks: World, rows: int) -> None:
    two_ranks.run(check_one_copy, rows)


def test_layers_that_disagree_cannot_share_an_input(two_ranks: World) -> None:
    two_ranks.run(check_disagreement)
