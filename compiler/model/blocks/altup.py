"""Alternating updates (Gemma 3n): several residual streams, of which each layer computes one.

| quantity | for a layer |
|---|---|
| multiply each token | LAuReL's two matrices, and two routers among the streams |
| over tp, of layers whose MLP keeps its largest activations | the mean of the features, and that of their squares |

Source: transformers models/gemma3n/modeling_gemma3n.py (Gemma3nTextAltUp, Gemma3nTextLaurelBlock).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .block import Block, Exchange, Local, Size, Traits

PROJECTIONS = "altup_projections."
"""What makes streams of one, in front of the layers."""
_DENSE_FROM, _SHARE = 10, 0.95
"""Layers whose MLP keeps its largest activations, where a configuration does not list them, in a model of more."""


@dataclass(frozen=True, slots=True)
class AltUp(Block):
    """The streams, in all layers."""

    layers: tuple[int, ...]
    num_streams: int
    laurel_rank: int
    """Of the learned residual beside each layer."""

    streams_dim: ClassVar[int | None] = 0
    inputs: ClassVar[Sequence[str]] = (PROJECTIONS,)

    @property
    def streams(self) -> int:
        """All of them go from layer to layer."""
        return self.num_streams

    def matmul_parameters(self, hidden: int, streams: int) -> int:
        """LAuReL and the routers."""
        return 2 * hidden * (self.laurel_rank + streams)

    @property
    def made(self) -> int:
        """Streams that are made of one, and made one of."""
        return self.num_streams - 1

    def end_parameters(self, hidden: int) -> int:
        """What makes streams of one, and one of them."""
        return 2 * self.made * hidden**2


@dataclass(frozen=True, slots=True)
class LargestActivations(Block):
    """Layers whose MLP keeps its largest activations only."""

    layers: tuple[int, ...]

    def exchanges(self, local: Local) -> Iterator[Exchange]:
        """Two means in forward, and their gradients."""
        for _ in range(2):
            yield Exchange("tp", "all-reduce", local.width * local.tokens, back="all-reduce")


@dataclass(frozen=True, slots=True)
class AltUpTraits(Traits):
    """What a family says of them."""

    words: ClassVar[str] = "several residual streams"
    telling: ClassVar[int] = 0
    lists: ClassVar[Sequence[str]] = ("activation_sparsity_pattern",)

    def read(self, config: Mapping[str, Any], layers: int, size: Size) -> tuple[Block, ...]:  # noqa: ARG002
        """From the shares of `activation_sparsity_pattern`, layer by layer."""
        listed, count = config.get("activation_sparsity_pattern"), config.get("num_hidden_layers", 35)
        if listed is None:
            listed = [_SHARE] * _DENSE_FROM if count > _DENSE_FROM else []
        sparse = tuple(layer for layer, share in enumerate(listed) if share > 0)
        whole = AltUp(tuple(range(layers)), config.get("altup_num_inputs", 4), config.get("laurel_rank", 64))
        return whole, LargestActivations(sparse)
