"""A rank's way through the ring: the compiler's schedule, with blocks in tokens and neighbours in a live group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from parcompile.layout.sequence import Block, CpLayout, Mask, RingStep, ring_schedule

from .exchange import Exchange, Pair, Stream, post_exchange
from .kernels import Tile


@dataclass(frozen=True, slots=True)
class Route:
    """The steps of the ring for one rank, each with its tiles; without a group one step that exchanges nothing."""

    group: dist.ProcessGroup | None
    steps: tuple[RingStep, ...]
    tiles: tuple[tuple[Tile, ...], ...]

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, layout: CpLayout, *, causal: bool, local_length: int) -> Route:
        """The route of the calling rank.

        Raises:
            ValueError: the caller is not in the group, or the local tokens cannot be cut into the layout's chunks.
        """
        size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        if rank < 0:
            raise ValueError(f"ring attention: global rank {dist.get_rank()} is not in the group that it was given")
        if size == 1:
            # One rank holds the whole sequence in order, whatever the layout.
            group, layout = None, CpLayout.CONTIGUOUS
        chunk, rest = divmod(local_length, layout.chunks_per_rank)
        if rest:
            raise ValueError(
                f"ring attention: {local_length} local tokens cannot be cut into {layout.chunks_per_rank} equal chunks "
                f"({layout.value} layout): pad the sequence to a multiple of {layout.chunks_per_rank} · {size} ranks = "
                f"{layout.chunks_per_rank * size}"
            )
        steps = ring_schedule(layout, size, rank, causal=causal)
        return cls(group, steps, tuple(tuple(_tile(block, chunk) for block in step.blocks) for step in steps))

    def __iter__(self) -> Iterator[tuple[RingStep, tuple[Tile, ...]]]:
        return zip(self.steps, self.tiles, strict=True)

    def pass_on(self, step: RingStep, outgoing: Pair, incoming: Pair) -> Exchange:
        """Hand keys and values to the rank that works on them next, and receive one's own next ones."""
        return self._exchange(step, outgoing, incoming, Stream.KEYS_AND_VALUES)

    def pass_gradients_on(self, outgoing: Pair, incoming: Pair) -> Exchange:
        """Hand on gradients of keys and values: to the rank that adds its part next, at last to their owner."""
        return self._exchange(self.steps[0], outgoing, incoming, Stream.GRADIENTS)

    def _exchange(self, step: RingStep, outgoing: Pair, incoming: Pair, stream: Stream) -> Exchange:
        assert self.group is not None, "a ring of one rank exchanges nothing"
        assert step.send_to is not None, "nothing is exchanged in the last step"
        assert step.receive_from is not None, "nothing is exchanged in the last step"
        return post_exchange(
            self.group, outgoing, incoming, send_to=step.send_to, receive_from=step.receive_from, stream=stream
        )


def _tile(block: Block, chunk: int) -> Tile:
    return Tile(
        queries=slice(block.q_start * chunk, block.q_stop * chunk),
        keys=slice(block.kv_start * chunk, block.kv_stop * chunk),
        causal=block.mask is Mask.CAUSAL,
    )
