"""A Llama block, forward and backward, tensor-parallel on two ranks of one thread: this project's layers against
torch's DTensor and, where they can be imported, Megatron-Core's layers and DeepSpeed's AutoTP.

    python benchmarks/tensor_parallel.py [--rounds 15] [--sizes 256] [--json FILE]

Every number is from one run in which the methods take turns, step by step. "limit" is the same block with each rank's
slices and without any communication: nobody can be faster. Bytes on the wire are what a rank sends per step (for
all-reduce 2(tp−1)/tp of the tensor); CPU is the processor time of rank 0, all threads: what a busy machine disturbs
least; "kept" is what autograd keeps for backward, without the weights, and "peak" the most that a step has allocated at
a time, gradients included. "host" is what a block costs besides its matmuls: the time of a block so small that nothing
else counts, on a process group that sends nothing, less that of the limit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import JSON, heads, parsed, ratios, row, seconds_in_turns, spread, write_json
from meters import TIMEOUT, kept_bytes, measured
from peers.tensor_parallel import absent, parts_of, with_autotp, with_megatron
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as dtensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from parcompile.runtime.local import LocalWorld, run_local
from parcompile.runtime.tensor_parallel import ColumnParallelLinear, RowParallelLinear, column_parallel, sum_in_backward
from parcompile.runtime.tensor_parallel.partial import leave_partial, sum_together

RANKS = 2
SIZES = {  # name: hidden, intermediate, heads, kv heads, sequence length, layers
    "hidden 1024, S 1024": (1024, 2816, 16, 4, 1024, 1),
    "hidden 256, S 128, 4 layers": (256, 704, 4, 2, 128, 4),
}


class Attention(nn.Module):
    """Causal attention on [B, S, H]; each rank has as many heads as its projections give it."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in self.project(x))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.gate(x), self.up(x)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, 1e-5), nn.RMSNorm(hidden, 1e-5)
        self.attention, self.mlp = Attention(hidden, heads, kv_heads), Mlp(hidden, intermediate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def ours(block: Block, sequence_parallel: bool, keep_gathered: bool = False) -> Block:
    group = dist.group.WORLD
    options = {"group": group, "sequence_parallel": sequence_parallel, "sequence_dim": 1}
    for module, columns, last in parts_of(block):
        for name in columns:
            full = getattr(module, name)
            setattr(module, name, ColumnParallelLinear.from_linear(full, keep_gathered=keep_gathered, **options))
        setattr(module, last, RowParallelLinear.from_linear(getattr(module, last), **options))
        layers = [getattr(module, name) for name in columns]
        module.project = lambda x, layers=layers: column_parallel(x, layers)
    if sequence_parallel:
        for norm in (block.attention_norm, block.mlp_norm):
            sum_in_backward(norm.weight, group)
        leave_partial(block.parameters())
    return block


def fused(block: Block, sequence_parallel: bool) -> Block:
    """q, k and v in one matmul, gate and up in another."""
    options = {"group": dist.group.WORLD, "sequence_parallel": sequence_parallel, "sequence_dim": 1}
    parts = [(module, columns) for module, columns, _ in parts_of(block)]
    packed = [pack([getattr(module, name) for name in columns], options) for module, columns in parts]
    ours(block, sequence_parallel)
    for (module, columns), layer in zip(parts, packed, strict=True):
        for name in columns:
            delattr(module, name)
        module.packed = layer
        module.project = lambda x, layer=layer: layer(x).split(layer.part_sizes, -1)
    return block


def pack(layers: list[nn.Linear], options: dict) -> ColumnParallelLinear:
    rank, first, ranges = dist.get_rank(), 0, []
    for layer in layers:
        size = layer.out_features // RANKS
        ranges.append((first + rank * size, first + (rank + 1) * size))
        first += layer.out_features
    full = nn.Linear(layers[0].in_features, first, bias=False, device="meta")
    full.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]))
    return ColumnParallelLinear.from_linear(full, ranges=ranges, **options)


def with_dtensor(block: Block, sequence_parallel: bool) -> Block:
    mesh, rowwise = init_device_mesh("cpu", (RANKS,)), dtensor.RowwiseParallel
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    plan = {name: dtensor.ColwiseParallel() for name in columns}
    if not sequence_parallel:
        return dtensor.parallelize_module(block, mesh, plan | {"attention.o": rowwise(), "mlp.down": rowwise()})
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan |= {
        "attention_norm": dtensor.SequenceParallel(),
        "mlp_norm": dtensor.SequenceParallel(),
        "attention": dtensor.PrepareModuleInput(**gathered),
        "mlp": dtensor.PrepareModuleInput(**gathered),
        "attention.o": rowwise(output_layouts=Shard(1), use_local_output=True),
        "mlp.down": rowwise(output_layouts=Shard(1), use_local_output=True),
    }
    for norm in (block.attention_norm, block.mlp_norm):
        norm.register_forward_hook(lambda _m, _i, out: out.to_local() if isinstance(out, DTensor) else out)
    return dtensor.parallelize_module(block, mesh, plan)


