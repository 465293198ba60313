"""The step of an optimizer on the host: torch's fused AdamW beside DeepSpeedCPUAdam, the same weights and gradients.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python benchmarks/host_adam.py [--elements 128000000] [--rounds 9]

Both step in turn; a ratio is of two neighbours. DeepSpeed compiles its extension the first time, which takes minutes.
"""

from __future__ import annotations

import statistics

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from harness import parsed, ratios, seconds_in_turns, spread

BYTES = 28
"""Of an element that a step reads and writes: weight, gradient and two moments in fp32."""


def main() -> None:
    """Prints seconds, bytes per second and the ratio."""
    given = parsed(__doc__, elements=128_000_000, rounds=9)
    weight = torch.nn.Parameter(torch.randn(given.elements))
    weight.grad = torch.randn(given.elements)
    makers = {"torch": lambda: torch.optim.AdamW([weight], fused=True), "deepspeed": lambda: DeepSpeedCPUAdam([weight])}
    # The first round makes the moments.
    seconds = seconds_in_turns({name: make().step for name, make in makers.items()}, given.rounds)
    for name, times in seconds.items():
        rate = given.elements * BYTES / statistics.median(times) / 1e9
        print(f"{name}: {spread(times, '.3f')} s, {rate:.1f} GB/s, {torch.get_num_threads()} threads")
    print(f"torch / deepspeed: {spread(ratios(seconds['torch'], seconds['deepspeed']))}")


if __name__ == "__main__":
    main()
