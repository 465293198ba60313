"""Batches of packed documents: each rank's tokens, labels and positions, and attention over them.

In a training program:

    loader = DataLoader(documents, batch_size=…, collate_fn=PackedCollator(cp, rank, padding_id))
    for batch in loader:
        … packed_attention(query, key, value, batch["packing"], group=group) in the model

Every rank of the context-parallel group walks through the same documents in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.labels import IGNORED_LABEL, shift_labels

from .sequence import Packing, PackingCosts, pack_documents, split_sequence
from .ulysses import attention

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .execution import AttentionOptions


class PackedCollator:
    """Packs a list of documents and cuts out this rank's part of them; a `collate_fn` for `DataLoader`.

    A document is a 1-D tensor of token ids, or a mapping with `input_ids` [n] and, if they differ, `labels` [n]; other
    tensors [n, …] are packed with them and padded with zeros.

    A batch has `input_ids`, `labels`, `position_ids` [1, tokens of the rank], and `packing`. Labels are already moved
    by one token, within each document: position i has the label of token i + 1, and the last one −100, as padding has.
    They are there as `shift_labels` too, by which Hugging Face models know that. Positions begin at 0 with each
    document.
    """

    def __init__(
        self,
        cp: int,
        rank: int,
        padding_id: int,
        *,
        layout: CpLayout | str = CpLayout.ZIGZAG,
        local_tokens: int | None = None,
        costs: PackingCosts | None = None,
    ) -> None:
        """`local_tokens`: pad every rank to this many tokens; see `pack_documents` for the rest."""
        self.cp, self.rank, self.padding_id = cp, rank, padding_id
        self._layout, self._local_tokens, self._costs = CpLayout(layout), local_tokens, costs

    def __call__(self, documents: Sequence[Tensor | Mapping[str, Tensor]]) -> dict[str, Any]:
        """This rank's part of a batch."""
        named = [dict(one) if isinstance(one, Mapping) else {"input_ids": one} for one in documents]
        packing = pack_documents(
            [one["input_ids"].shape[0] for one in named],
            self.cp,
            layout=self._layout,
            local_tokens=self._local_tokens,
            costs=self._costs,
        )
        columns: dict[str, Sequence[Tensor]] = {
            name: [one[name] for one in named] for name in named[0] if name != "labels"
        }
        columns["labels"] = [shift_labels(one.get("labels", one["input_ids"])) for one in named]
        columns["position_ids"] = [torch.arange(length) for length in packing.lengths]
        fill = {"input_ids": self.padding_id, "labels": IGNORED_LABEL}
        batch: dict[str, Any] = {
            name: pack_tensors(column, packing, self.rank, fill.get(name, 0)).unsqueeze(0)
            for name, column in columns.items()
        }
        return {**batch, "shift_labels": batch["labels"], "packing": packing}


def pack_tensors(documents: Sequence[Tensor], packing: Packing, rank: int, padding: float = 0) -> Tensor:
    """This rank's tokens [tokens of the rank, …] of one tensor [length, …] for each document."""
    dealt = _joined([documents[number] for number in packing.dealt], packing.dealt_borders, documents[0], padding)
    parts = []
    if packing.dealt:
        parts.append(split_sequence(dealt, 0, packing.layout, packing.cp, rank, packing.dealt_borders))
    whole = [documents[number] for number in packing.whole[rank]]
    parts.append(_joined(whole, packing.whole_borders[rank], documents[0], padding))
    return torch.cat(parts)


