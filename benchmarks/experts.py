"""A layer of routed experts, forward and backward, each rank with one thread: this project's, beside DeepSpeed's MoE
layer and AutoEP, the ep plan of transformers, Megatron-Core's token dispatcher, and experts cut over tp.

    python benchmarks/experts.py [--rounds 15] [--sizes 1024] [--layouts "ep 2"] [--tokens 1024] [--json FILE]

Every number of a table is from one run in which the methods take turns, step by step. A method that cannot run here has
a row that says why; the others are measured all the same.

Data-parallel ranks have tokens of their own, those of one tp have the same. Sent is what leaves a rank per step.
Exchanged is what it gives to all-to-alls over the ranks of ep, whatever part stays, to four times top-k · tokens ·
hidden: out and back, forward and backward. Loss and input gradient are compared with this project's. "limit" computes
as many rows with experts of the rank's own, without any exchange: nobody can be faster. The router is random, which
deals rows nearly evenly.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import JSON, heads, parsed, quartiles, row, spread, write_json
from meters import TIMEOUT, Wire, in_turns
from peers.experts import Megatron, keep_local, of_autoep, of_deepspeed, of_transformers
from torch import Tensor, nn

from parcompile.runtime.local import LocalWorld

SIZES = {  # name: hidden, width of an expert, experts, experts of a token, tokens of a batch
    "hidden 1024, 8 experts": (1024, 1408, 8, 2, 1024),
    "hidden 256, 16 experts": (256, 384, 16, 4, 1024),
}
LAYOUTS = {"ep 2": 1, "tp 2, dp 2": 2}  # name: tp; there are two batches, one for each data-parallel rank
BATCHES = 2
OTHERS_WAIT_S = 120


@dataclass(frozen=True, slots=True)
class Method:
    """One way to run the layer."""

    build: Callable[[Any], nn.Module]
    """Of the block with all experts, which is the same on every rank."""
    batches: int = 1
    """Of how many batches this rank has the tokens."""
    comparable: bool = True
    """Whether it computes what the block computes."""
    ep: tuple[int, ...] = ()
    """The ranks over which experts are dealt."""
    experts: Callable[[int], int] = lambda all_of_them: all_of_them


def mixtral_block(hidden: int, width: int, experts: int, chosen: int) -> nn.Module:
    """A block of transformers, the same on all ranks."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=hidden,
        intermediate_size=width,
        num_local_experts=experts,
        num_experts_per_tok=chosen,
        num_hidden_layers=1,  # AutoEP looks for the block in a model
        vocab_size=32,
    )
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in block.parameters():
        parameter.data.normal_(std=0.02, generator=generator)
    return block


def dealt(
    block: Any, ep: dist.ProcessGroup | None = None, tp: dist.ProcessGroup | None = None, *, whole: bool = True
) -> nn.Module:
    """Each rank of ep has an equal run of the experts, beside tp whole ones or a slice of each."""
    from parcompile.runtime.expert_parallel import Dispatched

    group = dist.group.WORLD if ep is None else ep
    keep_local(block, group)
    Dispatched(block.experts, group, tp, holders=None if whole else tp)
    return block if tp is None else summed(block, tp) if whole else cut(block, tp)


