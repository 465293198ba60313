"""A rank's part of a batch of whole sequences: its tokens (cp), with positions, shifted labels and documents.

A sample may have any form that tokenizers, `datasets` and arrays have.

transformers' models take whole sequences, an attention mask and labels that they shift themselves. A rank's model takes
its tokens, labels that were shifted before the sequence was split, and the borders of packed documents. Numbers stay
those of transformers: labels count as they are given; a mask hides keys, and behind causal attention no token sees the
padding on its right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.labels import IGNORED_LABEL, shift_labels
from parcompile.runtime.micro_batch import ALONE, DOCUMENTS, PACKING, REAL_TOKENS
from parcompile.runtime.ring_attention import document_borders, gather_sequence, local_positions, split_sequence
from parcompile.runtime.transport.backend import gather_tensors, to_device

_WHOLE_NUMBERS = ("input_ids", "labels", "shift_labels", "position_ids")


def tensors_of(sample: Any, number: int | None = None) -> dict[str, Tensor]:
    """The tensors of a sample by name: `input_ids` [S], `labels` [S] and what else it has.

    Token ids alone, or a sample without labels, are their own labels.

    Args:
        sample: a mapping of tensors, arrays or lists, as tokenizers and `datasets` give it, or token ids alone.
        number: of the sample in its data set, for messages.

    Raises:
        ValueError: there are no token ids, or a value is no numbers, or not in one row.
    """
    where = "a sample" if number is None else f"sample {number}"
    columns = dict(sample) if isinstance(sample, Mapping) else {"input_ids": sample}
    if "input_ids" not in columns:
        raise ValueError(
            f"{where} has {', '.join(map(str, columns)) or 'nothing'}, but no input_ids: tokenize it first"
        )
    found = {name: _tensor(name, value, where) for name, value in columns.items()}
    shape = found["input_ids"].shape
    if len(shape) != 1:
        raise ValueError(
            f"{where}: input_ids have shape {list(shape)}; a sample is one row of token ids [S] (a tokenizer's "
            'return_tensors="pt" makes a batch of one: leave it out)'
        )
    for name in _WHOLE_NUMBERS:
        if name not in found:
            continue
        if found[name].numel() and (found[name].is_floating_point() or found[name].is_complex()):
            raise ValueError(f"{where}: {name} are {found[name].dtype}, not whole numbers")
        if found[name].shape != shape:
            raise ValueError(f"{where}: {name} have shape {list(found[name].shape)}, input_ids {list(shape)}")
        found[name] = found[name].long()
    if "labels" not in found and "shift_labels" not in found:
        found["labels"] = found["input_ids"]
    return found


def _tensor(name: str, value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        kind = type(value[0] if isinstance(value, Sequence) and value else value).__name__
        raise ValueError(
            f"{where}: {name} holds {kind}, which is no tensor of numbers: leave it out "
            f"(datasets: data.remove_columns({name!r}))"
        ) from None


Batch = dict[str, Any]


_FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What flattening collators of transformers and trl say of documents beside positions, for kernels of theirs."""


def with_positions(batch: Batch) -> Batch:
    """A batch of a flattening collator with `position_ids` that begin anew in the place of what else it says.

    Args:
        batch: tokens of several documents [1, T], with their borders `cu_seq_lens_q` [documents + 1] or the number of
            each token's document `seq_idx` [1, T]. Other batches stay as they are.

    Raises:
        ValueError: the borders do not end where the tokens do, or contradict `position_ids`.
    """
    if not any(name in batch for name in _FLATTENED):
        return batch
    found = {name: one for name, one in batch.items() if name not in _FLATTENED}
    borders, numbers, tokens = batch.get("cu_seq_lens_q"), batch.get("seq_idx"), batch.get("input_ids")
    if (borders is None and numbers is None) or tokens is None:
        return found
    rows, length = tokens.shape
    if borders is None:
        assert numbers is not None
        begins = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)
    else:
        edges = borders.tolist() if isinstance(borders, Tensor) else list(borders)
        if rows != 1 or edges[:1] != [0] or edges[-1] != length or edges != sorted(edges):
            raise ValueError(f"cu_seq_lens_q {edges} must rise from 0 to {length}, the tokens of {rows} row(s)")
        begins = torch.zeros(1, length, dtype=torch.bool, device=tokens.device)
        begins[0, [edge for edge in edges if edge < length]] = True
    places = torch.arange(length, device=tokens.device).expand(rows, -1)
    positions = places - (places * begins).cummax(1).values
    if (given := found.get("position_ids")) is not None:
        breaks = F.pad(given[..., 1:] != given[..., :-1] + 1, (1, 0), value=True)
        if bool((breaks != begins).any()):
            raise ValueError(
                f"position_ids begin anew at {breaks.nonzero()[:, -1].tolist()}, the documents of the collator at "
                f"{begins.nonzero()[:, -1].tolist()}: give one of the two"
            )
        return found
    return {**found, "position_ids": positions}


