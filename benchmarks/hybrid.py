"""Layers that carry a state, forward and backward: the state passed from rank to rank beside the sequence gathered.

    python benchmarks/hybrid.py [--ranks 2 4] [--lengths 2048 8192] [--rounds 7]

Both compute the convolution and the recurrence of one layer, from the projections of a rank's tokens to its outputs, in
fp32, one thread to a rank; transformers' own functions where there are such. "gathered" gathers the projections,
computes the whole sequence on every rank and keeps the rank's part, in the contiguous layout, which suits it best; its
gradients are summed where they are scattered. The methods take turns, round by round.

- "ratio": the time of "gathered" over that of the scan, round by round: the median, with quartiles.
- "sent": bytes that the busiest rank sends, counted as torch.distributed gets them; of "gathered" what a ring
  of ranks passes on, which is the least.
- "apart": the largest relative difference of the two methods, of the output and of the inputs' gradients.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import heads, parsed, quartiles, ratios, row, spread
from meters import TIMEOUT, Wire, in_turns
from torch import Tensor

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.collectives import gather_from_sequence
from parcompile.runtime.local import run_local
from parcompile.runtime.recurrent import Chain, Pieces, convolve, gated_delta_rule, lightning_attention
from parcompile.runtime.ring_attention import split_sequence

KEY_HEADS, HEADS, WIDTH, KERNEL, BLOCK = 2, 4, 64, 4, 256
Layer = Callable[..., Tensor]
"""From projections [1, S, F], `pieces` and `chain` to outputs [1, S, heads, width]."""


class Row(NamedTuple):
    """What one rank found of one method, layer and length."""

    layer: str
    method: str
    length: int
    seconds: list[float]
    sent_bytes: float
    apart: float


def gated_delta_net(projected: Tensor, pieces: Pieces, chain: Chain | None) -> Tensor:
    """A convolution over queries, keys and values, and the gated delta rule."""
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

    keys, values = KEY_HEADS * WIDTH, HEADS * WIDTH
    mixed, g, beta = projected.split([2 * keys + values, HEADS, HEADS], -1)
    weight = torch.ones(2 * keys + values, KERNEL) / KERNEL
    mixed = convolve(lambda x: causal_conv1d_fn(x, weight, None, activation="silu"), pieces, chain, mixed.mT, KERNEL).mT
    query, key, value = (part.unflatten(-1, (-1, WIDTH)) for part in mixed.split([keys, keys, values], -1))
    decay = -0.05 * g.sigmoid()  # slow: what is far away still matters
    options = {"g": decay, "beta": beta.sigmoid(), "use_qk_l2norm_in_kernel": True}
    return gated_delta_rule(torch_chunk_gated_delta_rule, pieces, chain, query, key, value, in_fp32=True, **options)


def lightning(projected: Tensor, pieces: Pieces, chain: Chain | None) -> Tensor:
    """Lightning attention with the decays of MiniMax-Text-01."""
    query, key, value = projected.unflatten(-1, (HEADS, -1)).split(WIDTH, -1)
    slopes = (1 / 2 ** (8 / HEADS)) ** torch.arange(1, HEADS + 1)
    return lightning_attention(pieces, chain, query, key, value, slopes, block=BLOCK)


LAYERS: dict[str, tuple[Layer, int]] = {
    "gated delta net": (gated_delta_net, (2 * KEY_HEADS + HEADS) * WIDTH + 2 * HEADS),
    "lightning attention": (lightning, 3 * HEADS * WIDTH),
}
"""Each with the features of its projections."""


def gathered(layer: Layer, every: Pieces, rank: int, x: Tensor) -> Tensor:
    """This rank's part of what the whole sequence gives."""
    group = dist.group.WORLD
    whole = layer(gather_from_sequence(x, 1, group), every, None)
    return whole.chunk(dist.get_world_size(group), 1)[rank]


def scan_of(layer: Layer, layout: CpLayout, length: int, rank: int) -> Callable[[Tensor], Tensor]:
    """The layer over this rank's pieces of a sequence."""
    group = dist.group.WORLD
    assert group is not None
    ranks = dist.get_world_size(group)
    pieces, chain = Pieces.of_sequence(1, length // ranks, None, layout, ranks, rank), Chain.of(layout, group)
    return functools.partial(layer, pieces=pieces, chain=chain)


def measure(rank: int, ranks: int, lengths: list[int], rounds: int) -> list[Row]:
    """Of this rank, each layer, length and method."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = []
    for name, (layer, features) in LAYERS.items():
        for length in lengths:
            generator = torch.Generator().manual_seed(0)
            whole = torch.randn(1, length, features, generator=generator)
            weights = torch.randn(1, length, HEADS, WIDTH, generator=generator)  # the gradient of the output
            every = Pieces.of_sequence(1, length, None, CpLayout.CONTIGUOUS, 1, 0)

            leaf = whole.clone().requires_grad_()
            expected = layer(leaf, every, None)
            (of_input,) = torch.autograd.grad(expected, leaf, weights)
            ways = {
                "gathered": (CpLayout.CONTIGUOUS, functools.partial(gathered, layer, every, rank)),
                "scan, contiguous": (CpLayout.CONTIGUOUS, scan_of(layer, CpLayout.CONTIGUOUS, length, rank)),
                "scan, zigzag": (CpLayout.ZIGZAG, scan_of(layer, CpLayout.ZIGZAG, length, rank)),
            }
            steps, apart, sent = {}, {}, {}
            for method, (layout, way) in ways.items():
                x, weight, out, gradient = (
                    split_sequence(one.detach(), 1, layout, ranks, rank).contiguous()
                    for one in (whole, weights, expected, of_input)
                )

                def step(way: Any = way, x: Tensor = x, weight: Tensor = weight) -> tuple[Tensor, Tensor]:
                    leaf = x.clone().requires_grad_()
                    own = way(leaf)
                    return own.detach(), torch.autograd.grad(own, leaf, weight)[0]

                with Wire() as wire:
                    results = step()
                pairs = zip(results, (out, gradient), strict=True)
                apart[method] = max(float((one - other).norm() / other.norm()) for one, other in pairs)
                # A ring passes every other rank's part on, forward its projections and backward their gradients.
                sent[method] = 2 * (ranks - 1) * x.nbytes if method == "gathered" else wire.bytes
                steps[method] = step
            seconds, _ = in_turns(steps, rounds)
            found += [Row(name, method, length, seconds[method], sent[method], apart[method]) for method in ways]
    return found


def main() -> None:
    """Prints the table."""
    given = parsed(__doc__, ranks=[2, 4], lengths=[2048, 8192], rounds=7)
    heads("layer", "ranks", "tokens", "method", "ms", "ratio", "sent, KiB", "apart")
    for ranks in given.ranks:
        found = run_local(ranks, measure, ranks, given.lengths, given.rounds, timeout=TIMEOUT)
        for rows in zip(*found, strict=True):
            first = rows[0]  # barriers stand around each step: the ranks agree on its time
            if first.method == "gathered":
                base = first
            ratio = "1" if first is base else spread(ratios(base.seconds, first.seconds))
            sent, apart = max(one.sent_bytes for one in rows), max(one.apart for one in rows)
            figures = f"{1e3 * quartiles(first.seconds)[1]:.0f}", ratio, f"{sent / 1024:,.0f}", f"{apart:.0e}"
            row(first.layer, ranks, f"{first.length:,}", first.method, *figures)


if __name__ == "__main__":
    main()
