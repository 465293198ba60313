"""Where a model attends, looks among all tokens or hands states on: the ranks of its sequences, and how tokens lie.

Choices of keys, on their way into that attention, stand here too: B rows, S tokens of this rank, T tokens of all ranks,
N chosen keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.layout.sequence import ContextParallel, CpImplementation, CpLayout
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import FIRST_SAMPLE, current
from parcompile.runtime.recurrent import Chain, Pieces
from parcompile.runtime.ring_attention import (
    TokenOrder,
    UspGroups,
    attention,
    order_of_last,
    order_of_packing,
    order_of_sequence,
    packed_attention,
)


class Unmasked:
    """What an attention to chosen keys is given for its mask: the ring knows the mask, and the choice comes beside."""

    def __getitem__(self, _: Any) -> Unmasked:
        return self


class Chosen(Unmasked):
    """The same with the choice [B, S, N], where an attention passes nothing beside its mask."""

    def __init__(self, indices: Tensor) -> None:
        self.indices = indices


class Visible(Unmasked):
    """What an attention is given for its mask that joins it with a choice of keys, as one of bools."""

    dtype = torch.bool

    def __and__(self, chosen: Tensor) -> ChosenKeys:
        return ChosenKeys(chosen)


@dataclass(frozen=True, slots=True)
class ChosenKeys:
    """Whether a query sees a key: bool [B, 1, S, T]."""

    keys: Tensor

    def hiding(self, dtype: torch.dtype) -> Tensor:
        """What is added to the scores: 0 for those it sees, −inf for others."""
        return torch.zeros(self.keys.shape, dtype=dtype, device=self.keys.device).masked_fill(~self.keys, -torch.inf)


def hiding(indices: Tensor, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    """[B, S, N] → what is added to the scores, 0 for chosen keys and −inf for others: [B, 1, queries, keys].

    Where there are more queries than choices, those in front are of tokens whose results nobody reads.
    """
    added = torch.full((*indices.shape[:2], keys), -torch.inf, dtype=dtype, device=indices.device)
    added.scatter_(2, indices.long(), 0.0)
    return F.pad(added, (0, 0, queries - added.shape[1], 0)).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class RingPlace:
    """How a model's attention modules attend; `group` is None when one rank holds the whole sequence."""

    group: dist.ProcessGroup | None
    context: ContextParallel
    layout: CpLayout
    sequence_length: int
    levels: UspGroups | None = None
    """The groups of usp, in the place of `group`."""
    tp_index: int = 0
    seed: int = 0
    """The plan's, for dropout."""
    tp: int = 1

    @classmethod
    def of(cls, mesh: Mesh) -> RingPlace:
        """As the plan says."""
        parallelism, length = mesh.plan.spec.parallelism, mesh.plan.spec.training.sequence_length
        levels = None
        if parallelism.cp_implementation is CpImplementation.USP:
            levels = UspGroups(mesh.group("cp-inner"), mesh.group("cp-outer"))
        return cls(
            mesh.parallel_group("cp"),
            parallelism.context,
            parallelism.cp_layout,
            length,
            levels,
            mesh.index("tp"),
            mesh.plan.spec.training.seed,
            mesh.size("tp"),
        )

    @property
    def options(self) -> dict[str, Any]:
        """What names the implementation, its ranks and their tokens."""
        found: dict[str, Any] = {"implementation": self.context.implementation.value, "layout": self.layout}
        if self.levels is not None:
            return found | {"groups": self.levels}
        if self.context.implementation is CpImplementation.DOUBLE_RING:
            found["inner_ranks"] = self.context.inner_ranks
        return found | {"group": self.group}

    @property
    def is_alone(self) -> bool:
        """Whether a rank holds whole sequences, which may have any length."""
        return self.group is None and self.levels is None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, chunk: int | None = None, **masks: Any) -> Tensor:
        """Attention over the documents of the micro-batch, with further masks as `ring_attention` takes them."""
        if current().alone:
            return _alone(query, key, value, **masks)
        packing, documents = current().packing, current().documents
        if packing is None:
            if chunk is not None:
                length = query.shape[2] if self.is_alone else self.sequence_length
                documents = chunked(documents, query.shape[0], length, chunk)
            out: Tensor = attention(query, key, value, **self.options, documents=documents, **masks)
            return out
        if chunk is not None:
            raise everywhere(
                "chunked attention counts its chunks in the sequence, which packing changes: do not pack by documents"
            )
        named = {name: given for name, given in self.options.items() if name != "layout"}
        rank = 0 if self.group is None else dist.get_rank(self.group)
        return packed_attention(query, key, value, packing, rank=rank, **named, **masks)

    def hiding(self, indices: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        """What hides the keys that were not chosen; `indices` [B, S, N] are places in the whole sequence."""
        batch, length = current(), key.shape[2]
        if batch.alone:
            return hiding(indices, length, length, dtype)
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        total = length * ranks if batch.packing is None else sum(batch.packing.lengths)
        return hiding(indices, length, total, dtype)

    def dropping(self, dropout: float, name: str, layer: int, first_head: int) -> dict[str, Any]:
        """What dropout needs to draw the same mask in every layout; nothing without dropout.

        A mask depends on the seed, the layer, the sample, the head and the positions, all counted as without any axis.
        `layer` is a number of 31 bits that no other attention of the model has.
        """
        if not dropout:
            return {}
        first_sample = current().first_sample
        if first_sample is None:
            raise everywhere(
                f"{name} uses attention dropout {dropout}: call the model with {FIRST_SAMPLE}, the number of the "
                "batch's first sequence in the data, as the engine's loader does, or set attention_dropout to 0"
            )
        return {
            "dropout": dropout,
            "dropout_seed": layer + 1 << 32 | self.seed & 0xFFFFFFFF,
            "first_row": first_sample,
            "first_head": first_head,
        }


def _alone(query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> Tensor:
    """Attention of the last tokens over all that are kept, on this rank alone: [B, H, S, D] over [B, K, T, D].

    The queries of the tokens before are zeros, whose results nobody reads: masks count from the first key.
    """
    new, length = query.shape[2], key.shape[2]
    documents = current().documents
    if documents is not None:
        # A window's keys alone are kept: borders count from the first of them.
        documents = [sorted({max(border - row[-1] + length, 0) for border in row}) for row in documents]
    out: Tensor = attention(F.pad(query, (0, 0, length - new, 0)), key, value, group=None, documents=documents, **masks)
    return out[:, :, length - new :]


def chunk_of(module: nn.Module) -> int | None:
    """The tokens of a chunk, for an attention (Llama 4) that sees no further."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or layer is None or kinds[layer] != "chunked_attention":
        return None
    size: int | None = config.attention_chunk_size  # type: ignore[union-attr]
    return size


def chunked(documents: list[list[int]] | None, rows: int, length: int, chunk: int) -> list[list[int]]:
    """Borders of the documents of each row and of their chunks: each document begins with a chunk of its own.

    Source: `create_chunked_causal_mask` of transformers 5.23.
    """
    return [
        sorted({edge for start, end in pairwise(borders) for edge in (*range(start, end, chunk), end)})
        for borders in documents or [[0, length]] * rows
    ]


def token_order(place: RingPlace, length: int, total: int, device: torch.device) -> TokenOrder:
    """Of the micro-batch: `length` tokens of this rank; `total` with those that are kept, where a rank is alone."""
    batch = current()
    if batch.alone:
        return order_of_last(length, total, batch.documents, device)
    ranks, rank = (1, 0) if place.group is None else (dist.get_world_size(place.group), dist.get_rank(place.group))
    if batch.packing is not None:
        return order_of_packing(batch.packing, rank, device)
    return order_of_sequence(length, place.layout, ranks, rank, borders_of_rows(), device)


def borders_of_rows() -> tuple[tuple[int, ...], ...] | None:
    """Of the micro-batch: where the documents of each row begin, and its length; None where each row is one."""
    documents = current().documents
    return None if documents is None else tuple(tuple(int(edge) for edge in row) for row in documents)


@dataclass(frozen=True, slots=True)
class StatePlace:
    """How the layers of a model find the pieces of a micro-batch."""

    chain: Chain | None
    layout: CpLayout
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: Mesh) -> StatePlace:
        """As the plan says."""
        group, layout = mesh.parallel_group("cp"), mesh.plan.spec.parallelism.cp_layout
        if group is None:
            return cls(None, CpLayout.CONTIGUOUS, 1, 0)
        return cls(Chain.of(layout, group), layout, mesh.size("cp"), mesh.index("cp"))

    @property
    def is_alone(self) -> bool:
        """Whether each rank has all tokens now, as for generation."""
        return current().alone

    def pieces(self, rows: int, length: int) -> Pieces:
        """Those of the micro-batch, of so many rows and local tokens."""
        if (packing := current().packing) is not None:
            return Pieces.of_packing(packing, self.rank)
        return Pieces.of_sequence(rows, length, current().documents, self.layout, self.size, self.rank)
