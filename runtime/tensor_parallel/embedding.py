"""The token embedding, spread over the ranks of a tensor-parallel group along the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from parcompile.runtime.collectives import reduce_from_group, reduce_scatter_to_sequence
from parcompile.runtime.transport import Group, group_rank, group_size

from .partial import draw_slice, even_range, mark_shard, master_seed, normal, slice_parameter


class VocabParallelEmbedding(nn.Module):
    """Looks up tokens [..] in a table [V, H] of which each rank holds V/tp rows.

    The result [.., H] is summed over the ranks: one of them has the row, the others add zeros.

    Args:
        num_embeddings: V, the size of the vocabulary.
        embedding_dim: H.
        padding_idx: A token whose row gets no gradient, as in `nn.Embedding`.
        group: The tensor-parallel ranks; None for this rank alone.
        padded_num_embeddings: The number of rows that are spread, when V itself is not divisible. Rows past V are zero
            and no token reaches them.
        sequence_parallel: Return the result split along `sequence_dim`: a reduce-scatter in place of the all-reduce.
        sequence_dim: The dim of the result that is the sequence.
        pad_sequence: With `sequence_parallel`, continue a sequence that the ranks do not divide with zeros to the next
            multiple; otherwise it is refused.
        check_tokens: Whether every call looks for tokens outside the vocabulary. None looks on the CPU only: on a GPU
            the answer costs a synchronisation.
        device: Where the table is made.
        dtype: The table's type.

    Raises:
        ValueError: The (padded) vocabulary is not divisible by the number of ranks.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Group = None,
        padded_num_embeddings: int | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        pad_sequence: bool = False,
        check_tokens: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padded_num_embeddings = num_embeddings if padded_num_embeddings is None else padded_num_embeddings
        if self.padded_num_embeddings < num_embeddings:
            raise ValueError(f"padded_num_embeddings = {padded_num_embeddings} < num_embeddings = {num_embeddings}")
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(f"padding_idx {padding_idx} is outside the vocabulary of {num_embeddings}")
            padding_idx %= num_embeddings
        self.padding_idx = padding_idx
        self.group = group
        self.sequence_parallel, self.sequence_dim = sequence_parallel and group_size(group) > 1, sequence_dim
        self.pad_sequence, self.check_tokens = pad_sequence, check_tokens
        what = "num_embeddings" if padded_num_embeddings is None else "padded_num_embeddings"
        self.start, self.stop = even_range(self.padded_num_embeddings, group_rank(group), group_size(group), what)
        self.weight = nn.Parameter(torch.empty(self.stop - self.start, embedding_dim, device=device, dtype=dtype))
        mark_shard(self.weight)
        self.reset_parameters()

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, **options: Any) -> Self:
        """Take this rank's rows of a full table; `options` are those of the constructor.

        Device, dtype and `requires_grad` stay as they are unless `options` say otherwise.
        """
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError(
                "max_norm, scale_grad_by_freq and sparse gradients have no vocabulary-parallel counterpart"
            )
        device, dtype = options.pop("device", None), options.pop("dtype", None)
        shape = (embedding.num_embeddings, embedding.embedding_dim)
        layer = cls(*shape, embedding.padding_idx, device="meta", **options)
        rows = ((layer.start, layer.stop),)
        layer.weight = slice_parameter(embedding.weight, 0, rows, layer.padded_num_embeddings, device, dtype)
        mark_shard(layer.weight)
        return layer.train(embedding.training)

    def reset_parameters(self) -> None:
        """Draw the full table as `nn.Embedding` does, alike on every rank, and keep the rows; meta tensors stay."""
        if self.weight.is_meta:
            return
        rows = ((self.start, self.stop),)
        draw_slice(self.weight, (self.num_embeddings, self.embedding_dim), 0, rows, normal(1.0), master_seed())
        if self.padding_idx is not None and self.start <= self.padding_idx < self.stop:
            with torch.no_grad():
                self.weight[self.padding_idx - self.start].zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [..] to vectors [.., H].

        Raises:
            ValueError: A token is outside the vocabulary (where that is checked).
        """
        if tokens.is_cpu if self.check_tokens is None else self.check_tokens:
            self._check(tokens)
        if group_size(self.group) == 1:
            return F.embedding(tokens, self.weight, self.padding_idx)
        elsewhere = (tokens < self.start) | (tokens >= self.stop)
        local_padding = None
        if self.padding_idx is not None and self.start <= self.padding_idx < self.stop:
            local_padding = self.padding_idx - self.start
        rows = F.embedding((tokens - self.start).masked_fill(elsewhere, 0), self.weight, local_padding)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence(rows, self.sequence_dim, self.group, pad=self.pad_sequence)
        return reduce_from_group(rows, self.group)

    def _check(self, tokens: Tensor) -> None:
        if tokens.numel() == 0:
            return
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < self.num_embeddings:
                raise ValueError(
                    f"token {token} is outside the vocabulary of {self.num_embeddings}: "
                    f"ids are 0..{self.num_embeddings - 1}"
                )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # `to_empty` and the like make new parameters, which know nothing of the old ones' marks.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        mark_shard(self.weight)
        return self

    def extra_repr(self) -> str:
        """The full table, and the rows of it that this rank holds."""
        rows = f"rows={self.start}..{self.stop} of {self.padded_num_embeddings}, tp={group_size(self.group)}"
        return f"{self.num_embeddings}, {self.embedding_dim}, {rows}, sequence_parallel={self.sequence_parallel}"