def unpack_tensors(by_rank: Sequence[Tensor], packing: Packing) -> list[Tensor]:
    """Undoes `pack_tensors` on the parts [tokens of the rank, …] of all ranks: the documents, without padding."""
    numbers = [torch.arange(length) for length in packing.lengths]
    # Where each rank's tokens are from: document and place, −1 for padding.
    document = [torch.full((length,), number) for number, length in enumerate(packing.lengths)]
    found = [by_rank[0].new_zeros((length, *by_rank[0].shape[1:])) for length in packing.lengths]
    for rank, part in enumerate(by_rank):
        places = pack_tensors(numbers, packing, rank, -1)
        owners = pack_tensors(document, packing, rank, -1)
        for number in set(owners.tolist()):
            if number >= 0:
                mine = owners == number
                found[number][places[mine]] = part[mine]
    return found


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    *,
    rank: int,
    implementation: str = "ring",
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Attention of packed documents: over all ranks for those that are dealt, on this rank alone for whole ones.

    Args:
        query: [B, H, tokens of the rank, D], as `PackedCollator` packs them.
        key: [B, K, tokens of the rank, D].
        value: [B, K, tokens of the rank, E].
        packing: the batch's.
        rank: this rank in the context-parallel group.
        implementation: for the dealt documents, a name of `IMPLEMENTATIONS`.
        options: as for `ring_attention`, except layout and documents. The columns of `bias` are those of the documents
            without padding, one document after the other.

    Raises:
        ValueError: the tensors or the bias are not as long as the packing says, or documents that are padded are
            attended to in both directions.
    """
    if query.shape[2] != packing.local_tokens:
        raise ValueError(
            f"packed attention: {query.shape[2]} local tokens, the packing has {packing.dealt_tokens} dealt + "
            f"{packing.local_tokens - packing.dealt_tokens} whole = {packing.local_tokens}"
        )
    bias, total = options.get("bias"), sum(packing.lengths)
    if bias is not None and bias.shape[2:] != (packing.local_tokens, total):
        raise ValueError(
            f"packed attention: bias {list(bias.shape)} must have {packing.local_tokens} rows, the tokens of the rank, "
            f"and {total} columns, the tokens of all documents"
        )
    padded = packing.dealt_borders[-1] > sum(packing.lengths[number] for number in packing.dealt)
    if padded and not options.get("causal", True):
        raise ValueError(
            "packed attention: without a causal mask the dealt documents, padded to "
            f"{packing.dealt_borders[-1]} tokens, would see their padding; give multiples of "
            f"{packing.layout.chunks_per_rank * packing.cp}"
        )
    border = packing.dealt_tokens
    outputs = []
    if border:
        dealt: AttentionOptions = {
            **options,
            "layout": packing.layout,
            "documents": packing.dealt_borders,
            "per_document": True,
        }
        if bias is not None:
            dealt["bias"] = _columns(bias[:, :, :border], packing, packing.dealt, packing.dealt_borders)
        parts = (tensor[:, :, :border] for tensor in (query, key, value))
        outputs.append(attention(*parts, implementation=implementation, **dealt))
    if border < packing.local_tokens:
        # What names other ranks is not for documents that stay on one.
        alone: Any = {name: given for name, given in options.items() if name not in ("group", "groups", "inner_ranks")}
        alone["documents"] = packing.whole_borders[rank]
        if bias is not None:
            alone["bias"] = _columns(bias[:, :, border:], packing, packing.whole[rank], packing.whole_borders[rank])
        if options.get("dropout"):
            # Masks of whole documents on different ranks are not those of the dealt ones.
            alone["dropout_seed"] = (options["dropout_seed"] or 0) + ((rank + 1) << 48)
        parts = (tensor[:, :, border:] for tensor in (query, key, value))
        outputs.append(attention(*parts, **alone))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _columns(bias: Tensor, packing: Packing, numbers: Sequence[int], borders: Sequence[int]) -> Tensor:
    """The columns of these documents at their borders; no query sees what lies between them."""
    firsts = list(itertools.accumulate(packing.lengths, initial=0))
    own = [torch.arange(firsts[number], firsts[number + 1]) for number in numbers]
    columns = _joined(own, borders, torch.empty(0, dtype=torch.int64), -1).to(bias.device)
    return bias.index_select(3, columns.clamp(min=0)).masked_fill(columns < 0, -torch.inf)


def batches_of_tokens(
    documents: Iterable[Any], tokens: int, length_of: Callable[[Any], int] | None = None
) -> Iterator[list[Any]]:
    """Documents in order, as many at a time as have at most `tokens` tokens; a longer one comes alone."""
    length_of = length_of or (lambda one: int((one["input_ids"] if isinstance(one, Mapping) else one).shape[0]))
    batch: list[Any] = []
    total = 0
    for one in documents:
        length = length_of(one)
        if batch and total + length > tokens:
            yield batch
            batch, total = [], 0
        batch.append(one)
        total += length
    if batch:
        yield batch


class PackedLoader:
    """Walks through documents in batches of about `tokens` tokens over all ranks, each packed for this rank."""

    def __init__(self, documents: Iterable[Any], tokens: int, collator: PackedCollator) -> None:
        """`documents`: anything that can be walked through again and again, equal on all ranks."""
        self._documents, self._tokens, self._collator = documents, tokens, collator

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """This rank's part of each batch."""
        return map(self._collator, batches_of_tokens(self._documents, self._tokens))


def _joined(documents: list[Tensor], borders: Sequence[int], like: Tensor, padding: float) -> Tensor:
    """Documents at their borders, with padding behind each that is shorter than its place."""
    joined = like.new_full((borders[-1], *like.shape[1:]), padding)
    for start, document in zip(borders, documents, strict=False):
        joined[start : start + document.shape[0]] = document
    return joined