def split_batch(batch: Batch, mesh: Mesh) -> Batch:
    """This cp rank's part of a batch of whole sequences, ready for the model.

    Packed documents are known by `position_ids` that begin anew, or by what a flattening collator says of them: no
    token attends to another document. Padding on the right, given by an `attention_mask`, becomes a document of its own
    that predicts nothing.

    Args:
        batch: `input_ids` [B, S] and `labels` [B, S] (−100 where nothing is predicted), or `shift_labels` in their
            place; `position_ids` [B, S] if they are not 0 … S − 1. Other per-token tensors [B, S, …] are split with
            them.
        mesh: this rank's place.

    Raises:
        ValueError: the sequences are not as long as the plan says, there are no labels, or the padding is not on the
            right.
    """
    ids, planned = batch["input_ids"], mesh.plan.spec.training.sequence_length
    if ids.dim() != 2 or ids.shape[1] != planned:
        raise ValueError(f"input_ids have shape {tuple(ids.shape)}, the plan says [B, sequence_length {planned}]")
    cp, rank = mesh.size("cp"), mesh.index("cp")
    return split_rows(batch, mesh.plan.spec.parallelism.cp_layout, cp, rank, mesh.device)


def split_rows(batch: Batch, layout: CpLayout, cp: int, rank: int, device: torch.device) -> Batch:
    """As `split_batch`, for sequences of any length that the layout can deal to cp ranks.

    Raises:
        ValueError: there are no labels, the padding is not on the right, or the layout cannot deal the sequences.
    """
    rows, length = batch["input_ids"].shape
    whole = dict(with_positions(batch))
    positions, mask = whole.pop("position_ids", None), whole.pop("attention_mask", None)
    if "shift_labels" not in whole:
        if "labels" not in whole:
            raise ValueError("the batch has neither labels nor shift_labels")
        whole["shift_labels"] = shift_labels(whole["labels"], positions)
    documents = None if positions is None else document_borders(positions)
    if mask is not None and not bool(mask.bool().all()):
        whole["shift_labels"] = without_padding(whole["shift_labels"], mask)
        documents = _with_padding(documents, mask)
        whole[REAL_TOKENS] = mask.bool()
    if positions is None:
        positions = local_positions(layout, cp, rank, length).expand(rows, -1)
    else:
        positions = split_sequence(positions, 1, layout, cp, rank)
    local = {
        name: split_sequence(tensor, 1, layout, cp, rank) if tensor.dim() >= 2 and tensor.shape[1] == length else tensor
        for name, tensor in whole.items()
    }
    local["position_ids"] = positions
    # transformers computes a loss only when it is given labels; ours looks at the shifted ones.
    local["labels"] = local["shift_labels"]
    ready: Batch = {name: to_device(tensor, device).contiguous() for name, tensor in local.items()}
    # None too is said: nobody has to look for documents among the positions.
    ready[DOCUMENTS] = documents if documents and any(len(borders) > 2 for borders in documents) else None
    return ready


def without_padding(shifted: Tensor, mask: Tensor) -> Tensor:
    """Padding neither predicts nor is predicted."""
    real = mask.bool()
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ValueError("attention_mask has padding before or between tokens: pad on the right")
    predicted = torch.zeros_like(real)
    predicted[:, :-1] = real[:, 1:]
    return shifted.masked_fill(~predicted, IGNORED_LABEL)