def limit(block: Block) -> Block:
    for module, columns, last in parts_of(block):
        for name in columns:
            full = getattr(module, name)
            setattr(module, name, nn.Linear(full.in_features, full.out_features // RANKS, bias=False))
        full = getattr(module, last)
        setattr(module, last, nn.Linear(full.in_features // RANKS, full.out_features, bias=False))
    return block


def conversions() -> dict[str, Callable[[Block], Block]]:
    """Every method that can be run here, by name."""
    missing = absent()
    methods = {
        "limit": limit,
        "ours": lambda block: ours(block, False),
        "ours, fused": lambda block: fused(block, False),
        "DTensor": lambda block: with_dtensor(block, False),
        "Megatron-Core": lambda block: with_megatron(block, False),
        "AutoTP": with_autotp,
        "ours + sp": lambda block: ours(block, True),
        "ours, kept + sp": lambda block: ours(block, True, True),
        "ours, fused + sp": lambda block: fused(block, True),
        "DTensor + sp": lambda block: with_dtensor(block, True),
        "Megatron-Core + sp": lambda block: with_megatron(block, True),
    }
    return {name: convert for name, convert in methods.items() if name.removesuffix(" + sp") not in missing}


def host_overhead(_: int, rounds: int) -> dict[str, float]:
    """Microseconds per block, forward and backward, that each method adds to the matmuls."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    layers, steps = 8, {}
    for method, convert in conversions().items():
        torch.manual_seed(0)
        model = nn.Sequential(*(convert(Block(64, 176, 4, 2)) for _ in range(layers)))
        x = torch.randn(1, 8 // (RANKS if method.endswith("+ sp") else 1), 64)
        steps[method] = step_of(model, x)
    seconds = seconds_in_turns(steps, 4 * rounds)
    least = {method: min(values) / layers * 1e6 for method, values in seconds.items()}
    return {method: value - least["limit"] for method, value in least.items()}


def step_of(model: nn.Module, own: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        out = model(own.detach().requires_grad_())
        out.backward(out.detach())
        # DTensor leaves the gradients of norms unsummed after backward; a step is over when they are whole.
        for parameter in model.parameters():
            if isinstance(parameter.grad, DTensor) and any(place.is_partial() for place in parameter.grad.placements):
                parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
        partial = [one.grad for one in leave_partial(model.parameters()) if one.grad is not None]
        if partial:
            sum_together(partial, dist.group.WORLD)
        model.zero_grad(set_to_none=True)
        return out

    return step


def run_rank(rank: int, rounds: int, sizes: str) -> list[dict]:
    report = []
    for name, (*shape, length, layers) in SIZES.items():
        if sizes not in name:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            reference = nn.Sequential(*(Block(*shape) for _ in range(layers))).to(dtype)
            x = torch.randn(1, length, shape[0], dtype=dtype)

            def build(convert: Callable[[Block], Block], shape=shape, layers=layers, dtype=dtype, reference=reference):
                blocks = [Block(*shape) for _ in range(layers)]
                for block, full in zip(blocks, reference, strict=True):
                    block.load_state_dict(full.state_dict())
                return nn.Sequential(*(convert(block.to(dtype)) for block in blocks)).to(dtype)

            own = x.chunk(RANKS, 1)[rank].contiguous()
            inputs = {method: own if method.endswith("+ sp") else x for method in conversions()}
            methods = {method: (build(convert), inputs[method]) for method, convert in conversions().items()}
            report += compare(name, dtype, methods, reference, x, rounds)
    return report


def compare(name: str, dtype: torch.dtype, methods: dict, reference: nn.Module, x: Tensor, rounds: int) -> list[dict]:
    steps = {method: step_of(model, own) for method, (model, own) in methods.items()}
    expected = reference(x).detach()
    kept = {}
    for method, step in steps.items():
        out, model = step(), methods[method][0]
        if method != "limit":
            part = expected if out.shape == expected.shape else expected.chunk(RANKS, 1)[dist.get_rank()]
            error = float((out.detach() - part).norm() / part.norm())
            assert error < (1e-5 if dtype == torch.float32 else 3e-2), f"{method} is wrong by {error:.1e}"
        locals_ = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
        kept[method] = kept_bytes(step, {p.untyped_storage().data_ptr() for p in locals_})
    found = measured(steps, rounds).items()
    return [{"size": name, "dtype": str(dtype), **one, "kept_bytes": kept[method]} for method, one in found]


def main() -> None:
    sizes = "", "only the blocks whose name contains this"
    options = parsed(__doc__, rounds=(15, "steps of each method"), sizes=sizes, json=JSON)
    report, *_ = run_local(RANKS, run_rank, options.rounds, options.sizes, timeout=TIMEOUT)
    with LocalWorld(1, process_group=False) as world:
        (host,) = world.run(host_overhead, options.rounds, timeout=TIMEOUT)
    write_json(options.json, report)
    ours_seconds = {}
    for one in report:
        if one["method"] in ("ours", "ours + sp"):
            ours_seconds[one["size"], one["dtype"], one["method"].endswith("sp")] = one["seconds"]
    columns = ("block", "dtype", "method", "step ms (quartiles)", "time / ours (quartiles)", "CPU ms (quartiles)")
    heads(*columns, "calls", "sent MB", "kept MB", "peak MB")
    for one in report:
        base = ours_seconds[one["size"], one["dtype"], one["method"].endswith("sp")]
        wall, cpu = (spread([1e3 * value for value in one[kind]], ".1f") for kind in ("seconds", "cpu_seconds"))
        sizes = f"{one['sent_bytes'] / 1e6:.2f}", *(f"{one[what] / 1e6:.1f}" for what in ("kept_bytes", "peak_bytes"))
        names = one["size"], one["dtype"].removeprefix("torch."), one["method"]
        row(*names, wall, spread(ratios(one["seconds"], base)), cpu, one["calls"], *sizes)
    print("\nhost, µs per block:", ", ".join(f"{method} {value:+.0f}" for method, value in host.items()))
    for name, reason in absent().items():
        print(f"absent: {name} ({reason})")


if __name__ == "__main__":
    main()
