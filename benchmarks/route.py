"""How long the ring's route of one batch of packed documents takes to plan, and what a GPU is then told to compute.

    python benchmarks/route.py [--rounds 30]

The route and its launches are planned once for each batch and kept for all layers. The limit: 5 ms for 200 documents on
8 ranks, which a layer's attention hides. Milliseconds are those of the process. "Tiles" are what a rank would launch
one by one in each layer, forward; "launches" is what it does launch.
"""

from __future__ import annotations

import random
import time

import torch
from harness import heads, parsed, quartiles, row, spread

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.ring_attention.kernels.packs import PackedTiles
from parcompile.runtime.ring_attention.route import Masking, plan_route

LIMIT_MS = 5.0
CASES = (
    (8, 131_072, 200, CpLayout.ZIGZAG, False),
    (8, 131_072, 200, CpLayout.ZIGZAG, True),
    (8, 131_072, 200, CpLayout.STRIPED, False),
    (16, 524_288, 1_000, CpLayout.ZIGZAG, False),
    (16, 524_288, 1_000, CpLayout.ZIGZAG, True),
    (32, 1_048_576, 2_000, CpLayout.ZIGZAG, True),
)


def borders(length: int, count: int, unit: int, seed: int) -> tuple[int, ...]:
    cuts = random.Random(seed).sample(range(1, length // unit), count - 1)
    return (0, *sorted(cut * unit for cut in cuts), length)


def main() -> None:
    rounds = parsed(__doc__, rounds=30).rounds
    heads("cp", "tokens", "documents", "dealt", "tiles", "launches", "ms (quartiles)", "of the limit")
    for cp, tokens, documents, layout, alone in CASES:
        local, spent = tokens // cp, []
        for turn in range(rounds + 1):
            given = borders(tokens, documents, layout.chunks_per_rank * cp if alone else 1, turn)
            start = time.process_time()
            route = plan_route(layout, cp, cp // 2, local, Masking(documents=given, per_document=alone))
            tiles = [step.tiles for step in route if isinstance(step.tiles, PackedTiles)]
            launches = [len(each.launches(local, local, torch.device("cpu"))) if len(each) > 1 else 1 for each in tiles]
            spent.append((time.process_time() - start) * 1e3)
        how = f"{'each document' if alone else 'the sequence'}, {layout.value}"
        share = quartiles(spent[1:])[1] / LIMIT_MS
        sizes = f"{tokens:,}", f"{documents:,}", how, f"{sum(map(len, tiles)):,}", sum(launches)
        row(cp, *sizes, spread(spent[1:]), f"{share:.2f}")


if __name__ == "__main__":
    main()