def _with_padding(documents: list[list[int]] | None, mask: Tensor) -> list[list[int]]:
    """The borders of documents, with the padding as one more."""
    length = mask.shape[1]
    rows = documents or [[0, length]] * len(mask)
    found = []
    for borders, real in zip(rows, mask.sum(1).tolist(), strict=True):
        kept = [border for border in borders if border < real]
        found.append(sorted({0, *kept, int(real), length}))
    return found


def stack(samples: Sequence[Any], numbers: Sequence[int] | None = None) -> Batch:
    """Samples [S] as a batch [B, S]; `tensors_of` says what a sample may be. `numbers` are theirs in the data set.

    Raises:
        ValueError: a sample is none, or samples differ in their names or lengths.
    """
    numbers = range(len(samples)) if numbers is None else numbers
    rows = [tensors_of(sample, number) for sample, number in zip(samples, numbers, strict=True)]
    for row, number in zip(rows, numbers, strict=True):
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"sample {number} has {', '.join(sorted(row))}, sample {numbers[0]} of the same batch "
                f"{', '.join(sorted(rows[0]))}"
            )
        for name, tensor in row.items():
            if tensor.shape != rows[0][name].shape:
                raise ValueError(
                    f"sample {number}: {name} have shape {list(tensor.shape)}, those of sample {numbers[0]} of the "
                    f"same batch have {list(rows[0][name].shape)}: truncate and pad samples to the plan's "
                    "sequence_length, or pack them (PackedPlanLoader)"
                )
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


_MASK = "attention_mask"


def ready_inputs(given: Batch, mesh: Mesh) -> Batch:
    """What the injected model takes, from what it is called with. A batch that is ready stays as it is.

    Under cp a batch may hold whole sequences, of the plan's length, or this rank's tokens of them. Ranks exchange what
    they have to know of one another: a collective call over cp where labels, a mask or positions are not ready.

    Args:
        given: named arguments: `input_ids` [B, S] or `inputs_embeds` [B, S, H], and perhaps `labels`, `shift_labels`,
            `position_ids`, `attention_mask` [B, S].
        mesh: this rank's place.

    Raises:
        RunError: the mask hides more than padding on the right, or a padded position has a label.
    """
    given = with_positions(given)
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None or tokens.dim() < 2 or given.get(ALONE) or given.get(PACKING) is not None:
        return given
    return _Sequences(given, tokens, mesh).ready()


