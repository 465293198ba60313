"""A layer of routed experts, forward and backward, on two ranks of one thread: dealt over ep by this project, cut over
tp by it, and in DeepSpeed's own MoE layer without dropped tokens.

    python benchmarks/experts.py [--rounds 15] [--sizes 1024] [--json FILE]

Every number is from one run in which the methods take turns, step by step. Each rank has half of the tokens; with tp
both ranks have all of them. Bytes are what a rank sends per step; the least is four times top-k · tokens · hidden, of
which half stays on its rank when rows are dealt evenly. "limit" computes as many rows with experts of the rank's own,
without any exchange: nobody can be faster. The router is random, so that rows are dealt nearly evenly.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from meters import Wire, in_turns, quartiles
from torch import Tensor, nn

RANKS = 2
SIZES = {  # name: hidden, width of an expert, experts, experts of a token, tokens of a rank
    "hidden 1024, 8 experts": (1024, 1408, 8, 2, 1024),
    "hidden 256, 16 experts": (256, 384, 16, 4, 1024),
}
METHODS = ("ep 2, this project", "tp 2, this project", "DeepSpeed MoE, ep 2", "limit")


def mixtral_block(hidden: int, width: int, experts: int, chosen: int) -> nn.Module:
    """A block of transformers, the same on all ranks."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=width, num_local_experts=experts, num_experts_per_tok=chosen
    )
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in block.parameters():
        parameter.data.normal_(std=0.02, generator=generator)
    return block


def dealt(block: Any) -> nn.Module:
    """Each rank has half of the experts."""
    from parcompile.runtime.expert_parallel.experts import Dispatched

    share = block.experts.num_experts // RANKS
    for name, parameter in list(block.experts.named_parameters()):
        local = parameter.detach()[dist.get_rank() * share :][:share].clone()
        setattr(block.experts, name, nn.Parameter(local))
    Dispatched(block.experts, dist.group.WORLD)
    return block


def cut(block: Any) -> nn.Module:
    """Each rank has half of each expert."""
    from parcompile.runtime.inject.regions import Region

    rank, width = dist.get_rank(), block.experts.intermediate_dim
    half = slice(rank * width // RANKS, (rank + 1) * width // RANKS)
    gate, up = block.experts.gate_up_proj.detach().chunk(2, dim=1)
    block.experts.gate_up_proj = nn.Parameter(torch.cat([gate[:, half], up[:, half]], dim=1))
    block.experts.down_proj = nn.Parameter(block.experts.down_proj.detach()[:, :, half].clone())
    region = Region(dist.group.WORLD, sequence_parallel=False)
    region.enter_block(block)
    block.register_forward_hook(lambda _, __, output: region.leave(output))
    return block


class Expert(nn.Module):
    """The same MLP for DeepSpeed's layer."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * width, bias=False), nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


def of_deepspeed(hidden: int, width: int, experts: int, chosen: int) -> nn.Module:
    """DeepSpeed's layer: as many places for each expert as the fullest one needs."""
    import deepspeed
    from deepspeed.moe.layer import MoE

    from parcompile.runtime.deepspeed_patches import forbid_jit_builds

    forbid_jit_builds()
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo")
    layer = MoE(hidden, Expert(hidden, width), experts, ep_size=RANKS, k=chosen, drop_tokens=False)
    layer.set_deepspeed_parallelism()
    return layer


def step_of(layer: nn.Module, tokens: int, hidden: int) -> Callable[[], None]:
    """Forward and backward of a batch of so many tokens."""
    x = torch.randn(1, tokens, hidden, generator=torch.Generator().manual_seed(2 + dist.get_rank()))

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_()
        output = layer(given)
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()

    return step


def measure(rank: int, rendezvous: str, sizes: dict[str, Any], rounds: int, results: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    found = {}
    for name, (hidden, width, experts, chosen, tokens) in sizes.items():
        shape = hidden, width, experts, chosen
        layers = {
            METHODS[0]: (dealt(mixtral_block(*shape)), tokens),
            METHODS[1]: (cut(mixtral_block(*shape)), RANKS * tokens),
            METHODS[2]: (of_deepspeed(*shape), tokens),
            METHODS[3]: (mixtral_block(hidden, width, experts // RANKS, min(chosen, experts // RANKS)), tokens),
        }
        steps = {method: step_of(layer, count, hidden) for method, (layer, count) in layers.items()}
        sent = {}
        for method, step in steps.items():
            step()
            with Wire() as wire:
                step()
            sent[method] = wire.bytes
        seconds, _ = in_turns(steps, rounds)
        # Both ranks' bytes: what one sends more, the other sends less.
        total = torch.tensor([sent[method] for method in METHODS], dtype=torch.float64)
        dist.all_reduce(total)
        least = 4 * chosen * tokens * hidden * 4 / RANKS
        found[name] = {
            method: {"seconds": seconds[method], "bytes": float(bytes_) / RANKS, "least_bytes": least}
            for method, bytes_ in zip(METHODS, total, strict=True)
        }
    if rank == 0:
        Path(results).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", default="", help="only those whose name has this in it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = {name: size for name, size in SIZES.items() if options.sizes in name}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        arguments = (str(Path(folder) / "rendezvous"), sizes, options.rounds, str(results))
        mp.start_processes(measure, arguments, nprocs=RANKS, start_method="spawn")
        found = json.loads(results.read_text(encoding="utf-8"))
    if options.json:
        options.json.write_text(json.dumps(found), encoding="utf-8")
    for name, methods in found.items():
        print(f"\n{name}\n| method | ms per step (quartiles) | to this project's ep | MB sent | to the least |")
        print("|---|---|---|---|---|")
        ours = quartiles(methods[METHODS[0]]["seconds"])[1]
        for method, one in methods.items():
            low, middle, high = (1e3 * value for value in quartiles(one["seconds"]))
            ratio, sent = middle / 1e3 / ours, one["bytes"] / 1e6
            print(
                f"| {method} | {middle:.1f} ({low:.1f}-{high:.1f}) | {ratio:.2f} | {sent:.1f} | "
                f"{one['bytes'] / one['least_bytes']:.2f} |"
            )


if __name__ == "__main__":
    main()
