"""The head and the loss of a language model on two ranks of one thread, forward and backward: hidden [T, H] to the mean
loss of T tokens, with the vocabulary spread over the ranks.

    python benchmarks/parallel_loss.py [--rounds 5] [--tokens 1024] [--json FILE]

Ours, torch's DTensor (`loss_parallel`), and what one writes without them: gather the logits and take torch's cross
entropy. "limit" multiplies, and takes torch's cross entropy of a rank's own columns: nobody who computes the loss in
float32 at once can be faster. Time and CPU are ratios to ours in the same round; "head in chunks" computes logits of
256 tokens at a time (`training.linear_cross_entropy`); "peak" is the most that a step has allocated at a time.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import JSON, heads, parsed, quartiles, ratios, row, spread, write_json
from meters import TIMEOUT, measured
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from parcompile.runtime.collectives import copy_to_group, gather_from_group
from parcompile.runtime.local import run_local
from parcompile.runtime.tensor_parallel import ColumnParallelLinear, linear_cross_entropy, vocab_parallel_cross_entropy

RANKS, HIDDEN, VOCABULARY, CHUNK_TOKENS = 2, 1024, 32_768, 256

Method = Callable[[Tensor, Tensor], Tensor]


def methods(weight: Tensor) -> dict[str, Method]:
    """From hidden [T, H] and labels [T] to the mean loss; each has its part of the head [V, H]."""
    group, rank = dist.group.WORLD, dist.get_rank()
    part = weight.chunk(RANKS)[rank].clone().requires_grad_()
    mesh = init_device_mesh("cpu", (RANKS,))
    spread = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
    head = ColumnParallelLinear(HIDDEN, VOCABULARY, bias=False, group=group, dtype=weight.dtype)
    head.weight = torch.nn.Parameter(part.detach())

    def ours(hidden: Tensor, labels: Tensor, *, inplace: bool = False) -> Tensor:
        return vocab_parallel_cross_entropy(head(hidden), labels, group=group, inplace_backward=inplace).mean()

    def in_chunks(hidden: Tensor, labels: Tensor) -> Tensor:
        rows, words = hidden.unsqueeze(0), labels.unsqueeze(0)
        total = linear_cross_entropy(rows, part, None, words, group=group, chunk_tokens=CHUNK_TOKENS)
        return total / len(labels)

    def limit(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ part.t()).float(), labels % (VOCABULARY // RANKS))

    def gathered(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = copy_to_group(hidden, group) @ part.t()
        return F.cross_entropy(gather_from_group(logits, -1, group).float(), labels)

    def dtensor(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False) @ spread.t()
        return F.cross_entropy(logits.float(), labels)

    return {
        "limit": limit,
        "ours": ours,
        "ours, in place": lambda hidden, labels: ours(hidden, labels, inplace=True),
        "ours, head in chunks": in_chunks,
        "gathered logits": gathered,
        "DTensor": dtensor,
    }


def step_of(method: Method, hidden: Tensor, labels: Tensor, parallel: bool) -> Callable[[], tuple[Tensor, Tensor]]:
    def step() -> tuple[Tensor, Tensor]:
        leaf = hidden.detach().requires_grad_()
        with loss_parallel() if parallel else contextlib.nullcontext():
            loss = method(leaf, labels)
            loss.backward()
        found = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return found.detach(), leaf.grad

    return step


def run_rank(_: int, rounds: int, tokens: int) -> list[dict]:
    warnings.filterwarnings("ignore")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator) / HIDDEN**0.5).to(dtype)
        hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
        labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
        leaf = hidden.clone().requires_grad_()
        expected = F.cross_entropy((leaf @ weight.t()).float(), labels)
        expected.backward()
        steps = {name: step_of(method, hidden, labels, name == "DTensor") for name, method in methods(weight).items()}
        for name, step in steps.items():
            loss, gradient = step()
            if name != "limit":
                error = float((gradient - leaf.grad).norm() / leaf.grad.norm())
                assert abs(float(loss - expected)) < 1e-2, name
                # DTensor leaves the input's gradient as this rank's part of the sum.
                assert name == "DTensor" or error < (1e-5 if dtype == torch.float32 else 3e-2), f"{name}: {error:.1e}"
        rows += [{"dtype": str(dtype), **one} for one in measured(steps, rounds).values()]
    return rows


def main() -> None:
    options = parsed(__doc__, rounds=(5, "steps of each method"), tokens=(1024, "T"), json=JSON)
    rows, *_ = run_local(RANKS, run_rank, options.rounds, options.tokens, timeout=TIMEOUT)
    write_json(options.json, rows)
    ours = {one["dtype"]: one for one in rows if one["method"] == "ours"}
    heads("dtype", "method", "step ms", "time / ours (quartiles)", "CPU / ours", "sent MB", "peak MB")
    for one in rows:
        base = ours[one["dtype"]]
        cpu = quartiles(ratios(one["cpu_seconds"], base["cpu_seconds"]))[1]
        taken, share = f"{1e3 * quartiles(one['seconds'])[1]:.0f}", spread(ratios(one["seconds"], base["seconds"]))
        sizes = f"{one['sent_bytes'] / 1e6:.2f}", f"{one['peak_bytes'] / 1e6:.0f}"
        row(one["dtype"].removeprefix("torch."), one["method"], taken, share, f"{cpu:.2f}", *sizes)


if __name__ == "__main__":
    main()