class _Sequences:
    """The sequences of one batch, of which this rank holds a part or all."""

    def __init__(self, given: Batch, tokens: Tensor, mesh: Mesh) -> None:
        self.given, self.device = given, tokens.device
        self.rows, self.held = tokens.shape[0], tokens.shape[1]
        self.layout, self.cp, self.rank = mesh.plan.spec.parallelism.cp_layout, mesh.size("cp"), mesh.index("cp")
        self.group = mesh.parallel_group("cp")
        self.planned = mesh.plan.spec.training.sequence_length
        self.is_part = self.cp > 1 and self.held != self.planned
        self.length = self.held * self.cp if self.is_part else self.held

    def ready(self) -> Batch:
        found = dict(self.given)
        mask = found.pop(_MASK, None)
        if self.is_part and (mask is not None or not {"position_ids", "shift_labels"} <= found.keys()):
            self._check_part()
        real = None if mask is None else self._real(mask)
        positions, shifted = found.get("position_ids"), self._shifted(found, real)
        if DOCUMENTS not in found:
            documents = None
            if positions is not None and positions.dim() == 2 and positions.shape[1] == self.held:
                documents = document_borders(self._whole("position_ids"))
            found[DOCUMENTS] = self._alike(documents)
        if mask is not None and found[DOCUMENTS] is not None:
            raise RunError(
                "the model was called with an attention_mask and with position_ids that begin anew: with a mask "
                "transformers lets each token see the documents before its own. Leave out the mask, and documents are "
                "kept apart"
            )
        if real is not None:
            found[REAL_TOKENS] = self._part(real) if self.is_part else real
        if self.cp > 1 and not self.is_part:
            found = {name: self._part(one) if self._is_per_token(one) else one for name, one in found.items()}
        if positions is None:  # what goes by hidden states sees a rank's share of them alone
            own = local_positions(self.layout, self.cp, self.rank, self.length)
            found["position_ids"] = own.to(self.device).expand(self.rows, -1)
        if shifted:
            # transformers computes a loss only when it is given labels; ours looks at the shifted ones.
            found["labels"] = found["shift_labels"]
        return found

    def _check_part(self) -> None:
        """A collator that pads to the longest of a batch gives whole sequences that are no plan's.

        Raises:
            RunError: these are not this rank's tokens of sequences of the plan's length.
        """
        ids, both = self.given.get("input_ids"), f"sequences of the plan's sequence_length {self.planned}"
        if self.length != self.planned:
            raise everywhere(
                f"the model was called with {self.held} tokens: under cp {self.cp} it takes whole {both} (pad to that "
                f"length, padding='max_length'), or this rank's {self.planned // self.cp} tokens of them"
            )
        if ids is None:
            return
        if all(torch.equal(one, ids) for one in gather_tensors(ids, self.group)) and bool(
            (ids != ids.flatten()[0]).any()
        ):
            raise everywhere(
                f"every rank of cp {self.cp} was given the same {self.held} tokens: give whole {both} (pad to that "
                "length, padding='max_length'), or each rank its own tokens of them (split_batch)"
            )

    def _shifted(self, found: Batch, real: Tensor | None) -> bool:
        """Puts shifted labels into the batch, if it has any."""
        if self.given.get("shift_labels") is not None:
            if real is not None:
                _check_labels(self._whole("shift_labels"), real)
            return True
        if self.given.get("labels") is None:
            return False
        whole = shift_labels(self._whole("labels"))
        if real is not None:
            _check_labels(whole, real)
        found["shift_labels"] = self._part(whole) if self.is_part else whole
        return True

    def _whole(self, name: str) -> Tensor:
        """[B, S] of whole sequences."""
        tensor: Tensor = self.given[name]
        return gather_sequence(tensor, 1, self.layout, self.group) if self.is_part else tensor

    def _part(self, whole: Tensor) -> Tensor:
        return split_sequence(whole, 1, self.layout, self.cp, self.rank).contiguous()

    def _is_per_token(self, given: Any) -> bool:
        return isinstance(given, Tensor) and given.dim() >= 2 and given.shape[1] == self.length

    def _alike(self, documents: list[list[int]] | None) -> list[list[int]] | None:
        """A list for each row, as positions [1, S] stand for all of them; None where each row is one document."""
        if documents is None or all(len(borders) == 2 for borders in documents):
            return None
        return documents * self.rows if len(documents) == 1 else documents

    def _real(self, mask: Any) -> Tensor | None:
        """Where tokens are none of padding [B, S] of whole sequences; None without any padding.

        Raises:
            RunError: it hides something else.
        """
        if not isinstance(mask, Tensor) or mask.shape != (self.rows, self.held):
            what = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"that is a {type(mask).__name__}"
            raise RunError(
                f"the model was called with an attention_mask {what}: the runtime takes 1 for tokens and 0 for padding "
                f"on the right, [{self.rows}, {self.held}]. Causal masks and windows are the model's own; packed "
                "documents are kept apart by position_ids that begin anew with each, without a mask"
            )
        real = self._whole(_MASK).bool()
        if bool(real.all()):
            return None
        wrong = (real[:, 1:] & ~real[:, :-1]).any(1).nonzero()
        if len(wrong):
            raise RunError(
                f"row {int(wrong[0])} of the attention_mask has padding before or between tokens, which attention over "
                "split sequences does not hide: pad on the right (tokenizer.padding_side = 'right'); generate() and "
                "decoding with use_cache=True take prompts that are padded on the left"
            )
        return real


def _check_labels(shifted: Tensor, real: Tensor) -> None:
    """What is computed at padded positions is not what transformers computes there: no loss may look at it."""
    wrong = (~real & (shifted != IGNORED_LABEL)).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        raise RunError(
            f"row {row} has the label {int(shifted[row, place])} at position {place + 1}, and its attention_mask is 0 "
            f"from position {int(real[row].sum())} on: give padding the label {IGNORED_LABEL} "
            f"(labels[attention_mask == 0] = {IGNORED_LABEL})"
        )
