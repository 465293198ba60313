"""The step of an optimizer on the host: torch's fused AdamW beside DeepSpeedCPUAdam, the same weights and gradients.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python benchmarks/host_adam.py [--elements 128000000] [--rounds 9]

Both step in turn; a ratio is of two neighbours. DeepSpeed compiles its extension the first time, which takes minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

BYTES = 28
"""Of an element that a step reads and writes: weight, gradient and two moments in fp32."""


def main() -> None:
    """Prints seconds, bytes per second and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=128_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    weight = torch.nn.Parameter(torch.randn(given.elements))
    weight.grad = torch.randn(given.elements)
    makers = {"torch": lambda: torch.optim.AdamW([weight], fused=True), "deepspeed": lambda: DeepSpeedCPUAdam([weight])}
    optimizers = {name: make() for name, make in makers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(given.rounds + 1):
        for name, optimizer in optimizers.items():
            begin = time.perf_counter()
            optimizer.step()
            if number:  # the first makes the moments
                seconds[name].append(time.perf_counter() - begin)
    for name, times in seconds.items():
        low, middle, high = (round(one, 3) for one in statistics.quantiles(times, n=4))
        rate = given.elements * BYTES / statistics.median(times) / 1e9
        print(f"{name}: {middle} s ({low} … {high}), {rate:.1f} GB/s, {torch.get_num_threads()} threads")
    ratios = [own / other for own, other in zip(seconds["torch"], seconds["deepspeed"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"torch / deepspeed: {middle:.2f} ({low:.2f} … {high:.2f})")


if __name__ == "__main__":
    main()
