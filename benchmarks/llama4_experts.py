"""A layer of Llama 4's experts, forward and backward, in one process: transformers' block beside ours.

    python benchmarks/llama4_experts.py [--experts 16] [--tokens 1024] [--rounds 7]

Both have the same weights, in fp32, one thread. transformers has every expert compute every token; ours has each token
visit the expert that it chose, so that the routed experts do 1 / experts of its operations. The blocks take turns.

- "ms": of the processor, which others kept busy too: the median, with quartiles.
- "ratio": the time of transformers' block over that of ours, round by round: the median, with quartiles.
- "kept": what autograd keeps for backward, without the weights.
- "apart": the largest relative difference of the two, of the output and of the gradients of input and parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import heads, parsed, ratios, row, spread
from meters import in_turns, kept_bytes
from torch import Tensor
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from parcompile.runtime.expert_parallel import visit_chosen

HIDDEN, WIDTH = 512, 1024


def main() -> None:
    """Prints a row for each block."""
    options = parsed(__doc__, experts=16, tokens=1024, rounds=7)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Llama4TextConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=options.experts, num_experts_per_tok=1
    )
    original: Any = Llama4TextMoe(config)
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter, std=0.03)
    ours = copy.deepcopy(original)
    visit_chosen(torch.nn.ModuleList([ours]))
    hidden = torch.randn(1, options.tokens, HIDDEN)
    steps: dict[str, Callable[[], list[Tensor]]] = {
        "transformers": lambda: results(original, hidden),
        "this project": lambda: results(ours, hidden),
    }
    apart = max(
        float((found - expected).norm() / expected.norm())
        for found, expected in zip(steps["this project"](), steps["transformers"](), strict=True)
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _, seconds = in_turns(steps, options.rounds)
    dist.destroy_process_group()
    heads("block", "ms", "ratio", "kept, MiB", "apart")
    own = spread(ratios(seconds["transformers"], seconds["this project"]), ".1f")
    for name, block, more in (("transformers", original, ("1", "")), ("this project", ours, (own, f"{apart:.0e}"))):
        weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
        kept = kept_bytes(lambda block=block: block(hidden.clone().requires_grad_()), weights)
        row(name, spread([1e3 * one for one in seconds[name]], ".0f"), more[0], f"{kept / 2**20:.1f}", more[1])


def results(block: Any, hidden: Tensor) -> list[Tensor]:
    """What a block gives, and the gradients of its input and its parameters."""
    hidden = hidden.clone().requires_grad_()
    block.zero_grad()
    output, _ = block(hidden)
    output.square().sum().backward()
    return [output.detach(), hidden.grad, *(parameter.grad for parameter in block.parameters())]


if __name__ == "__main__":
    main()
