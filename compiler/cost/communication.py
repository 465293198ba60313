"""Bytes that tensor and context parallelism put on the wire, per rank.

A ring all-reduce of n bytes moves 2 (t − 1) / t · n per rank; all-gather and reduce-scatter half of that each, so
sequence parallelism moves the same bytes. Sources: arXiv 1909.08053 (two all-reduces forward and two backward per
layer), arXiv 2310.01889 (ring).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

ALL_REDUCES_PER_LAYER = 2
"""One behind attention and one behind the MLP, in each direction."""


@dataclass(frozen=True, slots=True)
class TensorParallelTraffic:
    """All-reduces of one forward pass of one micro-batch.

    `message_bytes` is the size of one activation [batch, sequence, hidden]; the backward pass reduces as many.
    """

    message_bytes: int
    num_layers: int
    tp: int

    @property
    def forward_message_bytes(self) -> int:
        """Messages of the forward pass added up, as entrenar's `TpCommCost` counts them (without the ring factor)."""
        return self.message_bytes * ALL_REDUCES_PER_LAYER * self.num_layers

    @property
    def wire_bytes(self) -> int:
        """Bytes that each rank sends, forward and backward, with the ring factor 2 (t − 1) / t."""
        return int(2 * self.forward_message_bytes * Fraction(2 * (self.tp - 1), self.tp))


def tensor_parallel_traffic(
    *,
    sequence_length: int,
    hidden_size: int,
    num_layers: int,
    tp: int,
    micro_batch_size: int = 1,
    element_bytes: int = 4,
) -> TensorParallelTraffic:
    """The traffic of one micro-batch; `sequence_length` is a rank's own share of the sequence (after cp)."""
    return TensorParallelTraffic(micro_batch_size * sequence_length * hidden_size * element_bytes, num_layers, tp)


@dataclass(frozen=True, slots=True)
class RingTraffic:
    """Keys and values around the ring, for one micro-batch."""

    kv_bytes_per_hop: int
    hops: int
    num_layers: int
    gradient_element_ratio: Fraction
    """Bytes of a travelling gradient element over those of a key element (fp32 gradients of bf16 keys: 2)."""

    @property
    def forward_bytes(self) -> int:
        """Bytes that each rank sends in the forward pass."""
        return self.kv_bytes_per_hop * self.hops * self.num_layers

    @property
    def wire_bytes(self) -> int:
        """Forward and backward: in backward keys and values go round again, and their gradients with them."""
        return int(self.forward_bytes * (2 + self.gradient_element_ratio))


def ring_traffic(
    *,
    local_sequence_length: int,
    head_dim: int,
    num_key_value_heads: int,
    cp: int,
    num_layers: int,
    micro_batch_size: int = 1,
    element_bytes: int = 4,
) -> RingTraffic:
    """The traffic of one micro-batch; `num_key_value_heads` are those of one tensor-parallel rank."""
    elements = 2 * micro_batch_size * local_sequence_length * head_dim * num_key_value_heads
    return RingTraffic(elements * element_bytes, cp - 1, num_layers, Fraction(4, element_bytes))