def cut(block: Any, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Each rank of the group has a slice of each expert."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    share = block.experts.intermediate_dim // ranks
    mine = slice(rank * share, (rank + 1) * share)
    gate, up = block.experts.gate_up_proj.detach().chunk(2, dim=1)
    block.experts.gate_up_proj = nn.Parameter(torch.cat([gate[:, mine], up[:, mine]], dim=1))
    block.experts.down_proj = nn.Parameter(block.experts.down_proj.detach()[:, :, mine].clone())
    return summed(block, dist.group.WORLD if group is None else group)


def summed(block: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """A block whose ranks all have the same tokens, and parts of the sum that is its output."""
    from parcompile.runtime.inject.regions import Region

    region = Region(group, sequence_parallel=False)
    region.enter_block(block)
    block.register_forward_hook(lambda _, __, output: region.leave(output))
    return block


def methods_of(layout: str) -> dict[str, Method]:
    """This project's first, which the others are compared with."""
    rank, world = dist.get_rank(), tuple(range(dist.get_world_size()))
    if layout == "ep 2":
        return {
            "this project, ep 2": Method(dealt, ep=world),
            "this project, tp 2": Method(cut, batches=BATCHES),
            "DeepSpeed MoE, ep 2": Method(of_deepspeed, comparable=False, ep=world),
            "DeepSpeed AutoEP's layer, ep 2": Method(of_autoep, ep=world),
            "transformers, ep 2": Method(of_transformers, ep=world),
            "Megatron-Core's dispatcher, ep 2": Method(Megatron, ep=world),
            "limit": Method(lambda block: block, comparable=False, experts=lambda count: count // BATCHES),
        }
    tps = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    eps = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    tp, ep = tps[rank // 2], eps[rank % 2]
    across = (rank % 2, rank % 2 + 2)
    return {
        "this project, ep 2": Method(lambda block: dealt(block, ep, tp, whole=False), ep=across),
        "this project, ep 4, expert_tp 1": Method(lambda block: dealt(block, None, tp), ep=world),
        "transformers, ep 4": Method(lambda block: of_transformers(block, tp=2), ep=world),
    }


def step_of(layer: nn.Module, batches: list[int], tokens: int, hidden: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Forward and backward of these batches: their part of the mean over all, and the input gradient."""
    drawn = [torch.randn(1, tokens, hidden, generator=torch.Generator().manual_seed(2 + batch)) for batch in batches]
    x = torch.cat(drawn, dim=1)

    def step() -> tuple[Tensor, Tensor]:
        layer.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_()
        output = layer(given)
        loss = (output[0] if isinstance(output, tuple) else output).square().sum() / (BATCHES * tokens * hidden)
        loss.backward()
        assert given.grad is not None
        return loss.detach(), given.grad

    return step


def try_out(method: Method, shape: tuple[int, ...], tp: int) -> tuple[Callable[[], tuple[Tensor, Tensor]] | None, Any]:
    """The step, and what it computes and sends; or, where any rank has an error, that error."""
    hidden, width, experts, chosen, tokens = shape
    error, step, outcome, wire = "", None, None, Wire()
    try:
        count = method.experts(experts)
        layer = method.build(mixtral_block(hidden, width, count, min(chosen, count)))
        batches = [dist.get_rank() // tp] if method.batches == 1 else list(range(BATCHES))
        step = step_of(layer, batches, tokens, hidden)
        step()
        with wire:
            outcome = step()
    except Exception as problem:  # a peer's own, which becomes its row
        error = f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if any(errors):
        return None, next(text for text in errors if text)
    assert step is not None
    assert outcome is not None
    same = dist.get_world_size() // BATCHES * method.batches  # ranks that computed the same part
    loss, square = outcome[0].item() / same, outcome[1].double().square().sum().item() / same
    total = torch.tensor([wire.bytes, wire.exchanged[method.ep], loss, square], dtype=torch.float64)
    dist.all_reduce(total)
    sent, exchanged, loss, square = total.tolist()
    return step, {
        "bytes": sent / dist.get_world_size(),
        "exchanged_to_rows": exchanged / (4 * chosen * BATCHES * tokens * hidden * 4) if method.ep else None,
        "loss": loss if method.comparable else None,
        "input_gradient": square**0.5 if method.comparable else None,
    }


def measure(_: int, layout: str, sizes: dict[str, Any], rounds: int) -> dict[str, Any]:
    tp = LAYOUTS[layout]
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=OTHERS_WAIT_S))
    methods, found = methods_of(layout), {}
    for name, shape in sizes.items():
        steps, rows = {}, {}
        for method, how in methods.items():
            step, rows[method] = try_out(how, shape, tp)
            if step is not None:
                steps[method] = step
        seconds, _ = in_turns(steps, rounds)
        for method, values in seconds.items():
            rows[method]["seconds"] = values
        found[f"{layout}: {name}"] = rows
    return found


def main() -> None:
    """Prints a table."""
    options = parsed(
        __doc__,
        rounds=15,
        sizes=("", "only those whose name has this in it"),
        layouts=("", "only those whose name has this in it"),
        tokens=(int, "of a batch, instead of 1,024"),
        json=JSON,
    )
    sizes = {name: (*size[:-1], options.tokens or size[-1]) for name, size in SIZES.items() if options.sizes in name}
    found: dict[str, Any] = {}
    for layout, tp in LAYOUTS.items():
        if options.layouts not in layout:
            continue
        with LocalWorld(BATCHES * tp, process_group=False) as world:
            found |= world.run(measure, layout, sizes, options.rounds, timeout=TIMEOUT)[0]
    write_json(options.json, found)
    for name, methods in found.items():
        print(f"\n{name}")
        heads("method", "ms per step (quartiles)", "to ours", "MB sent", "exchanged", "loss", "input gradient")
        ours = next(iter(methods.values()))
        if isinstance(ours, str):
            raise SystemExit(f"this project's layer does not run: {ours}")
        for method, one in methods.items():
            if isinstance(one, str):
                row(method, f"does not run: {one}", *"–––––")
                continue
            part, share = one["exchanged_to_rows"], quartiles(one["seconds"])[1] / quartiles(ours["seconds"])[1]
            sent, exchanged = f"{one['bytes'] / 1e6:.1f}", "–" if part is None else f"{part:.4f}"
            pairs = (
                (one[figure], ours[figure]) for figure in ("loss", "input_gradient")
            )  # relative, to this project's
            errors = ("–" if own is None else f"{abs(own / right - 1):.0e}" for own, right in pairs)
            row(method, spread([1e3 * one for one in one["seconds"]], ".1f"), f"{share:.2f}", sent, exchanged, *errors)


if __name__ == "__main__":
    main()
