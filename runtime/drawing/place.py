"""Where the tensors of this rank lie in the whole batch, and a key for each of their tokens.

Shapes: B rows, S tokens of a row on this cp rank, s its share of them under sequence parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parcompile.layout.sequence import CpLayout, token_ranges
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import FIRST_SAMPLE, MicroBatch, current
from parcompile.runtime.ring_attention.kernels.kernel import combined

_ROWS, _POSITIONS = 0x1F123BB5, 0x6A09E667


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's part of each sequence."""

    seed: int
    """The plan's."""
    layout: CpLayout
    cp: int
    cp_index: int
    tp: int
    tp_index: int
    sequence_parallel: bool

    @classmethod
    def of(cls, mesh: Mesh) -> Place:
        """As the plan says."""
        spec = mesh.plan.spec
        return cls(
            spec.training.seed,
            spec.parallelism.cp_layout,
            mesh.size("cp"),
            mesh.index("cp"),
            mesh.size("tp"),
            mesh.index("tp"),
            spec.parallelism.sequence_parallel,
        )

    def width(self, shape: Sequence[int], what: str) -> int:
        """Elements of a tensor for each of its tokens.

        Raises:
            RunError: its shape does not tell where its tokens are; `what` names who draws.
        """
        return math.prod(shape[self._token_dims(shape, what)[0] :])

    def keys(self, shape: Sequence[int], word: int, device: torch.device, what: str) -> Tensor:
        """A word for each token of a tensor of this shape, from `word` and the token's place: int64 [tokens].

        Raises:
            RunError: as for `width`, or the number of the first row is not known.
        """
        _, share = self._token_dims(shape, what)
        micro_batch = current()
        if micro_batch.token_places is not None:
            places = micro_batch.token_places[0].to(device)
            samples, positions = self._shared(places, 0, share).unbind(1)
            return combined(combined(word, samples, _ROWS), positions, _POSITIONS)
        if micro_batch.first_sample is None:
            raise RunError(
                f"{what}: call the model with {FIRST_SAMPLE}, the number of the batch's first sequence in the data, as "
                "the engine's loader does, or switch the drawing off in the model's configuration",
                everywhere=True,
            )
        rows, length = _sizes(micro_batch, what)
        first = micro_batch.first_sample
        by_row = combined(word, torch.arange(first, first + rows, device=device), _ROWS)
        layout = self.layout if self.cp > 1 else CpLayout.CONTIGUOUS
        ranges = token_ranges(layout, self.cp, self.cp_index, length * self.cp)
        positions = torch.cat([torch.arange(one.start, one.stop, one.step, device=device) for one in ranges])
        return combined(by_row.unsqueeze(1), self._shared(positions, 0, share), _POSITIONS).flatten()

    def _shared(self, tokens: Tensor, dim: int, share: int | None) -> Tensor:
        """The share of a tensor-parallel rank; what continues the sequence to a multiple is nobody's token."""
        if share is None:
            return tokens
        missing = share * self.tp - tokens.shape[dim]
        padding = tokens.new_zeros(missing, *tokens.shape[1:])
        return torch.cat([tokens, padding]).narrow(dim, share * self.tp_index, share)

    def _token_dims(self, shape: Sequence[int], what: str) -> tuple[int, int | None]:
        """How many of the first dims are tokens, and the share of each row that they are (None: all of it)."""
        rows, length = _sizes(current(), what)
        lengths: list[tuple[int, int | None]] = [(length, None)]
        if self.sequence_parallel and self.tp > 1:
            share = -(-length // self.tp)
            lengths.append((share, share))
        for tokens, part in lengths:
            if tuple(shape[:2]) == (rows, tokens):
                return 2, part
            if shape and shape[0] == rows * tokens:
                return 1, part
        raise RunError(
            f"{what}, of shape {list(shape)}: only numbers for the tokens of a micro-batch, here "
            f"[{rows}, {length}, …], are drawn alike in every layout",
            everywhere=True,
        )


def _sizes(micro_batch: MicroBatch, what: str) -> tuple[int, int]:
    if micro_batch.rows is None or micro_batch.sequence_length is None:
        raise RunError(f"{what}: call the model with input_ids, whose shape says where a token is", everywhere=True)
    return micro_batch.rows, micro_batch.sequence_length
